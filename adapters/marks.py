"""Cache breakpoints of a prompt (Anthropic, Bedrock)."""

from __future__ import annotations

from typing import Any

from ragorder.ordering import Ordering


def marked_documents(ordering: Ordering[Any]) -> list[int]:
    """Return the number of documents before each breakpoint. Without a cloud's rules there is at most one, after the
    documents that also began an earlier request."""
    if ordering.cloud is not None:
        return [mark for mark in ordering.breakpoints if mark]
    return [ordering.prefix_documents] if ordering.prefix_documents else []
