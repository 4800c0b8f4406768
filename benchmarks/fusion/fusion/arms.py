"""The ways to reuse documents' KV that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ARMS",
    "BASELINE",
    "CORPUS_DOCUMENTS",
    "NEIGHBOURS",
    "RATIOS",
    "REUSE",
    "Arm",
    "Copies",
    "Select",
]

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)
"""Shares of the reused tokens that are recomputed."""

_DEVIATING = (0.0, 0.05)

BASELINE, REUSE = "full attention", "full reuse"

CORPUS_DOCUMENTS = 24

NEIGHBOURS = 4
"""Similar documents of the corpus that preprocessing takes."""

Copies = Literal["alone", "similar", "similar, best first", "retrieved", "in front", "served"]
"""What a document's KV was computed behind: the system prompt alone; the KV of the documents most like it (FusionRAG
3.1), of which the most similar one comes last, or first (Eq. 10); the KV of others of the same prompt, or of those that
stand in front of it there, which no preprocessing can know; some other documents of an earlier prompt (Cache-Craft)."""

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


ARMS: Mapping[str, Arm] = {
    BASELINE: Arm(ratios=(1.0,)),
    REUSE: Arm(ratios=(0.0,)),
    "random": Arm("random"),
    "EPIC": Arm("head"),
    "CacheBlend": Arm("deviation"),
    "Cache-Craft": Arm("inter", copies="served"),
    "FusionRAG, online only": Arm(),
    "FusionRAG": Arm(copies="similar"),
    "two rounds": Arm(rounds=2),
    "with ordering": Arm(exact=0.5),
    "FusionRAG, best first": Arm(copies="similar, best first", ratios=_DEVIATING),
    "behind those retrieved with it": Arm(copies="retrieved", ratios=_DEVIATING),
    "behind those in front of it": Arm(copies="in front", ratios=_DEVIATING),
}
"""By name: the systems of the paper's figures, ours, and copies to explain what preprocessing leaves."""
