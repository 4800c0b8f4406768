"""Cells of the deviation of reused KV."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell

ALONE, PREPROCESSED = "alone", "preprocessed"


class DeviationCell(SuiteCell):
    """Prompts of `documents` best ones of a corpus, cut to `document_tokens`. Preprocessing takes the `neighbours` most
    similar ones, as `by` says (see `ragorder fuse`). `recompute`: the share of tokens that selections choose."""

    corpus: str = "pydocs"
    documents: int = Field(10, ge=2)
    document_tokens: int = Field(200, ge=10)
    neighbours: int = Field(10, ge=1)
    by: str = "embedding"
    recompute: float = Field(0.15, gt=0, lt=1)

    @model_validator(mode="after")
    def _known_choice(self) -> Self:
        from ragorder.kernels.preprocessing.neighbours import neighbours

        neighbours.check(self.by.partition(":")[0])
        return self
