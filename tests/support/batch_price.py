"""Plans of a batch on simulated tiers, by cached tokens and by seconds: `python -m support.batch_price [CORPORA]`.

Each plan that `order_batch` considers is served from the same state of the tiers: the best by seconds is a bound for
any comparison in seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click

from ragorder import Orderer
from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream
from ragorder.benchmarks.ragcache.replacement.tiers import A10G, SYSTEM_TOKENS, TwoTiers
from ragorder.ordering import Ordering
from ragorder.scope.request import OrderRequest
from ragorder.scope.scope import Scope
from ragorder.trie.profile import PrefillProfile
from support.inside import batch_orders, dry_run, start_in
from support.price import orderer_of, serve, sizes_of, streams_of

WARM, BATCH = 300, 200
_WINDOWS = (32, BATCH)
_HOST_US = (6.5, 150.0)
_POLICY = "pgdsf"


class _Plan(NamedTuple):
    """`wins`: with equal hits before later ones, as in `plan_batch`."""

    name: str
    run: Callable[[Any, Sequence[OrderRequest[Any]]], None]


class _Served(NamedTuple):
    cached_tokens: int
    seconds: float


def plans(window: int) -> list[_Plan]:
    in_windows, nearest_first, one_by_one = batch_orders()
    whole = [_Plan("planned", partial(in_windows, window=window))]
    nearest = [_Plan("nearest first", partial(nearest_first, window=window))] if window < BATCH else []
    return [*whole, *nearest, _Plan("one by one", one_by_one)]


def measure(stream: DocumentStream, plan: _Plan, profile: Path) -> _Served:
    """Cached tokens of the dry run, by which plans are compared, and the seconds that serving takes."""
    device, host = sizes_of(stream)
    tiers = TwoTiers(device, host, _POLICY, 65_536, PrefillProfile.from_file(profile))
    orderer = orderer_of(
        stream,
        capacity_tokens=SYSTEM_TOKENS + device,
        host_tokens=host,
        tier_policy=_POLICY,
        tier_copies="evicted",
        profile=profile,
    )
    warm, batch = stream.requests[:WARM], stream.requests[WARM : WARM + BATCH]
    serve(replace(stream, requests=warm), orderer, tiers, lambda ordering, served: None)
    requests, run = dry_run(orderer, batch)
    plan.run(run, requests)
    seconds = 0.0
    for number, permutation in run.steps:
        ordering = _start(orderer, requests[number], None if plan.name == "one by one" else permutation)
        served = tiers.serve(ordering.documents, stream.tokens, ordering.expected_uses)
        ordering.confirm(served.cached_tokens)
        seconds += served.seconds
    return _Served(run.cached_tokens, seconds)


def _start(orderer: Orderer, request: OrderRequest[Any], permutation: list[int] | None) -> Ordering[Any]:
    def start(scope: Scope) -> Ordering[Any]:
        return scope.order(request, (), None) if permutation is None else scope.start(request, permutation, None)

    return start_in(orderer, start)


def main(corpora: Path | None) -> None:
    click.echo("seconds of the plan with most cached tokens, by those of the best one, percent (all seeds); plans that")
    click.echo("differ, of all; seconds of the worst plan, by those of the best one, percent")
    click.echo(" | ".join(["trace", *(f"max_wait {w - 1}, {us:g} µs" for w in _WINDOWS for us in _HOST_US)]))
    with tempfile.TemporaryDirectory() as folder:
        profiles = {host_us: Path(folder) / f"{host_us}.json" for host_us in _HOST_US}
        for host_us, path in profiles.items():
            replace(A10G, loads={"host": 1e-6 * host_us}).to_file(path)
        for name, streams in streams_of(corpora, WARM + BATCH):
            cells = []
            for window in _WINDOWS:
                for path in profiles.values():
                    found = [[measure(stream, plan, path) for plan in plans(window)] for stream in streams]
                    lost = [_lost(each, max(each, key=lambda one: one.cached_tokens)) for each in found]
                    worst = [_lost(each, max(each, key=lambda one: one.seconds)) for each in found]
                    cells.append(f"{fmean(lost):.2f}, {sum(map(bool, lost))} of {len(lost)}, {fmean(worst):.1f}")
            click.echo(" | ".join([name, *cells]))


def _lost(plans: Sequence[_Served], chosen: _Served) -> float:
    return 100 * (chosen.seconds / min(each.seconds for each in plans) - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
