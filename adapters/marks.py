"""Cache breakpoints of a prompt (Anthropic, Bedrock)."""

from __future__ import annotations

from typing import Any

from ragorder.ordering import Ordering


def marked_documents(ordering: Ordering[Any]) -> list[int]:
    """Return the number of leading documents before each breakpoint: one, after the documents that an earlier
    request also began with. New documents are not worth the price of writing."""
    if ordering.cloud is not None:
        return [mark for mark in ordering.breakpoints if mark]
    return [ordering.prefix_documents] if ordering.prefix_documents else []
