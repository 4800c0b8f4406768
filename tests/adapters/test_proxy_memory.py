"""The memory of a proxy that is attacked in every known way at once (docs/security.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2

from ragorder.eval.cli.eval import eval as evaluate
from ragorder.eval.experiments.proxy_memory.attacks import ATTACKS, EVERYTHING
from ragorder.eval.experiments.proxy_memory.experiment import ProxyMemoryCell, attacked_proxy, measure_peak

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc"),
    pytest.mark.timeout(300),
]


def test_memory_stays_below_a_gigabyte_under_all_attacks_together() -> None:
    with attacked_proxy() as proxy:
        rows = measure_peak(proxy, EVERYTHING, ProxyMemoryCell(seconds=40))
        assert rows["steps"][0] > 100 and rows["peak_mb"][0] < 1000
        health = httpx2.get(f"http://127.0.0.1:{proxy.port}/ragorder/health", timeout=60)
    assert health.status_code == 200


def test_the_suite_measures_each_attack(tmp_path: Path) -> None:
    run = ["run", "proxy-memory", "--reduced", "--seeds", "0", "-o", str(tmp_path)]
    done = CliRunner().invoke(evaluate, run)
    assert done.exit_code == 0, done.output
    lines = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    found = {line["policy"]: line["rows"] for line in lines if line["type"] == "proxy-memory"}
    assert [*found] == ["nothing", *ATTACKS, EVERYTHING]
    idle = found["nothing"]["peak_mb"][0]
    assert 20 < idle < 200
    # Half bodies, with room for all of them, are all kept.
    assert found["half bodies"]["clients"] == [100] and found["half bodies"]["peak_mb"][0] > idle + 40
    assert found[EVERYTHING]["steps"][0] > 0
    page = CliRunner().invoke(evaluate, ["report", str(tmp_path), "--md"]).output
    assert "| none, at its start |" in page and "| 100 clients with half a body of 1 MiB |" in page
