"""Cells of FusionRAG's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["CORPUS_DOCUMENTS", "RATIOS", "Arm", "Copies", "Order"]

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)
"""Shares of the reused tokens that are recomputed."""


CORPUS_DOCUMENTS = 24


Copies = Literal["alone", "similar", "similar, best first", "retrieved", "in front", "served"]
"""What a document's KV was computed after: the system prompt alone; the KV of the documents most like it (FusionRAG
3.1), the most similar one last, or first (Eq. 10); the KV of others of the same prompt, or of those before it there,
which no preprocessing can know; some other documents of an earlier prompt (Cache-Craft)."""


Select = Literal["query", "deviation", "inter", "head", "random"]


@dataclass(frozen=True, slots=True)
class Arm:
    """`exact`: the share of a prompt's documents that an exact prefix holds, as ordering finds it; of these nothing is
    recomputed. In `rounds` after the first, those are taken that the tokens recomputed so far attend to. `on_engine`:
    whether the engine can do it."""

    select: Select = "query"
    copies: Copies = "alone"
    exact: float = 0.0
    rounds: int = 1
    ratios: Sequence[float] = RATIOS

    @property
    def on_engine(self) -> bool:
        return self.copies == "alone"


Order = Literal["in front", "behind", "any"]
"""Where the document stands that another one refers to."""
