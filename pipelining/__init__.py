"""Overlap of retrieval and prefill (RAGCache 5.3, RAGCache++ 3.6)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ragorder.pipelining.load import EngineLoad, prefill_batch
from ragorder.pipelining.pipeline import Pipeline, PipelinedStream
from ragorder.pipelining.protocols import (
    AnswerChunk,
    CommittedRequest,
    EngineRequest,
    PipelineTrace,
    RequestBuilder,
    StreamingEngine,
    Usage,
)
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter, QueueFullError
from ragorder.pipelining.retrieval import Provisional, Retrieval, plain_retrieval, staged_retrieval
from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.sync import SyncPipeline, SyncStream
from ragorder.pipelining.warmup import Prefix, WarmUp

if TYPE_CHECKING:
    from ragorder.pipelining.batching.partitioned import PartitionedSearch
    from ragorder.pipelining.search import ContinuousIVF
    from ragorder.pipelining.staged import Stage, StagedHNSW, StagedIVF, StagedSearch

__all__ = [
    "AnswerChunk",
    "CacheAwareQueue",
    "CachedLengths",
    "CommittedRequest",
    "ConcurrencyLimiter",
    "ContinuousIVF",
    "EngineLoad",
    "EngineRequest",
    "PartitionedSearch",
    "Pipeline",
    "PipelineTrace",
    "PipelinedStream",
    "Prefix",
    "Provisional",
    "QueueFullError",
    "RequestBuilder",
    "Retrieval",
    "SpeculationGain",
    "Stage",
    "StagedHNSW",
    "StagedIVF",
    "StagedSearch",
    "StreamingEngine",
    "SyncPipeline",
    "SyncStream",
    "Usage",
    "WarmUp",
    "plain_retrieval",
    "prefill_batch",
    "staged_retrieval",
]

# Imported on first use: numpy and FAISS are not part of the core.
_LAZY = {
    "ContinuousIVF": "ragorder.pipelining.search",
    "PartitionedSearch": "ragorder.pipelining.batching.partitioned",
    **dict.fromkeys(("Stage", "StagedHNSW", "StagedIVF", "StagedSearch"), "ragorder.pipelining.staged"),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
