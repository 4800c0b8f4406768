"""Batches planned in shards by `ragorder plan`, with the time and memory of all its processes."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.common.processes import tree_of
from ragorder.eval.data.machine import resident_mb
from ragorder.eval.data.workloads import document_tokens, make_workload
from ragorder.eval.report.declared import Column, Row, TableForm, figure, ratio
from ragorder.eval.report.tables import Tone
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

_ONE = "one plan"
_ROOM = "64GiB"
_ENOUGH = 97.0
_EVERY_S = 0.2
_TOPIC_DOCUMENTS = 12
_TOPIC_REQUESTS = 40
_OF_THE_TOPIC = 6
_OF_ALL = 2
_POPULAR = 2_000


class ShardedPlanCell(SuiteCell):
    """A batch of `requests`, in `shards` by `workers` processes; one plan of at most `one_plan_requests`."""

    workload: str = "topics"
    requests: int = Field(30_000, ge=1)
    shards: int = Field(64, ge=1)
    workers: int = Field(2, ge=1)
    one_plan_requests: int = Field(100_000, ge=1)


def _saved(run: Record) -> float:
    """The share of the documents' tokens."""
    return float(sum(run.rows["saved_tokens"]) / max(1, sum(run.rows["tokens"])))


def _of_one_plan(row: Row) -> float | None:
    return None if row.policy == _ONE else row.mean(_saved, _ONE)


def _reached(row: Row, share: float) -> Tone:
    return "good" if share >= _ENOUGH else "bad"


class ShardedPlan(Experiment):
    """`rows` has one entry of `tokens` and `saved_tokens`: of all documents, and of those shared with the request
    before. Facts: `core_s` of all processes, `peak_bytes` of their memory together, and `largest`, the tokens of the
    largest shard over the mean."""

    kind = "sharded_plan"
    cell = ShardedPlanCell
    columns = ("tokens", "saved_tokens")
    facts = ("requests", "core_s", "peak_bytes", "largest")
    policies: ClassVar[Any] = (_ONE, "shards")
    unit = "plans"
    counts = "policies"
    one_job = True
    tables: ClassVar[Any] = [
        TableForm(
            "Batches planned at once and in shards",
            [
                Column("workload", lambda row: row.cell.workload),
                figure("requests", "requests", 0),
                Column("shards", lambda row: _ONE if row.policy == _ONE else str(row.cell.shards)),
                figure("saved, %", _saved, scale=100, spread=True),
                ratio("of one plan, %", _saved, _of_one_plan, 1, scale=100, tone=_reached),
                figure("largest / mean shard", "largest", 2),
                figure("µs a request", lambda run: run.facts["core_s"] / max(1, run.facts["requests"]), 0, scale=1e6),
                figure("memory, GiB", "peak_bytes", 2, scale=2**-30, over=max),
            ],
            note="Mean of {seeds} seeds (in brackets their range). Time is that of all cores, from the file that is "
            "read to those that are written; memory the most that all processes had together.",
            labels=3,
            by=(),
        )
    ]

    def applies(self, suite: Suite, cell: ShardedPlanCell, policy: str) -> bool:
        return policy != _ONE or self.requests(suite, cell) <= cell.one_plan_requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        """Each policy as a run of the command on one file."""
        cell: ShardedPlanCell = job.cell
        with TemporaryDirectory() as name:
            folder = Path(name)
            source = folder / "requests.jsonl"
            write_requests(source, draw(cell.workload, job.requests, job.seed))
            for policy in job.policies:
                options = ["--shards", "1", "--workers", "1", "--memory", _ROOM]
                if policy != _ONE:
                    options = ["--shards", str(cell.shards), "--workers", str(cell.workers)]
                manifest, facts = run_plan(source, folder / policy.replace(" ", "-"), *options)
                advance()
                yield {
                    "policy": policy,
                    "engine": {"name": "none"},
                    "facts": {"requests": manifest["requests"], **facts},
                    "rows": {name: [manifest[name]] for name in ("tokens", "saved_tokens")},
                }


def draw(workload: str, requests: int, seed: int) -> Iterable[list[int]]:
    """Documents of each request, by number. `topics`: a topic for every 40 requests, the first ones more
    frequent (a Pareto distribution); six of a topic's twelve documents, and two of 2,000 that all topics share.
    Raises WorkloadError."""
    if workload == "topics":
        return _topics(requests, random.Random(seed))
    return make_workload(workload, seed, requests=requests).rankings[:requests]


def _topics(requests: int, rng: random.Random) -> Iterator[list[int]]:
    topics = max(1, requests // _TOPIC_REQUESTS)
    for _ in range(requests):
        topic = int((rng.paretovariate(0.5) - 1) * topics / 100) % topics
        own = rng.sample(range(_TOPIC_DOCUMENTS), _OF_THE_TOPIC)
        documents = [_POPULAR + topic * _TOPIC_DOCUMENTS + each for each in own]
        while len(documents) < _OF_THE_TOPIC + _OF_ALL:
            shared = int(10 * (rng.paretovariate(0.7) - 1)) % _POPULAR
            if shared not in documents:
                documents.append(shared)
        rng.shuffle(documents)
        yield documents


def write_requests(path: Path, rankings: Iterable[list[int]]) -> None:
    """As JSON lines for `ragorder plan`."""
    with path.open("w", encoding="utf-8") as file:
        for number, ranking in enumerate(rankings):
            documents = [{"id": f"d{each}", "tokens": document_tokens(each)} for each in ranking]
            file.write(json.dumps({"id": f"q{number}", "documents": documents}) + "\n")


class PlanFailedError(RuntimeError):
    """The command has failed; the message is what it said."""


def run_plan(source: Path, folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest, and facts. Raises PlanFailedError."""
    before = _core_s()
    command = [sys.executable, "-m", "ragorder", "plan", str(source), "--out", str(folder), *options]
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        memory = _Memory(process.pid)
        memory.start()
        said = process.communicate()[1]
        memory.stop()
    if process.returncode:
        raise PlanFailedError(said.strip())
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
    tokens = [shard["tokens"] for shard in manifest["shards"]]
    facts = {
        "core_s": round(_core_s() - before, 2),
        "peak_bytes": memory.peak_bytes,
        "largest": round(max(tokens) * len(tokens) / max(1, sum(tokens)), 3),
    }
    return manifest, facts


def _core_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Memory(threading.Thread):
    """Most resident memory of a process and its children together, looked at five times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            megabytes = sum(resident_mb(each) or 0.0 for each in tree_of(self._pid))
            self.peak_bytes = max(self.peak_bytes, round(1e6 * megabytes))

    def stop(self) -> None:
        self._ended.set()
        self.join()
