"""Where a cache that resumes only at marks (Anthropic's, Bedrock's) is given one."""

from __future__ import annotations

from typing import Any

from ragorder.ordering import Ordering

__all__ = ["marked_documents"]

# Expected reads from which on one write pays, at 1.25 and 0.1 times the price of a plain token.
_BREAK_EVEN = 0.28


def marked_documents(ordering: Ordering[Any]) -> list[int]:
    """How many leading documents stand in front of each mark: the one place of this choice.

    A mark behind those that an earlier request began with too, and behind those that later ones are expected to begin
    with often enough to pay for writing. At most two, of the four that a request may have.
    """
    uses = ordering.expected_uses
    expected = max((place for place, each in enumerate(uses, 1) if each >= _BREAK_EVEN), default=0)
    return sorted({ordering.prefix_documents, expected} - {0})
