"""The record of a replay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import TypeAdapter, model_validator

from ragorder.eval.replay.report import ReplayReport
from ragorder.eval.running.record import Record

__all__ = ["ReplayRecord", "replay_line"]


class ReplayRecord(Record):
    """One log under all policies and at all capacities; `facts` are those of `ReplayReport.as_json`."""

    called: ClassVar[str] = "a replay"
    identified_by: ClassVar[tuple[str, ...]] = ("suite", "session")
    is_run: ClassVar[bool] = False

    type: Literal["replay"] = "replay"
    policy: str = ""
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _readable(self) -> Self:
        self.report  # noqa: B018
        return self

    @cached_property
    def report(self) -> ReplayReport:
        facts, engine, speed = self.facts, self.engine, self.facts.get("speed") or {}
        fields = {name: facts[name] for name in ("log", "overlap", "capacities", "left_out")}
        fields |= {name: engine[name] for name in ("block_size", "timed", "prefill_tokens_per_s")}
        fields |= {name: speed[name] for name in ("processes", "seconds") if name in speed}
        return TypeAdapter(ReplayReport).validate_python(fields | {"figures": facts["runs"]})


def replay_line(report: ReplayReport, session: str) -> Mapping[str, Any]:
    """Return the line of results.jsonl on this replay."""
    facts = report.as_json()
    suite = "replay-" + (re.sub(r"[^a-z0-9]+", "-", report.log.name.lower()).strip("-") or "log")
    line = {"type": "replay", "session": session, "suite": suite, "cell": {}, "seed": 0, "rows": {}}
    return line | {"engine": facts.pop("engine"), "facts": facts}
