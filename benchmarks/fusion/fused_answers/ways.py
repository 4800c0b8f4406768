"""The ways to reuse documents' KV that a real model answers from, and a cell of their suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.kernels.fusion.settings import Fusion

__all__ = ["FULL", "PLAIN", "REUSE", "WAYS", "AnswersCell", "Way"]

FULL, REUSE, PLAIN = "full attention", "full reuse", "FusionRAG, online only"


class AnswersCell(SuiteCell):
    """The `documents` best ones of each question of a corpus, of at most `document_words` words, and the `shares` of
    the reused tokens that are recomputed. Preprocessing takes the `neighbours` most similar ones, as `by` says (see
    `ragorder fuse`). Answers of one token (`output_tokens`) are not scored."""

    corpus: str = "nqopen"
    documents: int = Field(5, ge=2)
    # Read from results it is a list.
    shares: Annotated[tuple[float, ...], Field(strict=False)] = (0.05, 0.15, 0.3, 0.5)
    document_words: int | None = Field(None, ge=1)
    neighbours: int = Field(4, ge=1)
    by: str = "embedding"
    output_tokens: int = Field(16, ge=1)


@dataclass(frozen=True, slots=True)
class Way:
    """`fusion`: without the share (None: full attention). `shares`: its own instead of the cell's, which have `more`
    in addition. `preprocessed`: KV computed after that of similar documents, too."""

    fusion: Fusion | None
    shares: Sequence[float] | None = None
    more: Sequence[float] = ()
    preprocessed: bool = False

    def shares_of(self, cell: AnswersCell) -> Sequence[float]:
        return (*self.more, *cell.shares) if self.shares is None else self.shares

    def at(self, share: float) -> Fusion | Literal["exact"]:
        return "exact" if self.fusion is None else replace(self.fusion, recompute=share)


WAYS: Mapping[str, Way] = {
    FULL: Way(None, shares=(1.0,)),
    REUSE: Way(Fusion(select="none"), shares=(0.0,)),
    PLAIN: Way(Fusion()),
    "FusionRAG": Way(Fusion(), more=(0.0,), preprocessed=True),
    "CacheBlend": Way(Fusion(select="deviation")),
    "EPIC": Way(Fusion(select="head")),
    "random": Way(Fusion(select="random")),
    "two rounds": Way(Fusion(rounds=2)),
}
