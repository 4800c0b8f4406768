"""Cells of the suites of kind "quality"."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell

__all__ = ["QualityCell"]


class QualityCell(SuiteCell):
    """The fields of `QuestionsSpec` and `AnswererSpec` that a suite may set."""

    dataset: Literal["hotpotqa", "musique", "2wikimultihopqa", "triviaqa", "nq"]
    question_order: Literal["data", "random"] = "data"
    top_k: int | None = Field(None, ge=1)
    document_words: int | None = Field(None, ge=1)
    retriever: Literal["bm25", "dense"] | None = None
    output_tokens: int = Field(32, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.question_order == "random"
