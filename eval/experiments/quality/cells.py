"""A cell of a suite about quality: which questions are asked, and with which documents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ragorder.eval.running.cells import SuiteCell, SuiteError

__all__ = ["QualityCell", "check_orders"]


class QualityCell(SuiteCell):
    """What one cell may say; what it does not say is as `ragorder.eval.experiments.quality.QualityBench` has it.

    `question_order` is that of the data set's questions. Without a `retriever` each question has its own documents, the
    first `top_k` of them; with one they are retrieved from those of all questions.
    """

    dataset: str
    question_order: Literal["data", "random"] = "data"
    top_k: int | None = Field(None, ge=1)
    document_words: int | None = Field(None, ge=1)
    retriever: Literal["bm25", "dense"] | None = None
    output_tokens: int = Field(32, ge=1)

    @field_validator("dataset")
    @classmethod
    def _known(cls, dataset: str) -> str:
        from ragorder.eval.experiments.quality.sources import DATASETS

        if dataset not in DATASETS:
            raise ValueError(f"unknown data set {dataset!r}: choose from {', '.join(DATASETS)}")
        return dataset

    @property
    def varies_with_seed(self) -> bool:
        """Whether another seed asks other questions, or asks them in another order."""
        return self.question_order == "random"


def check_orders(orders: tuple[str, ...], where: str) -> None:
    """Raises SuiteError for an order that `ragorder.eval.experiments.quality.Order` does not know."""
    from ragorder.eval.experiments.quality.base import QualityError
    from ragorder.eval.experiments.quality.orders import Order

    for order in orders:
        try:
            Order.parse(order)
        except QualityError as error:
            raise SuiteError(f"{where}: policies: {error}") from None
