"""Scheduling time of a request: lookup and update of the knowledge tree, and eviction (RAGCache 7.5).

`python -m ragorder.eval.scheduling` serves requests on a full tier of 100,000 documents, metadata only, and times each
of them whole: the keys of its path, the lookup, the cost of the new documents (bilinear interpolation), eviction,
insertion and use. The paper's 0.872 to 0.906 ms include its queue and its pipelining decisions.
"""

from __future__ import annotations

import json
import random
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate

import click

from ragorder.eval.data.machine import describe_environment
from ragorder.eval.running.measures import percentile
from ragorder.kernels.policies import POLICIES, History, Tier, make_policy
from ragorder.kernels.profile import PrefillProfile

__all__ = ["SchedulingTimes", "main", "measure_scheduling"]

_EXPONENT = 0.8
"""Of the documents' popularity (Zipf): few of the paths are retrieved again and again, most of them hardly ever."""

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
"""Of the size and the shape that a measured one has; its times do not matter here."""


@dataclass(frozen=True, slots=True)
class SchedulingTimes:
    """Times a request in ms, with the tier as full as it was: by the clock, and this thread's CPU time, which says more
    on a busy machine. `hit_ratio` is the share of the retrieved documents that the tier held, `evicted` and `inserted`
    are documents a request."""

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
    """Fill a tier with requests until it holds so many documents, then time requests on it.

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
    """p50, p99 and the longest."""
    return percentile(times_ns, 50) / 1e6, percentile(times_ns, 99) / 1e6, max(times_ns) / 1e6


def _requests(rng: random.Random, corpus: int, top_k: int) -> Iterator[list[_Document]]:
    """The documents of one request after the other, drawn by popularity, none of them twice in one."""
    lengths = [max(1, round(_MEAN_TOKENS * rng.lognormvariate(-0.125, 0.5))) for _ in range(corpus)]
    ladder = list(accumulate((rank + 1) ** -_EXPONENT for rank in range(corpus)))
    while True:
        chosen: dict[int, None] = {}
        while len(chosen) < top_k:
            chosen[min(bisect_right(ladder, rng.random() * ladder[-1]), corpus - 1)] = None
        yield [(number.to_bytes(8, "big"), lengths[number]) for number in chosen]


def _serve(tier: Tier, documents: Sequence[_Document], capacity: int, counts: _Counts) -> None:
    """All that the tier has to do with a request."""
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


@click.command()
@click.option("--nodes", type=click.IntRange(min=1), default=100_000, show_default=True, help="Documents held.")
@click.option("--top-k", type=click.IntRange(min=1), default=5, show_default=True, help="Documents a request.")
@click.option("--requests", type=click.IntRange(min=1), default=20_000, show_default=True, help="That are timed.")
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), help="[default: all]")
@click.option("--history/--no-history", default=True, show_default=True, help="Frequencies survive eviction.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the requests.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def main(
    nodes: int, top_k: int, requests: int, policies: Sequence[str], history: bool, seed: int, as_json: bool
) -> None:
    """Scheduling time a request, on this machine."""
    # First, as measuring is a load, too.
    environment = describe_environment()
    rows = [
        measure_scheduling(nodes=nodes, top_k=top_k, requests=requests, policy=policy, history=history, seed=seed)
        for policy in policies or POLICIES
    ]
    if as_json:
        click.echo(json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}))
        return
    click.echo(f"{nodes:,} documents held, top-{top_k}, {requests:,} requests; ms a request (the paper: 0.9):")
    for row in rows:
        click.echo(
            f"{row.policy:6} p50 {row.p50_ms:.3f}  p99 {row.p99_ms:.3f}  max {row.max_ms:.3f}  CPU time p50"
            f" {row.cpu_p50_ms:.3f}  p99 {row.cpu_p99_ms:.3f}  max {row.cpu_max_ms:.3f}"
            f"  (hits {row.hit_ratio:.0%}, {row.inserted:.1f} documents in and {row.evicted:.1f} out)"
        )
    click.echo(", ".join(f"{name}: {value}" for name, value in environment.items()))


if __name__ == "__main__":
    main()
