"""Suites about replacement: the harness has streams simulated and scheduling timed, and keeps what comes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ragorder.eval.data.corpora import Corpus, CorpusError
from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.data.trace import trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import WorkloadError, make_workload
from ragorder.eval.experiments.replacement import (
    HISTORY,
    SKEWED,
    Simulated,
    Stream,
    TierSize,
    most_hits,
    simulate,
    skewed_stream,
    stream_of_trace,
)
from ragorder.eval.experiments.replacement.cells import ReplacementCell
from ragorder.eval.running.options import Options
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Suite

__all__ = ["run_replacement_suites"]

_SIMULATED = "replacement is simulated, and no engine is asked: run it without --engine"


def run_replacement_suites(
    suites: Sequence[Suite], options: Options, store: Store, session: str, progress: Progress
) -> Iterator[Mapping[str, Any]]:
    """Lines of type "replacement", and of type "unavailable" for a stream that cannot be had. Each is to be in the
    store before the next one is asked for.

    Raises CorpusError for a corpus that cannot be read.
    """
    streams = _Streams(options)
    todo: list[tuple[Suite, ReplacementCell, int, str]] = []
    missing: set[tuple[str, str]] = set()
    for suite in suites:
        asked = [policy for policy in suite.policies if options.policies is None or policy in options.policies]
        for cell in (ReplacementCell.read(point, f"{suite.name}.toml") for point in suite.points):
            reason = streams.missing(cell)
            if asked and reason is not None:
                if (suite.name, reason) not in missing:
                    missing.add((suite.name, reason))
                    yield _unavailable(session, suite, cell, reason)
                continue
            for seed in options.seeds if cell.varies_with_seed else options.seeds[:1]:
                key = {"suite": suite.name, "cell": cell.fields, "seed": seed}
                left = [policy for policy in asked if not store.has("replacement", **key, policy=policy)]
                todo += [(suite, cell, seed, policy) for policy in left]
    if not todo or options.dry_run:
        return
    advance = progress("streams", len(todo))
    for suite, cell, seed, policy in todo:
        line: dict[str, Any] = {"type": "replacement", "session": session, "suite": suite.name, "cell": cell.fields}
        line |= {"seed": seed, "policy": policy, "engine": {"name": "sim"}}
        requests = min(suite.requests, options.limit or suite.requests)
        try:
            measured = _measure(suite, cell, seed, policy, requests, streams)
        except (CorpusError, WorkloadError) as error:
            yield _unavailable(session, suite, cell, " ".join(str(error).split()))
        else:
            yield {**line, **measured}
        advance()


def _measure(
    suite: Suite, cell: ReplacementCell, seed: int, policy: str, requests: int, streams: _Streams
) -> dict[str, Any]:
    """Raises WorkloadError or CorpusError for a stream that cannot be drawn so."""
    if cell.measure == "scheduling":
        return _time(cell, seed, policy, requests)
    stream, working_set = streams.take(cell, seed, requests)
    assert cell.device is not None and cell.host is not None
    sizes = [TierSize.parse(each) for each in (cell.device, cell.host)]
    device, host = (size.tokens(working_set, cell.kib_per_token) for size in sizes)
    if sizes[0].percent is not None:
        # An engine that cannot hold a request cannot serve it.
        device = max(device, stream.longest_tokens)
    found = simulate(stream, policy, device, host, ordered=cell.ordered)
    warmup = min(suite.warmup, len(stream.requests) // 2)
    retrieved = sum(map(len, stream.requests[warmup:]))
    seen = 100 * sum(stream.seen_before()[warmup:]) / max(1, retrieved)
    return {
        "warmup": warmup,
        "facts": {
            "working_set_tokens": working_set,
            "device_tokens": device,
            "host_tokens": host,
            "seen_percent": round(seen, 2),
            "most_hits_percent": round(100 * most_hits(stream, device + host, warmup) / max(1, retrieved), 2),
        },
        "rows": _rows(stream, found),
        "traffic_tokens": asdict(found.traffic),
    }


def _rows(stream: Stream, found: Simulated) -> dict[str, list[Any]]:
    return {
        "retrieved": [len(request) for request in stream.requests],
        "hits": [served.hits for served in found.served],
        "host_hits": [served.host_hits for served in found.served],
        "prefill_ms": [round(1e3 * served.seconds, 1) for served in found.served],
    }


def _time(cell: ReplacementCell, seed: int, policy: str, requests: int) -> dict[str, Any]:
    """Wall times: worth something on a machine that does nothing else, so its load stands beside them."""
    from ragorder.eval.experiments.replacement.scheduling import measure_scheduling

    assert cell.nodes is not None
    load_average = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    times = measure_scheduling(
        nodes=cell.nodes,
        top_k=cell.top_k,
        requests=requests,
        policy=policy.removesuffix(HISTORY),
        history=policy.endswith(HISTORY),
        seed=seed,
    )
    return {"load_average": load_average, "scheduling": asdict(times)}


class _Streams:
    """The streams of the suites, each drawn once, with the working set of its documents in the order as retrieved."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._shelf = CorpusLoader(options.corpora)
        self._drawn: dict[tuple[object, ...], tuple[Stream, int]] = {}

    def missing(self, cell: ReplacementCell) -> str | None:
        """Why there is no such stream. Raises CorpusError for a corpus that is there and cannot be read."""
        if self._options.engine != "sim":
            return _SIMULATED
        found = self._shelf.take(cell.corpus) if cell.corpus is not None else None
        return found if isinstance(found, str) else None

    def take(self, cell: ReplacementCell, seed: int, requests: int) -> tuple[Stream, int]:
        """Raises WorkloadError or CorpusError for more documents a request than there are, or an unknown workload."""
        key = (cell.workload, cell.corpus, cell.order, cell.top_k, seed, requests)
        if key not in self._drawn:
            stream = self._draw(cell, seed, requests)
            self._drawn[key] = stream, stream.working_set_tokens
        return self._drawn[key]

    def _draw(self, cell: ReplacementCell, seed: int, requests: int) -> Stream:
        if cell.corpus is not None:
            corpus = self._shelf.take(cell.corpus)
            assert isinstance(corpus, Corpus), "what is missing was said before"
            trace = trace_of_corpus(corpus, top_k=cell.top_k, order=cell.order, seed=seed, limit=requests)
            return stream_of_trace(trace)
        assert cell.workload is not None
        if cell.workload in SKEWED:
            return skewed_stream(cell.workload, seed, top_k=cell.top_k, requests=requests)
        drawn = make_workload(cell.workload, seed, top_k=cell.top_k, requests=requests)
        return stream_of_trace(trace_of_workload(drawn, requests))


def _unavailable(session: str, suite: Suite, cell: ReplacementCell, reason: str) -> dict[str, Any]:
    """Of a stream that is not to be had there is nothing under any policy: it is said once."""
    named = {"corpus": cell.corpus} if cell.corpus is not None else {"workload": cell.workload}
    return {
        "type": "unavailable",
        "session": session,
        "suite": suite.name,
        "cell": {} if reason == _SIMULATED else named,
        "policy": suite.baseline,
        "reason": reason,
    }
