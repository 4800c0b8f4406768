"""Reports: results as the harness writes them, a few suites, and what the commands print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ragorder.cli import main
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.report import Report, make_report, read_results
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.specs import Bench
from ragorder.eval.running.suite import Suite

XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'


def simulated(
    suite: str, policies: Sequence[str], *, timed: bool = False, capacity: str = "100000", **cell: Any
) -> Iterator[dict[str, Any]]:
    """Lines of runs on the simulator; `timed` as on an engine that takes 0.2 ms for an uncached token."""
    sizes: dict[str, Any] = {"capacity": Capacity.parse(capacity), "top_k": 5, "limit": 45}
    bench = Bench(workloads=[cell["workload"]], policies=policies, seeds=(0, 1, 2), timelines=True, **sizes)
    import numpy as np

    for runs in run_traces(bench):
        for run in runs:
            key = {"session": "s1", "suite": suite, "cell": cell, "seed": run.seed, "policy": run.policy_name}
            line = {"type": "run", **key, **run.fields(None, 5)}
            if timed:
                noise = np.random.default_rng(run.seed).gamma(4, 1, 45).tolist()
                lengths = zip(line["rows"]["prompt_tokens"], line["rows"]["cached_tokens"], noise, strict=True)
                line["rows"]["ttft_ms"] = [20 + 0.2 * (prompt - cached) + wait for prompt, cached, wait in lengths]
                line["engine"] |= {"name": "vllm", "model": "random weights"}
                line["throughput"] = {"requests_per_s": 4.0 + run.seed / 10, "tokens_per_s": 4_000.0}
            yield line


SESSION = {
    "type": "session",
    "schema": 1,
    "session": "s1",
    "started": "2026-11-21T17:00:00+00:00",
    "arguments": {"suites": ["paper"], "output": "results/paper", "seeds": [0, 1, 2]},
    "environment": {"processor": "EPYC", "cores": 2, "python": "3.11.9", "load_average": [1, 0.9, 0.8], "packages": {}},
}
MISSING = {"type": "unavailable", "session": "s1", "suite": "table-1", "cell": {"workload": "paper"}}
MISSING |= {"policy": "contextpilot", "reason": "could not be installed <no network>"}
DRY = {"type": "quality", "session": "s1", "suite": "table-2", "cell": {"dataset": "hotpotqa"}, "seed": 0}
DRY |= {"policy": "free", "rows": {"id": ["a"], "em": [1], "f1": [1.0], "cached_tokens": [0]}, "dry_run": True}


def written(folder: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "results.jsonl").write_text(text)
    return folder


def a_run(**changed: Any) -> dict[str, Any]:
    """A run of ten requests of a hundred tokens, of which half are cached."""
    rows = {"prompt_tokens": [100] * 10, "cached_tokens": [50] * 10, "cached_documents": [2] * 10}
    run = {"type": "run", "session": "s1", "suite": "own", "cell": {}, "seed": 0, "policy": "free", "warmup": 2}
    return run | {"engine": {"name": "sim", "block_size": 16}, "failures": 0, "rows": rows} | changed


def report_on(folder: Path, *lines: Any, known: dict[str, Suite] | None = None) -> Report:
    return make_report(read_results(written(folder, *lines)), known or {})


def invoked(*arguments: Any) -> str:
    """What a command prints."""
    done = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.stdout


reported = partial(invoked, "report")
