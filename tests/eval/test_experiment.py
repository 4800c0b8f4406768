"""A measurement of one's own is one file, as CONTRIBUTING.md shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from ragorder.cli import main

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., Result]:
    """The commands, with the file of CONTRIBUTING.md in a folder of one's own."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(source.splitlines()) <= 80
    home = tmp_path / "mine"
    home.mkdir()
    (home / "dice.py").write_text(source, "utf-8")

    def invoke(command: str, *arguments: Any) -> Result:
        given = [*command.split(), *map(str, arguments), "--experiments", str(home)]
        return CliRunner(env={"COLUMNS": "160"}).invoke(main, given)

    return invoke


def test_is_listed_run_resumed_and_reported(invoke: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert re.search(r"ours .*throws", invoke("eval list").output.replace("\n", " "))
    assert "8 runs served" in invoke("eval run", "throws", "-o", out, "--seeds", "0,1").output
    assert "0 runs served" in invoke("eval run", "throws", "-o", out, "--seeds", "0,1").output
    text = invoke("report", out, "--markdown", "-").output
    assert "## Throws of a die" in text
    assert re.search(r"\| loaded \| 20(\.\d)? ", text)


def test_is_unknown_without_its_folder(invoke: Callable[..., Result], tmp_path: Path) -> None:
    assert invoke("eval run", "throws", "-o", tmp_path / "out").exit_code == 0
    done = CliRunner().invoke(main, ["eval", "run", "throws", "-o", str(tmp_path / "other")])
    assert done.exit_code == 2 and "unknown suite 'throws'" in done.output


def test_its_parameters_are_set(invoke: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = invoke("eval run", "throws", "-o", out, "--seeds", "0", "--set", "sides=8,1k", "--set", "sides=6")
    assert "6 runs served" in done.output
    session, *records = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert session["arguments"]["set"] == ["sides=8,1k", "sides=6"]
    assert [each["cell"]["sides"] for each in records] == [8, 8, 1000, 1000, 6, 6]
    assert "--set sides=8,1k --set sides=6" in invoke("report", out, "--markdown", "-").output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("eyes=3", "unknown parameter 'eyes': choose from sides"),
        ("sides=many", "sides = many: Input should be a valid integer"),
        ("sides", "'sides': write NAME=VALUE"),
        ("sides=", "sides: Field required"),
    ],
)
def test_a_wrong_parameter_is_an_error_of_the_option(
    invoke: Callable[..., Result], tmp_path: Path, given: str, said: str
) -> None:
    done = invoke("eval run", "throws", "-o", tmp_path, "--set", given)
    assert done.exit_code == 2 and said in done.output


def test_the_schema_tells_records_apart_by_type(invoke: Callable[..., Result]) -> None:
    schema = json.loads(invoke("eval schema").output)
    assert schema["discriminator"]["propertyName"] == "type"
    assert {"run", "quality", "replay", "dice", "session", "unavailable", "check"} <= schema["discriminator"][
        "mapping"
    ].keys()
