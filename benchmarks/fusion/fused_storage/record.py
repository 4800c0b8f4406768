"""The cell and the record of what KV is held."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["StorageCell", "StorageRecord"]


class StorageCell(SuiteCell):
    """Requests for `documents` of `document_tokens` tokens, at an engine with room for `device_tokens`, unlimited by
    default. 60 % of them are any of the `known` ones, which were computed before the first request, 30 % any of the
    `uploads` that several users share, and 10 % are asked for once (FusionRAG 5.3.3; the numbers are ours)."""

    documents: int = Field(10, ge=1)
    document_tokens: int = Field(200, ge=1)
    known: int = Field(1_000, ge=10)
    uploads: int = Field(1_000, ge=10)
    device_tokens: int | None = Field(None, ge=1)


class StorageRecord(Record):
    """By request: its documents, those of which KV was `found`, those `computed`, of these those computed `again`; and
    the tokens of KV `held` afterwards."""

    called: ClassVar[str] = "a count of KV held"
    is_run: ClassVar[bool] = False

    type: Literal["fused-storage"] = "fused-storage"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "documents", "found", "computed", "again", "held"
