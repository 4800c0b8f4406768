"""Policies that choose how many requests run at once, one a file."""

from __future__ import annotations

from ragorder.pipelining.batching.batchers.all_waiting import AllWaiting
from ragorder.pipelining.batching.batchers.backlog_aware import BacklogAware
from ragorder.pipelining.batching.batchers.base import Backlog, Batcher
from ragorder.pipelining.batching.batchers.static import StaticBatch

__all__ = ["AllWaiting", "Backlog", "BacklogAware", "Batcher", "StaticBatch"]
