"""Time that the knowledge tree takes a request on a full tier, metadata only (RAGCache 7.5).

A request is timed whole: the keys of its path, the lookup, the cost of the new documents (bilinear interpolation),
eviction, insertion and use. The paper's 0.872 to 0.906 ms include its queue and its pipelining decisions.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from ragorder.eval.running.measures import percentile
from ragorder.trie.policies import History, Tier, make_policy
from ragorder.trie.profile import PrefillProfile

__all__ = ["SchedulingTimes", "measure_scheduling"]

_EXPONENT = 0.8
"""Of the documents' popularity (Zipf)."""

_MEAN_TOKENS = 3_718
"""The mean length of the paper's documents."""

_QUESTION_TOKENS = 64

_Document = tuple[bytes, int]
"""Its id and its tokens."""

_GRID = (0, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
_PROFILE = PrefillProfile(
    _GRID,
    _GRID[1:],
    tuple(tuple(0.025 + new * 2.2e-4 + new * (cached + new / 2) * 3.2e-8 for new in _GRID[1:]) for cached in _GRID),
)
"""With the shape of a measured one; its times do not matter here."""


@dataclass(frozen=True, slots=True)
class SchedulingTimes:
    """Wall and thread CPU times of a request. `hit_ratio` is of the retrieved documents; `evicted` and `inserted` are
    documents a request."""

    policy: str
    history: bool
    nodes: int
    top_k: int
    requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float
    cpu_max_ms: float
    hit_ratio: float
    inserted: float
    evicted: float


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    inserted: int = 0
    evicted: int = 0


def measure_scheduling(
    *,
    nodes: int = 100_000,
    top_k: int = 5,
    requests: int = 20_000,
    policy: str = "pgdsf",
    history: bool = True,
    seed: int = 0,
) -> SchedulingTimes:
    """Fill a tier with requests until it holds `nodes` documents, then time requests on it.

    Raises ValueError for an unknown policy.
    """
    tier = Tier(make_policy(policy), History(nodes) if history else None)
    stream = _requests(random.Random(seed), corpus=2 * nodes + top_k, top_k=top_k)
    filling, counts = _Counts(), _Counts()
    while len(tier) < nodes:
        _serve(tier, next(stream), 1 << 62, filling)
    capacity = tier.used
    clock_ns, cpu_ns = [], []
    for _ in range(requests):
        documents = next(stream)
        begun = time.perf_counter_ns(), time.thread_time_ns()
        _serve(tier, documents, capacity, counts)
        cpu_ns.append(time.thread_time_ns() - begun[1])
        clock_ns.append(time.perf_counter_ns() - begun[0])
    p50_ms, p99_ms, max_ms = _milliseconds(clock_ns)
    cpu_p50_ms, cpu_p99_ms, cpu_max_ms = _milliseconds(cpu_ns)
    return SchedulingTimes(
        policy=policy,
        history=history,
        nodes=len(tier),
        top_k=top_k,
        requests=requests,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        max_ms=max_ms,
        cpu_p50_ms=cpu_p50_ms,
        cpu_p99_ms=cpu_p99_ms,
        cpu_max_ms=cpu_max_ms,
        hit_ratio=counts.hits / (requests * top_k),
        inserted=counts.inserted / requests,
        evicted=counts.evicted / requests,
    )


def _milliseconds(times_ns: Sequence[int]) -> tuple[float, float, float]:
    return percentile(times_ns, 50) / 1e6, percentile(times_ns, 99) / 1e6, max(times_ns) / 1e6


def _requests(rng: random.Random, corpus: int, top_k: int) -> Iterator[list[_Document]]:
    lengths = [max(1, round(_MEAN_TOKENS * rng.lognormvariate(-0.125, 0.5))) for _ in range(corpus)]
    ladder = list(accumulate((rank + 1) ** -_EXPONENT for rank in range(corpus)))
    while True:
        chosen: dict[int, None] = {}
        while len(chosen) < top_k:
            chosen[min(bisect_right(ladder, rng.random() * ladder[-1]), corpus - 1)] = None
        yield [(number.to_bytes(8, "big"), lengths[number]) for number in chosen]


def _serve(tier: Tier, documents: Sequence[_Document], capacity: int, counts: _Counts) -> None:
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
    cost = _PROFILE.cost(cached_tokens, missing_tokens + _QUESTION_TOKENS)
    evicted = tier.evict(tier.used + missing_tokens - capacity, protected=set(keys))
    if evicted is not None:
        for place in range(held, len(keys)):
            tier.insert(keys[place], documents[place][1], keys[place - 1] if place else None)
        counts.inserted += len(keys) - held
        counts.evicted += len(evicted)
    tier.use(keys, cost=cost, computed=set(keys[held:]))
    counts.hits += held
