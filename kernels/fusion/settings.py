"""Settings of fused requests, readable without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fusion"]


@dataclass(frozen=True, slots=True)
class Fusion:
    """How a request reuses documents off its cached prefix.

    `recompute`: share of their tokens computed anew, 0 to 1; `select`: which ones (`kernels.fusion.selection`);
    `as_if_last`: as though their document came last (`kernels.fusion.as_if_last`). Raises ValueError.
    """

    recompute: float = 0.15
    select: str = "query"
    as_if_last: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is {self.recompute}: give a share of the reused tokens, from 0 to 1")
