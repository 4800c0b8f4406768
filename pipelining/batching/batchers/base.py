"""Interface of a batching policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Backlog", "Batcher"]


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests `waiting` for a worker, those `running` on it already, and when others are expected, in seconds from
    now."""

    waiting: int
    running: int = 0
    arrivals_s: Sequence[float] = ()

    @property
    def unfinished(self) -> int:
        return self.waiting + self.running


class Batcher(Protocol):
    def size(self, backlog: Backlog) -> int:
        """How many requests may run at once now, at least 1, for a backlog of at least one unfinished request. Chosen
        before each batch, or at each step where requests join."""

    def learn(self, size: int, seconds: float) -> None:
        """A batch that has ended; where requests join, one request, and how many ran beside it on average, itself
        included."""
