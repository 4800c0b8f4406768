"""Marks of a prompt for caches that resume only there (Anthropic, Bedrock)."""

from __future__ import annotations

from typing import Any

from ragorder.ordering import Ordering

__all__ = ["marked_documents"]


def marked_documents(ordering: Ordering[Any]) -> list[int]:
    """How many leading documents stand in front of each mark: the one place of this choice.

    A plain rule: one mark, behind the documents that an earlier request began with, too. What is asked for the first
    time is not worth its writing: 1.25 times the plain price. An `Orderer.for_cloud` chooses by itself.
    """
    if ordering.cloud is not None:
        return [mark for mark in ordering.breakpoints if mark]
    return [ordering.prefix_documents] if ordering.prefix_documents else []
