"""Requests that arrive at random: suite open-loop, and the throughput under an objective."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import run_command

pytest.importorskip("scipy")

from ragorder.cli import main as ragorder
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.tables import Table
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.reading import Results, read_results
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.serving.experiment import ServingCell
from ragorder.eval.suites.serving.objective import objective_table
from ragorder.eval.suites.serving.report import make_part


class TestTheCell:
    @pytest.mark.parametrize(
        ("fields", "arrivals", "in_flight"),
        [({}, None, None), ({"arrivals": "poisson:2.5"}, "poisson:2.5", None), ({"arrivals": "none"}, None, 1)],
    )
    def test_takes_a_rate_or_serves_one_request_at_a_time(
        self, fields: dict[str, str], arrivals: str | None, in_flight: int | None
    ) -> None:
        cell = ServingCell.read({"workload": "paper", **fields}, "cell")
        assert (cell.arrivals, cell.in_flight) == (arrivals, in_flight)
        assert cell.fields == {"workload": "paper"} | ({"arrivals": arrivals} if fields else {})

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            *(({"arrivals": each}, r"poisson:2\.5") for each in ("fast", "poisson:0", "trace.jsonl")),
            ({"batch": True, "arrivals": "poisson:1"}, "leave out arrivals"),
        ],
    )
    def test_refuses_what_is_no_rate_and_arrivals_of_a_batch(self, fields: dict[str, object], said: str) -> None:
        with pytest.raises(SuiteError, match=said):
            ServingCell.read({"workload": "paper", **fields}, "cell")


def record(policy: str, times: list[float], tbt_ms: list[float] | None = None, **cell: object) -> RunRecord:
    count = len(times)
    rows: dict[str, list[float]] = {"ttft_ms": times, "prompt_tokens": [100] * count, "cached_tokens": [10] * count}
    if tbt_ms is not None:
        rows["tbt_ms"] = tbt_ms
    throughput = {"requests_per_s": 2.0, "tokens_per_s": 9.0}
    return RunRecord(suite="s", cell={"workload": "paper", **cell}, policy=policy, rows=rows, throughput=throughput)


class TestTheObjective:
    def test_is_five_times_the_time_without_load(self) -> None:
        groups = group_runs(
            [
                record("retrieval", [90, 100, 110] * 4, arrivals=None),
                record("retrieval", [100, 600] * 6, arrivals="poisson:2"),
                record("free", [100, 500] * 6, arrivals="poisson:2"),
            ]
        )
        table = objective_table(groups, "retrieval")
        retrieval, auto = table.rows
        assert [entry.text for entry in retrieval[1:]] == ["retrieval order", "500.0", "50.0", "1.00"]
        assert [entry.text for entry in auto[1:]] == ["ragorder (free)", "500.0", "100.0", "2.00"]
        assert (retrieval[3].note, auto[3].verdict) == ("baseline", "better")

    def test_is_not_known_without_an_unloaded_run_of_the_same(self) -> None:
        loaded = record("retrieval", [100.0] * 12, arrivals="poisson:2")
        other = record("retrieval", [100.0] * 12, arrivals=None, capacity_tokens=5)
        assert objective_table(group_runs([loaded, other]), "retrieval") is None
        assert objective_table(group_runs([other]), "retrieval") is None


class TestThroughput:
    @staticmethod
    def table(retrieval: list[float], auto: list[float]) -> Table:
        records = []
        for policy, rates in (("retrieval", retrieval), ("free", auto)):
            for seed, rate in enumerate(rates):
                run = record(policy, [100.0, 200.0] * 6)
                throughput = {"requests_per_s": rate, "tokens_per_s": 9.0}
                records.append(run.model_copy(update={"seed": seed, "throughput": throughput}))
        part = make_part(Suite.unlisted("s", baseline="retrieval"), Results(Path(), records=[*records]))
        return next(table for table in part.tables if table.title == "Throughput")

    def test_has_an_interval_over_three_seeds_or_more(self) -> None:
        table = self.table([1.0, 2.0, 4.0], [2.0, 4.0, 8.1])
        retrieval, auto = table.rows
        assert (retrieval[1].text, retrieval[1].note, retrieval[1].verdict) == ("2.33", "1.00 to 4.00", "")
        assert (auto[1].text, auto[1].verdict) == ("4.70", "better")
        assert auto[1].note == "+100.8\u00a0% [+97.3, +104.4]"
        assert "Student's interval over the seeds" in table.note

    def test_decides_nothing_where_seeds_disagree(self) -> None:
        assert self.table([1.0, 2.0, 4.0], [2.0, 1.0, 5.0]).rows[1][1].verdict == "no difference"

    def test_has_a_range_alone_for_two_seeds(self) -> None:
        table = self.table([1.0, 2.0], [2.0, 4.0])
        assert (table.rows[1][1].note, table.rows[1][1].verdict) == ("2.00 to 4.00", "")
        assert "too few for an interval" in table.note


class TestTheSuite:
    def test_is_served_at_its_rates(self, tmp_path: Path) -> None:
        """The simulated engine counts tokens; its times are not reported (`test_gpu_day` has those of a real one)."""
        done = run_command(ragorder, "eval", "run", "open-loop", "--reduced", "--seeds", "0", "-o", tmp_path)
        assert done.exit_code == 0, done.output
        runs = read_results(tmp_path).of(RunRecord, "open-loop")
        assert [(run.cell["arrivals"], run.policy) for run in runs] == [
            (arrivals, policy)
            for arrivals in (None, "poisson:1", "poisson:2")
            for policy in ("retrieval", "earned", "free")
        ]
        assert all(run.requests for run in runs)
