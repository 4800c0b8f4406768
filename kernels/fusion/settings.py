"""Settings of fused requests, readable without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fusion"]


@dataclass(frozen=True, slots=True)
class Fusion:
    """How a request reuses documents off its cached prefix.

    `recompute`: share of their tokens recomputed, 0 to 1; `select`: which ones (`kernels.fusion.selection`). `rounds`
    of selection: in the first by `select`, then by what the tokens chosen so far attend to. Raises ValueError.
    """

    recompute: float = 0.15
    select: str = "query"
    rounds: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is {self.recompute}: give a share of the reused tokens, from 0 to 1")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: give 1 or more")
