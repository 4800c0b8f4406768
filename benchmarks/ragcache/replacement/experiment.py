"""Replacement policies on simulated tiers (RAGCache 7.3 and 7.4), and scheduling times (7.5)."""

from __future__ import annotations

import random
import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ragorder.benchmarks.ragcache.replacement.streams import (
    MEAN_TOKENS,
    SKEWED,
    DocumentStream,
    skewed_stream,
    stream_of_trace,
)
from ragorder.benchmarks.ragcache.replacement.tiers import (
    A10G,
    HISTORY,
    REPLACEMENT_POLICIES,
    Simulated,
    most_hits,
    simulate,
)
from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.data.trace import trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import WorkloadError, make_workload
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.measures import percentile
from ragorder.eval.running.record import Record, as_column
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.trie.policies import History, Tier, make_policy

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

_EXPONENT = 0.8
"""Of the documents' popularity (Zipf)."""

_QUESTION_TOKENS = 64
_Document = tuple[bytes, int]
"""Its id and its tokens."""


def measure_scheduling(*, nodes: int, top_k: int, requests: int, policy: str, seed: int) -> dict[str, Any]:
    """Fill a tier until it holds `nodes` documents, then time requests on it.

    Wall and thread CPU times of a request; `evicted` and `inserted` are documents a request.
    """
    name, history = policy.removesuffix(HISTORY), policy.endswith(HISTORY)
    tier = Tier(make_policy(name), History(nodes) if history else None)
    stream = _requests(random.Random(seed), corpus=2 * nodes + top_k, top_k=top_k)
    counts: Counter[str] = Counter()
    while len(tier) < nodes:
        _serve(tier, next(stream), 1 << 62, Counter())
    capacity, clock_ns, cpu_ns = tier.used, [], []
    for _ in range(requests):
        documents = next(stream)
        begun = time.perf_counter_ns(), time.thread_time_ns()
        _serve(tier, documents, capacity, counts)
        cpu_ns.append(time.thread_time_ns() - begun[1])
        clock_ns.append(time.perf_counter_ns() - begun[0])
    found = {"policy": name, "history": history, "nodes": len(tier), "top_k": top_k, "requests": requests}
    for clock, times_ns in (("", clock_ns), ("cpu_", cpu_ns)):
        ends_ns = percentile(times_ns, 50), percentile(times_ns, 99), max(times_ns)
        found |= {f"{clock}{name}_ms": ns / 1e6 for name, ns in zip(("p50", "p99", "max"), ends_ns, strict=True)}
    shares = {name: counts[name] / requests for name in ("inserted", "evicted")}
    return found | {"hit_ratio": counts["hits"] / (requests * top_k), **shares}


def _requests(rng: random.Random, corpus: int, top_k: int) -> Iterator[list[_Document]]:
    lengths = [max(1, round(MEAN_TOKENS * rng.lognormvariate(-0.125, 0.5))) for _ in range(corpus)]
    ladder = list(accumulate((rank + 1) ** -_EXPONENT for rank in range(corpus)))
    while True:
        chosen: dict[int, None] = {}
        while len(chosen) < top_k:
            chosen[min(bisect_right(ladder, rng.random() * ladder[-1]), corpus - 1)] = None
        yield [(number.to_bytes(8, "big"), lengths[number]) for number in chosen]


def _serve(tier: Tier, documents: Sequence[_Document], capacity: int, counts: Counter[str]) -> None:
    keys: list[bytes] = []
    above = b""
    for name, _ in documents:
        above = blake2b(above + name, digest_size=16).digest()
        keys.append(above)
    held = 0
    while held < len(keys) and keys[held] in tier:
        held += 1
    cached_tokens = sum(tokens for _, tokens in documents[:held])
    missing_tokens = sum(tokens for _, tokens in documents[held:])
    cost = A10G.cost(cached_tokens, missing_tokens + _QUESTION_TOKENS)
    evicted = tier.evict(tier.used + missing_tokens - capacity, protected=set(keys))
    if evicted is not None:
        for place in range(held, len(keys)):
            tier.insert(keys[place], documents[place][1], keys[place - 1] if place else None)
        counts["inserted"] += len(keys) - held
        counts["evicted"] += len(evicted)
    tier.use(keys, cost=cost, computed=set(keys[held:]))
    counts["hits"] += held


KIB_PER_TOKEN = 128
"""KV size of a token of Mistral-7B (RAGCache Table 1)."""

RUN = 10
"""Consecutive requests that are added up before they are compared."""

_COLUMNS = ("retrieved", "hits", "prefill_ms")
_FACTS = ("working_set_tokens", "device_tokens", "host_tokens", "seen_percent")
_TIMES = ("p50_ms", "p99_ms", "max_ms", "requests")


@dataclass(frozen=True, slots=True)
class TierSize:
    """GiB, or percent of the stream's working set."""

    gib: float | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> TierSize:
        """From "8GiB" or "5%". Raises ValueError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|%)", text)
        if match is None or not float(match[1]):
            raise ValueError(f"{text!r} is no size of a tier: give GiB (8GiB) or a share of the working set (5%)")
        number = float(match[1])
        return cls(gib=number) if match[2] == "GiB" else cls(percent=number)

    def tokens(self, working_set_tokens: int, kib_per_token: int = KIB_PER_TOKEN) -> int:
        if self.gib is not None:
            return int(self.gib * (1 << 20) / kib_per_token)
        assert self.percent is not None
        return int(self.percent / 100 * working_set_tokens)


def _size(value: object) -> object:
    if isinstance(value, str):
        TierSize.parse(value)
    return value


SizeText = Annotated[str, BeforeValidator(_size)]
"""What `TierSize.parse` reads."""


class ReplacementCell(SuiteCell):
    """`measure` "hits": a stream on simulated tiers; "scheduling": the time of a request on one tier of `nodes`.

    `device` and `host` are GiB ("8GiB") at `kib_per_token`, or shares of the working set ("5%"). `ordered`: ragorder
    places the documents; it `follow`s the tiers by their events, or by a mirror of its own. The next `waiting` requests
    are known.
    """

    measure: Literal["hits", "scheduling"] = "hits"
    workload: str | None = None
    corpus: str | None = None
    order: Literal["data", "random"] = "random"
    top_k: int = Field(2, ge=1)
    ordered: bool = False
    follow: Literal["mirror", "events"] = "mirror"
    waiting: int = Field(0, ge=0)
    device: SizeText | None = None
    host: SizeText | None = None
    kib_per_token: int = Field(KIB_PER_TOKEN, ge=1)
    nodes: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> ReplacementCell:
        streams = [each for each in (self.workload, self.corpus) if each is not None]
        sizes = [each for each in (self.device, self.host) if each is not None]
        if self.measure == "scheduling":
            if self.nodes is None or streams or sizes or self.ordered:
                raise ValueError('measure = "scheduling" needs nodes, and no stream or size')
            return self
        if self.nodes is not None:
            raise ValueError('nodes go with measure = "scheduling"')
        if len(streams) != 1:
            raise ValueError("a cell has either a workload or a corpus")
        if len(sizes) != 2:
            raise ValueError("device and host: give the sizes of both")
        if self.corpus is None and "order" in self.model_fields_set:
            raise ValueError("order is that of a corpus' questions: a workload has none")
        return self

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None or self.order == "random"


class ReplacementRecord(Record):
    """One policy on one stream, request by request, or (`scheduling`) its times."""

    identified_by = ("suite", "cell", "seed", "policy")

    rows: Annotated[dict[str, Any], BeforeValidator(lambda rows: rows or {})] = Field(default_factory=dict)
    facts: Annotated[dict[str, Any], BeforeValidator(lambda facts: facts or {})] = Field(default_factory=dict)
    scheduling: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.scheduling is not None:
            if not all(isinstance(self.scheduling.get(name), int | float) for name in _TIMES):
                raise ValueError("scheduling: times are missing")
            return self
        if not self.facts.keys() >= set(_FACTS):
            raise ValueError("facts are missing")
        for name in _COLUMNS:
            self.column(name)
        return self

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return () if self.scheduling is not None else _COLUMNS

    @property
    def requests(self) -> int:
        if self.scheduling is not None:
            return int(self.scheduling["requests"])
        return len(self.column("requests"))

    def column(self, name: str) -> Floats:
        if name not in self._columns:
            values = [1] * len(self.rows.get("hits", ())) if name == "requests" else self.rows[name]
            self._columns[name] = as_column(values)[self.warmup :]
        found: Floats = self._columns[name]
        return found

    def sums(self, name: str) -> Floats:
        """The column, added up over runs of up to `RUN` consecutive requests."""
        import numpy as np

        values = self.column(name)
        run = max(1, min(RUN, len(values) // 200))
        found: Floats = np.add.reduceat(values, np.arange(0, len(values), run))
        return found


class Replacement(Experiment):
    kind = "replacement"
    base = ReplacementRecord
    cell = ReplacementCell
    runs = True
    policies: ClassVar[Any] = REPLACEMENT_POLICIES
    unit = "streams"
    counts = "policies"
    simulated = True
    missing_by_cell = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams: dict[tuple[object, ...], tuple[DocumentStream, int]] = {}
        self._said: set[tuple[str, str]] = set()

    def missing(self, suite: Suite, cell: ReplacementCell, policy: str, reason: str) -> Missing | None:
        """A stream that cannot be drawn is reported once, not for every policy."""
        if (suite.name, reason) in self._said:
            return None
        self._said.add((suite.name, reason))
        return self._missing(suite, cell, reason)

    def _missing(self, suite: Suite, cell: ReplacementCell, reason: str) -> Missing:
        named = {"corpus": cell.corpus} if cell.corpus is not None else {"workload": cell.workload}
        return Missing(suite.name, {} if self.options.engine != "sim" else named, suite.baseline, reason)

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
            assert cell.nodes is not None
            shape: dict[str, Any] = {"nodes": cell.nodes, "top_k": cell.top_k, "requests": job.requests}
            return {"scheduling": measure_scheduling(**shape, policy=policy, seed=job.seed)}
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
