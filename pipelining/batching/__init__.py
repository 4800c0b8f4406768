"""Batches for a machine whose memory holds neither model nor index (RAGDoll)."""

from __future__ import annotations

from ragorder.pipelining.batching.backlog import best_batch
from ragorder.pipelining.batching.batchers import AllWaiting, Backlog, BacklogAware, Batcher, StaticBatch
from ragorder.pipelining.batching.degradation import Relief, is_shortage
from ragorder.pipelining.batching.kv import Context, KVTokens, TrieKV
from ragorder.pipelining.batching.power_law import PowerLaw
from ragorder.pipelining.batching.requests import AnswerChangedError, BatchedAnswer
from ragorder.pipelining.batching.retrieval import BatchRetrieval, ConcurrentRetrieval, PartitionedRetrieval, SearchTask
from ragorder.pipelining.batching.server import BatchedStream, DecoupledServer, ServingPlacement
from ragorder.pipelining.batching.trace import BatchEvent, RequestTrace

__all__ = [
    "AllWaiting",
    "AnswerChangedError",
    "Backlog",
    "BacklogAware",
    "BatchEvent",
    "BatchRetrieval",
    "BatchedAnswer",
    "BatchedStream",
    "Batcher",
    "ConcurrentRetrieval",
    "Context",
    "DecoupledServer",
    "KVTokens",
    "PartitionedRetrieval",
    "PowerLaw",
    "Relief",
    "RequestTrace",
    "SearchTask",
    "ServingPlacement",
    "StaticBatch",
    "TrieKV",
    "best_batch",
    "is_shortage",
]
