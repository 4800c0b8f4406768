"""Settings of fused requests, readable without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fusion"]


@dataclass(frozen=True, slots=True)
class Fusion:
    """How a request reuses documents outside its cached prefix. `select` chooses the share of tokens to `recompute`; in
    further `rounds` the attention of these chooses more."""

    recompute: float = 0.15
    select: str = "query"
    rounds: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is {self.recompute}: give a share of the reused tokens, from 0 to 1")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: give 1 or more")
