"""Suite gpu-day: other suites in one command, within a budget of time, over several calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command

pytest.importorskip("torch")
pytest.importorskip("scipy")

import torch

from ragorder.benchmarks.kernels.embedded.experiment import EmbeddedCell
from ragorder.benchmarks.kernels.gpu_day.clock import DayClock
from ragorder.benchmarks.kernels.gpu_day.parts import MINUTES, PARTS, Part
from ragorder.benchmarks.kernels.gpu_day.record import GpuDayCell
from ragorder.benchmarks.kernels.gpu_day.report import make_part
from ragorder.cli import main as ragorder
from ragorder.eval.running.options import Options
from ragorder.eval.running.reading import Results, read_results
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import load_suites
from ragorder.eval.suites.serving.experiment import Serving
from ragorder.eval.suites.serving.report import make_part as serving_part

WORKLOADS = ("workload=paper,paper-shuf", "capacity_tokens=8000")
TWO_JOBS = Part("two workloads", "table-1", 1, WORKLOADS, WORKLOADS, policies=("retrieval", "free"), small_limit=12)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts "kernel" and "table-1" are two runs each on the simulated engine."""
    monkeypatch.setitem(PARTS, "kernel", TWO_JOBS)  # type: ignore[arg-type]
    monkeypatch.setitem(PARTS, "table-8", TWO_JOBS)  # type: ignore[arg-type]


def day(folder: Path, *options: Any) -> Results:
    done = run_command(ragorder, "eval", "run", "gpu-day", "--set", "small=true", "-o", folder, *options)
    assert done.exit_code == 0, done.output
    return read_results(folder)


def states(results: Results) -> dict[str, list[str]]:
    """By part what the report says: state, jobs, left out."""
    [table] = make_part(load_suites()["gpu-day"], results).tables
    return {row[0].text: [entry.text for entry in row[3:6]] for row in table.rows}


class TestThePlan:
    def test_the_parts_fill_the_day_and_a_profile_comes_first(self) -> None:
        assert sum(part.minutes for part in PARTS.values()) == MINUTES == 45
        assert next(iter(PARTS)) == "profile"
        assert load_suites()["gpu-day"].policies == tuple(PARTS)

    @pytest.mark.parametrize("small", [False, True])
    @pytest.mark.parametrize("name", PARTS)
    def test_each_part_is_a_form_of_a_suite_that_is_there(self, name: str, small: bool) -> None:
        suite = PARTS[name].of_suite(small=small)
        assert suite.cells and set(suite.policies) <= set(load_suites()[suite.name].policies)
        shapes = {cell.shape for cell in suite.cells if isinstance(cell, EmbeddedCell)}
        assert shapes <= {"tiny" if small else "mistral-7b"}

    def test_what_the_issue_asks_for_is_among_them(self) -> None:
        suites = {part.suite for part in PARTS.values()}
        assert {"table-1", "table-4", "table-8", "table-10", "attention-kernel", "open-loop"} <= suites
        assert {"tiers", "figure-15", "figure-17", "figure-18"} <= set(PARTS)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_without_a_gpu_it_says_what_to_do(self, tmp_path: Path) -> None:
        done = run_command(ragorder, "eval", "run", "gpu-day", "-o", tmp_path)
        assert done.exit_code == 0, done.output
        results = read_results(tmp_path)
        assert {line.policy for line in results.unavailable} == set(PARTS)
        assert all("--set small=true" in line.reason for line in results.unavailable)


class TestTheClock:
    @pytest.fixture
    def time_s(self) -> list[float]:
        return [0.0]

    @pytest.fixture
    def clock(self, time_s: list[float]) -> Iterator[DayClock]:
        yield DayClock(GpuDayCell(minutes=MINUTES, call_minutes=10), now=lambda: time_s[0])

    def test_a_part_has_its_minutes_and_ends_before_a_job_that_would_not_fit(self, clock: DayClock) -> None:
        assert clock.part_left_s("kernel") == 60 * PARTS["kernel"].minutes == 360
        clock.took("kernel", 150)
        assert not clock.ended("kernel")
        clock.took("kernel", 100)
        # 110 seconds are left, and a job took 150.
        assert clock.ended("kernel") and not clock.ended("table-1")

    def test_a_shorter_day_has_shorter_parts(self) -> None:
        assert DayClock(GpuDayCell(minutes=9)).part_left_s("kernel") == 72

    def test_a_call_begins_no_job_that_it_has_no_time_for(self, clock: DayClock, time_s: list[float]) -> None:
        time_s[0] = 599
        assert clock.has_time("kernel")  # the first of a call
        clock.took("table-10", 1)
        assert not clock.has_time("kernel")  # expected to take a quarter of the part
        time_s[0] = 500
        assert clock.has_time("kernel")
        clock.took("kernel", 120)
        assert not clock.has_time("kernel")


class TestADay:
    def test_goes_on_where_the_last_call_ended(self, simulated: None, tmp_path: Path) -> None:
        options = ["--policy", "kernel", "--policy", "table-8", "--set", "call_minutes=0.000001"]
        first = day(tmp_path, *options)
        assert states(first)["kernel"] == ["goes on with the next call", "1", "–"]
        assert states(first)["table-8"] == ["not begun", "0", "–"]
        second = day(tmp_path, *options)
        assert states(second)["kernel"] == ["whole", "2", "0"]
        measured = second.of(RunRecord, "table-1")
        assert {(record.cell["workload"], record.policy) for record in measured} == {
            (workload, policy) for workload in ("paper", "paper-shuf") for policy in ("retrieval", "free")
        }
        assert {record.engine["name"] for record in measured} == {"sim"}
        # What one part has measured another finds there.
        assert states(day(tmp_path, *options))["table-8"][0] == "nothing to measure"

    def test_a_part_without_time_says_what_it_left_out(self, simulated: None, tmp_path: Path) -> None:
        results = day(tmp_path, "--policy", "kernel", "--set", "minutes=0.000001")
        assert states(results)["kernel"] == ["out of time", "1", "1"]
        again = day(tmp_path, "--policy", "kernel", "--set", "minutes=45")
        assert len(again.of(RunRecord, "table-1")) == 2  # it has ended

    def test_a_part_that_fails_is_said_and_is_no_end_of_the_others(
        self, simulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure = Serving.measure
        calls: list[Any] = []

        def fails_once(self: Serving, *arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise RuntimeError("CUDA out of memory")
            return measure(self, *arguments)

        monkeypatch.setattr(Serving, "measure", fails_once)
        results = day(tmp_path, "--policy", "kernel")
        assert [line.reason for line in results.unavailable] == ["RuntimeError: CUDA out of memory"]
        assert states(results)["kernel"] == ["goes on with the next call", "2", "–"]
        assert states(day(tmp_path, "--policy", "kernel"))["kernel"] == ["whole", "3", "0"]

    def test_options_of_a_part_are_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.benchmarks.kernels.gpu_day.parts.shape_folder", Path)
        asked = Options(seeds=(3, 4), policies=("table-1",), parameters=("small=true",), limit=50)
        found = PARTS["table-1"].options(asked, small=False)
        assert (found.engine, found.model, found.limit) == ("torch", Path("qwen2.5-7b"), 50)
        assert (found.seeds, found.policies, found.parameters) == ((3,), None, ())
        assert PARTS["kernel"].options(asked, small=False).engine == "sim"


@pytest.mark.slow
class TestASmallDay:
    def test_runs_whole_on_the_cpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        results = day(tmp_path / "day")
        assert {name: state for name, (state, *_) in states(results).items()} == dict.fromkeys(PARTS, "whole")
        served = results.of(RunRecord, "open-loop")
        assert served and all(record.engine["name"] == "torch" for record in served)
        assert any(record.rows.get("tbt_ms") for record in served)
        told = serving_part(load_suites()["open-loop"], results)
        assert "Throughput under an objective" in {table.title for table in told.tables}
        [words] = make_part(load_suites()["gpu-day"], results).words
        assert "nothing about a GPU" in words
