"""Stores: where the bytes of what a tier holds are kept when they are in no engine's memory."""

from ragorder.kernels.store.counters import StoreCounters
from ragorder.kernels.store.folder import StoreRefusedError
from ragorder.kernels.store.store import ChunkStore
from ragorder.kernels.store.survey import Survey, survey

__all__ = ["ChunkStore", "StoreCounters", "StoreRefusedError", "Survey", "survey"]
