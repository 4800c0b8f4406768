"""The record of a real model's answers from reused KV."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ragorder.benchmarks.fusion.fused_answers.ways import AnswersCell
from ragorder.eval.running.record import Record

__all__ = ["FIGURES", "AnswersRecord", "column"]

FIGURES = ("kl", "em", "f1", "contains", "recomputed")


def column(figure: str, share: float) -> str:
    """The name of a figure's column, such as "kl 0.05"."""
    return f"{figure} {share:g}"


class AnswersRecord(Record):
    """One way to reuse KV. Columns: the questions' `id`, tokens of the `prompt` and of it `reused`; and for each share
    the KL divergence in nats from full attention's distribution of the first token to this one (`kl`), exact match
    (`em`), `f1`, whether the answer `contains` an accepted one, the tokens `recomputed`, and the `answer`."""

    called: ClassVar[str] = "a measurement of answers from reused KV"

    type: Literal["fused-answers"] = "fused-answers"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        figures = (*FIGURES, "answer")
        return ("id", "prompt", "reused", *(column(figure, share) for share in self.shares for figure in figures))

    @property
    def shares(self) -> list[float]:
        return [float(name.removeprefix("kl ")) for name in self.rows if name.startswith("kl ")]

    @property
    def setting(self) -> AnswersCell:
        return AnswersCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.rows["id"])
