"""The cell and the record of answers by place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.fusion.fusion.arms import CORPUS_DOCUMENTS
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["PositionsCell", "PositionsRecord"]


class PositionsCell(SuiteCell):
    """`requests` of a `task` with so many `documents` each (the models were trained with up to 16), ordered for a
    prefix cache of `capacity_tokens`. `models` is a folder of suite fusion-training, instead of the models that come
    with ragorder."""

    task: Literal["look-up", "definition first", "link first"] = "look-up"
    documents: int = Field(8, ge=2, le=CORPUS_DOCUMENTS)
    requests: int = Field(500, ge=1)
    capacity_tokens: int | None = Field(65_536, ge=1)
    models: str | None = None

    @property
    def folder(self) -> Path | None:
        return None if self.models is None else Path(self.models)


class PositionsRecord(Record):
    """By request: whether the answer is `right`; the `rank` and the `place` (from 0) of the document that the question
    names, and for chains `other_place`, of the one that this refers to; the mean number of places that its documents
    moved; cached and prompt tokens, of a simulated engine."""

    called: ClassVar[str] = "a measurement of answers by place"

    type: Literal["quality-positions"] = "quality-positions"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "right", "rank", "place", "displacement", "cached_tokens", "prompt_tokens"

    @property
    def setting(self) -> PositionsCell:
        return PositionsCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.rows["right"])
