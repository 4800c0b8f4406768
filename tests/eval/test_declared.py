"""Measurements that are declared: their records, their tables, and what a run leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field, ValidationError
from support.suites import suite_of

from ragorder.eval.report.declared import Column, TableForm, figure, policy_column, ratio, tables_of
from ragorder.eval.report.tables import Table
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.load import silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite, experiments


class SearchCell(SuiteCell):
    size: int = Field(10, ge=1)
    held: str = "mine"


class Searches(Experiment):
    kind = "searches"
    cell = SearchCell
    columns = ("ms",)
    facts = ("recall",)
    policies: ClassVar[Any] = ("plain", "fast")
    counts = "policies"
    simulated = True
    tables: ClassVar[Any] = [
        TableForm(
            "Searches of {cell.held}",
            [
                Column("size", lambda row: str(row.cell.size)),
                policy_column("search", {"fast": "the fast one"}),
                figure("found, %", "recall", scale=100, spread=True),
                figure("longest, ms", lambda run: max(run.rows["ms"]), over=max),
                ratio("of plain", "recall", "plain", tone=lambda row, value: "good" if value > 1 else ""),
            ],
            "Mean of {seeds} seeds.",
            labels=2,
            by=("held",),
            sort=("size",),
        )
    ]

    def applies(self, suite: Suite, cell: SearchCell, policy: str) -> bool:
        return policy == "fast" or cell.size == 10

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        raise NotImplementedError


def record(policy: str, recall: float | None, seed: int = 0, **cell: Any) -> Record:
    facts = {"recall": recall}
    return Searches.record(suite="mine", policy=policy, seed=seed, cell=cell, rows={"ms": [1, seed + 2]}, facts=facts)


def tables(*records: Record) -> list[Table]:
    return tables_of(Searches, Suite.unlisted("mine"), Results(Path(), records=list(records)))


def test_the_record_has_the_declared_columns_and_facts() -> None:
    found = record("plain", 0.5)
    assert (found.type, found.line()["rows"], found.is_run) == ("searches", {"ms": [1, 2]}, False)
    with pytest.raises(ValidationError, match="columns are missing"):
        Searches.record(suite="mine", policy="plain", rows={}, facts={"recall": 1})
    with pytest.raises(ValidationError, match="facts are missing"):
        Searches.record(suite="mine", policy="plain", rows={"ms": []})
    with pytest.raises(ValidationError):
        Searches.record(type="others", suite="mine", policy="plain", rows={"ms": []}, facts={"recall": 1})


def test_a_table_has_a_row_for_each_policy_of_the_groups_that_agree() -> None:
    records = [record("plain", 0.5, seed, size=20) for seed in (0, 1)]
    records += [record("fast", 0.25 * (seed + 2), seed, size=20) for seed in (0, 1)]
    first, other = tables(*records, record("fast", None), record("plain", 1.0, held="another"))
    assert (first.title, first.note, first.labels) == ("Searches of mine", "Mean of 2 seeds.", 2)
    assert [[entry.text for entry in row] for row in first.rows] == [
        ["10", "the fast one", "–", "2.0", "–"],
        ["20", "plain", "50.0", "3.0", "1.00"],
        ["20", "the fast one", "62.5", "3.0", "1.25"],
    ]
    assert (first.rows[2][2].note, first.rows[2][4].tone, first.rows[1][4].tone) == ("50.0 to 75.0", "good", "")
    assert (other.title, len(other.rows)) == ("Searches of another", 1)


SUITE = """
title = "Searches"
source = "tests"
says = "Something."
kind = "searches"
policies = ["plain", "fast"]
baseline = "plain"
[sweep]
size = [10, 20]
[report]
chart = "searches"
"""


def plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job | Missing]:
    monkeypatch.setitem(experiments(), "searches", Searches)
    with Store(folder) as store:
        return list(Searches(Options(seeds=(0,)), store, "s", silent).plan(suite_of(SUITE)))


def test_what_does_not_apply_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job for job in plan(tmp_path, monkeypatch) if isinstance(job, Job)]
    assert [(job.cell.size, job.policies) for job in jobs] == [(10, ("plain",)), (10, ("fast",)), (20, ("fast",))]
