"""Former commands (`python -m ragorder.eval.NAME`) as suites of `ragorder eval run`."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

pytest.importorskip("scipy")
pytest.importorskip("starlette")
pytest.importorskip("bm25s")


def run(name: str, *options: str) -> None:
    sys.argv = [name, *options]
    runpy.run_module(f"ragorder.eval.{name}", run_name="__main__")


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])


@pytest.mark.parametrize(
    ("name", "options", "now", "shown"),
    [
        (
            "reordering",
            "--workload mix8 --capacity-tokens 16000 --load 1.5 --load 2 --requests 20 --seeds 2",
            "reordering --set workload=mix8 --set capacity_tokens=16000 --set load=1.5 --set load=2 --set requests=20"
            " --seeds 0,1",
            "reordered+waiting",
        ),
        (
            "conversations",
            "--engine simulated --conversations 3 --turns 1 --blocks 200 --max-tokens 4 --seed 1 --layout"
            "|one turn, tagged",
            "conversations --seeds 0 --engine sim --set conversations=3 --set turns=1 --set blocks=200"
            " --set max_tokens=4 --seeds 1 --set 'layout=one turn tagged'",
            "ragorder",
        ),
        (
            "scheduling",
            "--nodes 100 --requests 20 --policy pgdsf --policy lru --top-k 3",
            "ragcache-scheduling --seeds 0 --set nodes=100 --limit 20 --policy pgdsf+history --policy lru"
            " --set top_k=3",
            "PGDSF",
        ),
    ],
)
def test_options_keep_their_meaning(
    name: str, options: str, now: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, *last = options.split("|")
    run(name, *words.split(), *last)
    said = capsys.readouterr()
    assert f"This command is now: ragorder eval run {now} -o DIR" in said.err
    assert shown in said.out


@pytest.mark.parametrize(
    ("name", "options", "now", "planned"),
    [
        (
            "workers",
            "--orderers 4 --questions 30 --seed 5 --seed 6",
            "workers --engine openai --set orderers=4 --set questions=30 --seeds 5 --seeds 5,6",
            "workers: 1 cells x 2 seeds (workers)",
        ),
        (
            "proxy_load",
            "--rate 40 --seconds 0.5 --streams 10 --events 3 --pause 0.01",
            "proxy-load --seeds 0 --set rate=40 --set seconds=0.5 --set streams=10 --set events=3 --set pause=0.01",
            "proxy-load: 1 cells x 1 seeds (proxy-load)",
        ),
    ],
)
def test_options_of_those_that_start_servers_keep_their_meaning(
    name: str, options: str, now: str, planned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, *options.split(), "--dry-run")
    said = capsys.readouterr()
    assert f"This command is now: ragorder eval run {now} --dry-run -o DIR" in said.err
    assert planned in said.err and said.out == ""


def test_json_prints_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    run("scheduling", "--nodes", "100", "--requests", "9", "--policy", "pgdsf", "--no-history", "--json", "--seed", "2")
    row = json.loads(capsys.readouterr().out)
    assert (row["policy"], row["seed"], row["scheduling"]["history"]) == ("pgdsf", 2, False)
