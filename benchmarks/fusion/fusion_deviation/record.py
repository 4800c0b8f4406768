"""The record of the deviation of reused KV."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ragorder.benchmarks.fusion.fusion_deviation.cells import DeviationCell
from ragorder.eval.running.record import Record

__all__ = ["DeviationRecord"]


class DeviationRecord(Record):
    """Copies of one kind. Column `deviation`: of each prompt's documents in the second layer, relative to full
    attention's KV. Facts, over all prompts: that by layer (`layers`), by document and tenth of it (`places`), and the
    share of tokens that each selection chose there (`chosen`). Of preprocessed copies also `related`: over all
    questions the share of documents with a neighbour retrieved beside them, and of their neighbours that are."""

    called: ClassVar[str] = "a measurement of KV deviation"
    facts_needed: ClassVar[tuple[str, ...]] = ("layers", "places", "chosen", "tokens")

    type: Literal["fusion-deviation"] = "fusion-deviation"
    cell: dict[str, Any]
    facts: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("deviation",)

    @property
    def setting(self) -> DeviationCell:
        return DeviationCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.rows["deviation"])

    @model_validator(mode="after")
    def _shaped(self) -> Self:
        places = [self.facts["places"], *self.facts["chosen"].values()]
        if len({(len(table), *map(len, table)) for table in places}) > 1:
            raise ValueError("places are not of one shape")
        return self
