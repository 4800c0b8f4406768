"""The suites of the proxy: the highest rate of requests that it holds, and applications through it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.results import result_lines
from support.suites import page_of, run_suites

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("numpy")

from ragorder.benchmarks.common.processes import cpu_s, peak_mb
from ragorder.benchmarks.proxy.throughput import ProxyThroughput, ThroughputCell
from ragorder.eval.report.declared import tables_of
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Suite

ROWS = {
    "asked": [100.0, 125.0, 156.2],
    "came": [100.0, 124.0, 140.0],
    "added_p50_ms": [1.0, 1.5, 4.0],
    "added_p99_ms": [3.0, 9.5, 31.0],
    "cpu_ms": [1.0, 1.25, 1.3],
    "holds": [True, True, False],
}


def record(policy: str = "order", seed: int = 0, **rows: Any) -> Record:
    return ProxyThroughput.record(suite="mine", policy=policy, seed=seed, cell={"workers": 2}, rows={**ROWS, **rows})


def rows_of(*records: Record) -> list[list[str]]:
    (table,) = tables_of(ProxyThroughput, Suite.unlisted("mine"), Results(Path(), records=list(records)))
    return [[entry.text for entry in row] for row in table.rows]


class TestTheReport:
    def test_is_the_median_of_the_seeds(self) -> None:
        others = record(seed=1, came=[100.0, 130.0, 140.0]), record(seed=2, holds=[True, False, False])
        ((_, _, held, added, first, used, core),) = rows_of(record(), *others)
        assert (held, added, first, used, core) == ("124", "1.5 / 9.5", "1.0 / 3.0", "1.25", "800")

    def test_says_so_if_none_holds(self) -> None:
        assert rows_of(record(holds=[False] * 3)) == [["2", "order", "none", "–", "1.0 / 3.0", "–", "–"]]


def test_has_a_last_rate_after_the_first() -> None:
    with pytest.raises(ValidationError, match="most is the last rate"):
        ThroughputCell(first=100.0, most=50.0)


class TestAProcess:
    def test_is_asked_for_its_time_and_memory(self) -> None:
        before = cpu_s(os.getpid())
        if before is None:
            pytest.skip("this system has no /proc")
        began = time.process_time()
        while time.process_time() < began + 0.1:
            pass
        after, peak = cpu_s(os.getpid()), peak_mb(os.getpid())
        assert after is not None and after - before >= 0.08
        assert peak is not None and peak > 10


def cached_of(folder: Path, *applications: str) -> dict[tuple[str, str], float]:
    """Run 25 requests of each: the cached share by application and policy. Nothing but the order changes."""
    run_suites(folder, "applications", "--seeds", 0, requests=25, application=",".join(applications))
    shares = {}
    for line in result_lines(folder, "applications"):
        rows = line["rows"]
        share = sum(rows["cached_tokens"]) / sum(rows["prompt_tokens"])
        shares[line["cell"]["application"], line["policy"]] = share
        assert line["facts"]["changed"] == (0 if line["policy"] == "proxied" else None)
    return shares


def test_the_suite_of_applications_shows_what_is_cached_and_that_nothing_else_changes(tmp_path: Path) -> None:
    names = ("anythingllm", "search-results")
    shares = cached_of(tmp_path, *names)
    for application in names:
        assert shares[application, "proxied"] > shares[application, "direct"] + 0.05
    proxied = [line["facts"] for line in result_lines(tmp_path, "applications") if line["policy"] == "proxied"]
    assert [facts["ordered"] for facts in proxied] == [25, 25]
    assert "| AnythingLLM | `--template anythingllm` |" in page_of(tmp_path)


@pytest.mark.parametrize(("name", "recognised"), [("tools", "`--stable-tools`"), ("memories", "`--template memories`")])
def test_a_list_that_is_sent_in_one_order_is_cached(name: str, recognised: str, tmp_path: Path) -> None:
    shares = cached_of(tmp_path, name)
    assert shares[name, "direct"] < 0.2 and shares[name, "proxied"] > 0.9
    assert f"in any order | {recognised} |" in page_of(tmp_path)
