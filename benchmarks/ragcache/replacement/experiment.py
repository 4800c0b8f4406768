"""The experiment of the suites of kind "replacement"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, ClassVar

from ragorder.benchmarks.ragcache.replacement import (
    HISTORY,
    REPLACEMENT_POLICIES,
    SKEWED,
    DocumentStream,
    Simulated,
    TierSize,
    most_hits,
    simulate,
    skewed_stream,
    stream_of_trace,
)
from ragorder.benchmarks.ragcache.replacement.cells import ReplacementCell
from ragorder.benchmarks.ragcache.replacement.record import ReplacementRecord
from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.data.machine import load_average
from ragorder.eval.data.trace import trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import WorkloadError, make_workload
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

__all__ = ["Replacement"]

_SIMULATED = "replacement is simulated, and no engine is asked: run it without --engine"


class Replacement(Experiment):
    kind = "replacement"
    record = ReplacementRecord
    cell = ReplacementCell
    policies: ClassVar[Any] = REPLACEMENT_POLICIES
    unit = "streams"
    missing_by_cell = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams: dict[tuple[object, ...], tuple[DocumentStream, int]] = {}
        self._said: set[tuple[str, str]] = set()

    def obstacle(self, suite: Suite, cell: ReplacementCell, policy: str) -> str | None:
        return _SIMULATED if self.options.engine != "sim" else super().obstacle(suite, cell, policy)

    def missing(self, suite: Suite, cell: ReplacementCell, policy: str, reason: str) -> Missing | None:
        """A stream that cannot be drawn is reported once, not for every policy."""
        if (suite.name, reason) in self._said:
            return None
        self._said.add((suite.name, reason))
        return self._missing(suite, cell, reason)

    def _missing(self, suite: Suite, cell: ReplacementCell, reason: str) -> Missing:
        named = {"corpus": cell.corpus} if cell.corpus is not None else {"workload": cell.workload}
        return Missing(suite.name, {} if reason == _SIMULATED else named, suite.baseline, reason)

    def steps(self, job: Job) -> int:
        return 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        (policy,) = job.policies
        try:
            measured = self._measure(job, policy)
        except (CorpusError, WorkloadError) as error:
            yield self._missing(job.suite, job.cell, " ".join(str(error).split()))
        else:
            yield {"policy": policy, "engine": {"name": "sim"}, **measured}
        advance()

    def _measure(self, job: Job, policy: str) -> dict[str, Any]:
        """Raises WorkloadError or CorpusError for a stream that cannot be drawn."""
        cell: ReplacementCell = job.cell
        if cell.measure == "scheduling":
            return _time(cell, job.seed, policy, job.requests)
        stream, working_set = self._stream(job)
        assert cell.device is not None and cell.host is not None
        sizes = [TierSize.parse(each) for each in (cell.device, cell.host)]
        device, host = (size.tokens(working_set, cell.kib_per_token) for size in sizes)
        if sizes[0].percent is not None:
            # An engine that cannot hold a request cannot serve it.
            device = max(device, stream.longest_tokens)
        found = simulate(stream, policy, device, host, ordered=cell.ordered, follow=cell.follow, waiting=cell.waiting)
        warmup = min(job.suite.warmup, len(stream.requests) // 2)
        retrieved = sum(map(len, stream.requests[warmup:]))
        possible = most_hits(stream, device + host, warmup, in_any_order=cell.ordered)
        seen = 100 * sum(stream.seen_before()[warmup:]) / max(1, retrieved)
        return {
            "warmup": warmup,
            "facts": {
                "working_set_tokens": working_set,
                "device_tokens": device,
                "host_tokens": host,
                "seen_percent": round(seen, 2),
                "most_hits_percent": round(100 * possible / max(1, retrieved), 2),
            },
            "rows": _rows(stream, found),
            "traffic_tokens": asdict(found.traffic),
        }

    def _stream(self, job: Job) -> tuple[DocumentStream, int]:
        cell: ReplacementCell = job.cell
        key = (cell.workload, cell.corpus, cell.order, cell.top_k, job.seed, job.requests)
        if key not in self._streams:
            stream = _draw(job)
            self._streams[key] = stream, stream.working_set_tokens
        return self._streams[key]


def _rows(stream: DocumentStream, found: Simulated) -> dict[str, list[Any]]:
    return {
        "retrieved": [len(request) for request in stream.requests],
        "hits": [served.hits for served in found.served],
        "host_hits": [served.host_hits for served in found.served],
        "prefill_ms": [round(1e3 * served.seconds, 1) for served in found.served],
    }


def _time(cell: ReplacementCell, seed: int, policy: str, requests: int) -> dict[str, Any]:
    from ragorder.benchmarks.ragcache.replacement.scheduling import measure_scheduling

    assert cell.nodes is not None
    load = load_average()
    times = measure_scheduling(
        nodes=cell.nodes,
        top_k=cell.top_k,
        requests=requests,
        policy=policy.removesuffix(HISTORY),
        history=policy.endswith(HISTORY),
        seed=seed,
    )
    return {"load_average": load, "scheduling": asdict(times)}


def _draw(job: Job) -> DocumentStream:
    cell: ReplacementCell = job.cell
    if job.corpus is not None:
        trace = trace_of_corpus(job.corpus, top_k=cell.top_k, order=cell.order, seed=job.seed, limit=job.requests)
        return stream_of_trace(trace)
    assert cell.workload is not None
    if cell.workload in SKEWED:
        return skewed_stream(cell.workload, job.seed, top_k=cell.top_k, requests=job.requests)
    drawn = make_workload(cell.workload, job.seed, top_k=cell.top_k, requests=job.requests)
    return stream_of_trace(trace_of_workload(drawn, job.requests))
