"""`ragorder workflow trace`: figures and the picture of a wavefront."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command, write_lines

from ragorder.cli import main

trace = partial(run_command, main, "workflow", "trace", env={"COLUMNS": "120"})


def piece(node: str, worker: str, start_s: float, end_s: float | None, **changes: Any) -> dict[str, Any]:
    own = {"node": node, "kind": "due", "worker": worker, "outcome": "used", "planned_s": start_s - 0.1}
    return own | {"started_s": start_s, "ended_s": end_s, "prompt_tokens": None, "cached_tokens": None} | changes


def request(started_s: float, *pieces: dict[str, Any], **changes: Any) -> dict[str, Any]:
    own = {"graph": "hyde", "started_s": started_s, "total_s": 4.0, "waited_s": 0.5, "outcome": "answered"}
    return own | {"pieces": pieces} | changes


REQUESTS = [
    request(
        12.0,
        piece("search", "search", 0.0, 2.0),
        piece("answer", "engine", 2.0, 4.0, prompt_tokens=100, cached_tokens=60),
    ),
    request(
        10.0,
        piece("guess", "engine", 0.0, 2.0, prompt_tokens=100, cached_tokens=0),
        piece("search", "search", 1.0, 2.0, kind="speculative"),
        piece("search", "search", 0.5, 1.5, kind="speculative", outcome="rolled back"),
        piece("note", "step", 2.0, 2.1),
        piece("answer", "engine", 2.5, 4.0),
        piece("never", "engine", 0.0, None, started_s=None),
    ),
    request(13.0, outcome="failed", total_s=None),
]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "trace.jsonl", REQUESTS)


def test_figures(traces: Path) -> None:
    done = trace(traces, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["outcomes"] == {"answered": 2, "failed": 1}
    assert (figures["mean_s"], figures["slowest_s"], figures["waited_s"]) == (4.0, 4.0, 0.5)
    assert figures["pieces"] == {"engine": 3, "search": 3, "step": 1}
    assert (figures["ahead"], figures["ahead_used"]) == ({"search": 2}, {"search": 1})
    # From 10 to 16: the engine from 10 to 12 and from 12.5 to 16, the search from 10.5 to 14 without a break.
    assert figures["generating"] == pytest.approx(5.5 / 6)
    assert figures["searching"] == pytest.approx(3.5 / 6)
    assert figures["both"] == pytest.approx(3.0 / 6)
    assert figures["cached_share"] == pytest.approx(0.3)

    table = trace(traces).stdout
    assert "3 (2 answered, 1 failed)" in table and "3, 2 speculative, 1 of them used" in table


@pytest.mark.parametrize("format", [".png", ".svg", ".html"])
def test_a_picture(traces: Path, tmp_path: Path, format: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"wavefront{format}"
    done = trace(traces, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert f"wrote {picture}" in done.stderr
    if format == ".png":
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        text = picture.read_text("utf-8")
        assert ("<!doctype html>" in text) == (format == ".html")
        assert "<script" not in text


def test_a_part_of_the_requests_is_drawn_in_the_order_of_their_starts(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ragorder.eval.report.wavefront import draw_wavefront, read_traces

    assert [each.started_s for each in read_traces(traces)] == [10.0, 12.0, 13.0]
    assert trace(traces, "--plot", tmp_path / "part.svg", "--first", 2, "--requests", 1).exit_code == 0
    draw_wavefront(read_traces(traces)[1:2], tmp_path / "same.svg", first=2)
    assert (tmp_path / "part.svg").read_bytes() == (tmp_path / "same.svg").read_bytes()


def test_what_cannot_be_drawn(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert "requests" in trace(tmp_path / "empty.jsonl").stdout
    done = trace(tmp_path / "empty.jsonl", "--plot", tmp_path / "picture.png")
    assert (done.exit_code, done.stderr) == (1, "Error: there is no request to draw\n")
    done = trace(traces, "--plot", tmp_path / "picture.bmp")
    assert done.exit_code == 1 and "picture.bmp: a picture ends in .png, .svg, .html" in done.stderr


PIECE = '{"node": "a", "kind": "due", "worker": "gpu", "outcome": ""}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "trace.jsonl:1: "),
        ('{"graph": "a"}', "started_s"),
        (f'{{"graph": "a", "started_s": 0, "pieces": [{PIECE}]}}', "worker"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line, "utf-8")
    done = trace(path)
    assert done.exit_code == 1
    assert says in done.stderr
