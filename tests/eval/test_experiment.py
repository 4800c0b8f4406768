"""A new experiment is one folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from ragorder.eval import suites as folder
from ragorder.eval.cli.eval import eval as evaluate
from ragorder.eval.running import reading
from ragorder.eval.running.suite import experiments

EXPERIMENT = """
from typing import Literal

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.suite import Experiment
from ragorder.eval.running.record import Record


class DiceCell(SuiteCell):
    sides: int


class DiceRecord(Record):
    type: Literal["dice"] = "dice"


class Dice(Experiment):
    kind = "dice"
    record = DiceRecord
    cell = DiceCell
    policies = ("low", "high")

    def measure(self, job, advance):
        (policy,) = job.policies
        yield {"policy": policy, "rows": {"eyes": [1 if policy == "low" else job.cell.sides]}}
        advance()
"""
REPORT = """
from ragorder.eval.suites.dice.experiment import DiceRecord
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table


def make_part(suite, results):
    lines = results.of(DiceRecord, suite.name)
    rows = [[Entry(line.policy), Entry(str(line.rows["eyes"][0]))] for line in lines]
    return Part([Table("Eyes", ["policy", "eyes"], rows)])
"""
SUITE = """
title = "Dice"
source = "a test"
says = "How many eyes."
kind = "dice"
baseline = "low"
policies = ["low", "high"]
[sweep]
sides = [6, 20]
[report]
chart = "eyes"
"""


@pytest.fixture
def dice(tmp_path: Path) -> Iterator[None]:
    home = tmp_path / "experiments" / "dice"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("")
    (home / "experiment.py").write_text(EXPERIMENT)
    (home / "report.py").write_text(REPORT)
    (home / "throws.toml").write_text(SUITE)
    folder.__path__.append(str(home.parent))
    experiments.cache_clear()
    reading._models.cache_clear()
    yield
    folder.__path__.remove(str(home.parent))
    experiments.cache_clear()
    reading._models.cache_clear()
    for name in [name for name in sys.modules if name.startswith("ragorder.eval.suites.dice")]:
        del sys.modules[name]


def invoke(*arguments: Any) -> str:
    done = CliRunner().invoke(evaluate, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("dice")
class TestANewExperiment:
    def test_is_run_resumed_and_reported(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert "8 runs served" in invoke("run", "throws", "-o", out, "--seeds", "0,1")
        assert "0 runs served" in invoke("run", "throws", "-o", out, "--seeds", "0,1")
        text = invoke("report", out, "--md")
        assert "## Dice" in text and "| high | 20 |" in text

    def test_its_parameters_are_set(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert "6 runs served" in invoke(
            "run", "throws", "-o", out, "--seeds", "0", "--set", "sides=8,1k", "--set", "sides=6"
        )
        lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
        session, *records = lines
        assert session["arguments"]["set"] == ["sides=8,1k", "sides=6"]
        assert [each["cell"]["sides"] for each in records] == [8, 8, 1000, 1000, 6, 6]
        assert "--set sides=8,1k --set sides=6" in invoke("report", out, "--md")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("eyes=3", "unknown parameter 'eyes': choose from sides"),
            ("sides=many", "sides = many: Input should be a valid integer"),
            ("sides", "'sides': write NAME=VALUE"),
            ("sides=", "sides: Field required"),
        ],
    )
    def test_a_wrong_parameter_is_an_error_of_the_option(self, tmp_path: Path, given: str, said: str) -> None:
        done = CliRunner().invoke(evaluate, ["run", "throws", "-o", str(tmp_path), "--set", given])
        assert done.exit_code == 2 and said in done.output

    def test_its_record_is_in_the_schema(self) -> None:
        assert "DiceRecord" in json.loads(invoke("schema"))["$defs"]


def test_the_schema_tells_records_apart_by_type() -> None:
    schema = json.loads(invoke("schema"))
    assert schema["discriminator"]["propertyName"] == "type"
    assert {"run", "quality", "session", "unavailable", "check"} <= schema["discriminator"]["mapping"].keys()
