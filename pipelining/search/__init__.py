"""Searches of many callers that share their time (HedraRAG sections 4.2 and 4.3)."""

from __future__ import annotations

from ragorder.pipelining.search.continuous import ContinuousIVF
from ragorder.pipelining.search.costs import Budget
from ragorder.pipelining.search.handle import SearchHandle
from ragorder.pipelining.search.request import History

__all__ = [
    "Budget",
    "ContinuousIVF",
    "History",
    "SearchHandle",
]
