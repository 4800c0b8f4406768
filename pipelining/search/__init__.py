"""Searches of many callers that share their time (HedraRAG 4.2, 4.3)."""

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
