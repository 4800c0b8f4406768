"""A GPU day: vLLM in pieces, and the parts that are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import run_command

pytest.importorskip("torch")
pytest.importorskip("scipy")

from ragorder.benchmarks.gpu import day
from ragorder.benchmarks.gpu.stock import SERVERS
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import load_suites


def test_the_parts_fill_the_day() -> None:
    assert sum(part.minutes for part in day.PARTS.values()) == day.MINUTES


@pytest.mark.parametrize("name", day.PARTS)
def test_each_part_is_a_form_of_a_suite_that_is_there(name: str) -> None:
    part = day.PARTS[name]
    assert part.minutes <= 8 and (part.server is None or part.server in SERVERS)
    if part.module is not None:
        return
    for suite, sets in ((part.suite, part.sets), (part.small_suite or part.suite, part.small)):
        chosen = load_suites()[suite].with_parameters(sets)
        assert chosen.cells and set(part.policies) <= set(chosen.policies)


def test_a_small_day_measures_its_parts_and_a_second_call_finds_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(day, "PARTS", {name: day.PARTS[name] for name in ("kernel", "figure-17")})
    options = ("-o", tmp_path / "day", "--small", "--call-minutes", 1_000)
    done = run_command(day.main, *options)
    assert done.output.splitlines() == [f"{name}: whole" for name in day.PARTS]
    served = read_results(tmp_path / "day" / "figure-17").of(RunRecord, "open-loop")
    assert served and all(record.engine["name"] == "torch" for record in served)
    assert any(record.rows.get("tbt_ms") for record in served)
    assert run_command(day.main, *options).output == ""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_rehearsal_serves_every_part_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    parts = {name: part for name, part in day.PARTS.items() if part.server}
    monkeypatch.setattr(day, "PARTS", parts)
    done = run_command(day.main, "-o", tmp_path / "day", "--small", "--call-minutes", 1_000)
    assert done.output.splitlines() == ["vLLM works", *(f"{name}: whole" for name in parts)]
    for name, part in parts.items():
        if part.module is None:
            served = read_results(tmp_path / "day" / name).of(RunRecord)
            assert {record.policy for record in served} == set(part.policies)
            assert all(record.engine["name"] == "openai" for record in served)
            assert sum(sum(record.rows["cached_tokens"]) for record in served) > 0
    orders = json.loads((tmp_path / "day" / "vllm-bench-serve" / "orders.json").read_text("utf-8"))
    assert set(orders) == {"retrieval", "earned"}
    assert all(row["completed"] == 4 and row["p50_ttft_ms"] > 0 for row in orders.values())
    assert all(row["cached_percent"] is not None for row in orders.values())
