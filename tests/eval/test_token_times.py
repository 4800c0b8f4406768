"""The time between tokens (TBT, RAGCache 5.4) in results, records and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from ragorder.benchmarks.ragcache.reordering import Reordering
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineCompletion, time_between_tokens
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.report.declared import tables_of
from ragorder.eval.report.tables import Table
from ragorder.eval.running.load import serve_in_turn
from ragorder.eval.running.policies import make_policy
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.runner import Run
from ragorder.eval.running.suite import load_suites
from ragorder.eval.suites.serving.report import make_part as make_serving_part

TIMES_S = (0.010, None, 0.030, 0.020)
"""Of four requests, the second with one token."""


class TimedEngine(SimEngine):
    """Each request takes the next of the times."""

    def __init__(self, times_s: Sequence[float | None]) -> None:
        super().__init__(block_size=16)
        self._times_s = iter(times_s)

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion:
        return replace(super().generate(token_ids), ttft_s=0.1, total_s=1.0, tbt_s=next(self._times_s))


def run_on(engine: SimEngine) -> Run:
    trace = trace_of_workload(make_workload("paper-shuf", 0, requests=4), 4)
    prompts = NumberedPrompts()
    run = Run(trace, "retrieval", make_policy("retrieval", engine=engine, prompts=prompts, seed=0), engine, prompts)
    for _ in serve_in_turn(run, engine):
        pass
    return run


def table_of(columns: dict[str, Any]) -> Table:
    line = {"type": "run", "suite": "table-1", "cell": {}, "seed": 0, "policy": "retrieval", "engine": {"name": "x"}}
    record = RunRecord.model_validate({**line, "rows": columns})
    return make_serving_part(load_suites()["table-1"], Results(Path(), records=[record])).tables[0]


def test_is_the_mean_over_an_answer() -> None:
    assert time_between_tokens(1.0, 4.0, 7) == 0.5
    assert time_between_tokens(1.0, 1.0, 1) is None


def test_of_requests_that_have_one() -> None:
    run = run_on(TimedEngine(TIMES_S))
    assert run.columns().tbt_ms == [10.0, None, 30.0, 20.0]


@pytest.mark.parametrize("engine", [SimEngine(block_size=16), TimedEngine([None] * 4)], ids=["no clock", "one token"])
def test_is_none_where_there_is_none(engine: SimEngine) -> None:
    assert run_on(engine).columns().tbt_ms is None


def test_stands_beside_the_time_to_the_first_token() -> None:
    table, plain = (table_of(asdict(run_on(TimedEngine(times_s)).columns())) for times_s in (TIMES_S, [None] * 4))
    values = dict(zip(table.headings, (entry.text for entry in table.rows[0]), strict=True))
    assert (values["TBT p50, ms"], values["TBT p99, ms"]) == ("20.0", "29.8")
    assert not any("TBT" in heading for heading in plain.headings)


@pytest.mark.parametrize("times_ms", [[10.0, None, 30.0, 20.0], None])
def test_of_queues_are_in_a_table_of_their_own(times_ms: list[float | None] | None) -> None:
    rows = {"prompt_tokens": [9] * 4, "cached_tokens": [0] * 4, "ttft_ms": [5.0] * 4}
    rows |= {} if times_ms is None else {"tbt_ms": times_ms}
    cell = {"workload": "mix8", "load": 2.0}
    line = {"type": "reordering", "suite": "reordering", "cell": cell, "seed": 0, "engine": {"name": "x"}}
    records = [
        Reordering.record.model_validate({**line, "rows": rows, "policy": policy}) for policy in ("fcfs", "reordered")
    ]
    _, *tables = tables_of(Reordering, load_suites()["reordering"], Results(Path(), records=records))
    shown = [[entry.text for entry in row[1:]] for table in tables for row in table.rows]
    assert shown == [["5.0, 5.0, 5.0"] * 2, *([] if times_ms is None else [["20.0, 29.8"] * 2])]
