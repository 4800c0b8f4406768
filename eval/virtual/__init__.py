"""Servers on a virtual clock: the product's own code in an event loop whose time is computed, not waited for."""

from __future__ import annotations

from ragorder.eval.virtual.engine import EngineCosts, VirtualEngine
from ragorder.eval.virtual.loop import DeadlockError, VirtualLoop, run_virtual
from ragorder.eval.virtual.search import SearchCosts, VirtualIVF, WholeSearches
from ragorder.eval.virtual.servers import Servers

__all__ = [
    "DeadlockError",
    "EngineCosts",
    "SearchCosts",
    "Servers",
    "VirtualEngine",
    "VirtualIVF",
    "VirtualLoop",
    "WholeSearches",
    "run_virtual",
]
