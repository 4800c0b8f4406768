"""The record of a quality run."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ragorder.eval.running.record import Record

__all__ = ["QualityRecord"]


class QualityRecord(Record):
    """Scores of one order, question by question."""

    called: ClassVar[str] = "a quality run"
    identified_by: ClassVar[tuple[str, ...]] = ("suite", "cell", "seed", "policy", "dry_run")
    is_run: ClassVar[bool] = False

    type: Literal["quality"] = "quality"
    rows: dict[str, Any] = Field(default_factory=dict)
    model: Any = None
    dry_run: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known_columns(cls, line: Any) -> Any:
        if isinstance(line, dict):
            rows = dict(line.get("rows") or {})
            return {**line, "rows": {name: values for name, values in rows.items() if isinstance(values, list)}}
        return line

    @property
    def model_name(self) -> str:
        return str((self.model or {}).get("name") or "")
