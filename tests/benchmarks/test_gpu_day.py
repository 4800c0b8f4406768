"""The script of a GPU day."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import run_command

pytest.importorskip("torch")
pytest.importorskip("scipy")

from ragorder.benchmarks.gpu import day
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import load_suites


def test_the_parts_fill_the_day() -> None:
    assert sum(part.minutes for part in day.PARTS.values()) == day.MINUTES


@pytest.mark.parametrize("name", day.PARTS)
def test_each_part_is_a_form_of_a_suite_that_is_there(name: str) -> None:
    part = day.PARTS[name]
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


def test_a_call_without_time_measures_nothing_and_leaves_the_parts_their_time(tmp_path: Path) -> None:
    assert run_command(day.main, "-o", tmp_path, "--small", "--call-minutes", 0).output == ""
    (tmp_path / "gpu-day.json").write_text(json.dumps(dict.fromkeys(day.PARTS, 60 * day.MINUTES)))
    assert run_command(day.main, "-o", tmp_path, "--small").output == ""
