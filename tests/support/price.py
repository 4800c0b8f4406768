"""Cached paths chosen by tokens and by seconds, on simulated tiers: `python -m support.price [FOLDER OF CORPORA]`.

The tiers are RAGCache's (`TwoTiers`): 1 percent of what would be cached in the end on the device, 8 in host memory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click

from ragorder import Orderer
from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream, stream_of_trace
from ragorder.benchmarks.ragcache.replacement.tiers import A10G, SYSTEM_TOKENS, SimulatedPrefill, TwoTiers
from ragorder.eval.data.corpora.folder import load_folder
from ragorder.eval.data.trace import trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.ordering import Ordering
from ragorder.trie.profile import PrefillProfile

_WORKLOADS = ("mix8", "geo", "zipf10", "paper-shuf")
_CORPORA = ("covidqa", "bing_covid_cord", "nqopen")
_POLICIES = ("lru", "pgdsf")
_SEEDS = (0, 1, 2)
_REQUESTS = 1200
_HISTORY = 65_536
# 128 KiB of KV a token at 20, 2 and 0.9 GB/s; the A10G computes one in 220 microseconds and more.
_HOST_US = (6.5, 65.0, 150.0)


def orderer_of(stream: DocumentStream, **settings: Any) -> Orderer:
    return Orderer(
        key=lambda document: document,
        tokens=stream.tokens.__getitem__,
        block_size=1,
        prefix_tokens=SYSTEM_TOKENS,
        suffix_tokens=0,
        strict=True,
        **settings,
    )


def sizes_of(stream: DocumentStream) -> tuple[int, int]:
    """Device and host in tokens."""
    return max(stream.working_set_tokens // 100, stream.longest_tokens), 8 * stream.working_set_tokens // 100


def serve(
    stream: DocumentStream, orderer: Orderer, tiers: TwoTiers, look: Callable[[Ordering[int], SimulatedPrefill], None]
) -> None:
    for documents in stream.requests:
        ordering = orderer.order(documents)
        served = tiers.serve(ordering.documents, stream.tokens, ordering.expected_uses)
        ordering.confirm(served.cached_tokens)
        look(ordering, served)


class Measured(NamedTuple):
    """Of one stream; `wrong`: tokens predicted in the wrong tier, by those cached."""

    prefill_s: float
    wrong: float


def measure(stream: DocumentStream, policy: str, profile: Path, *, priced: bool) -> Measured:
    device, host = sizes_of(stream)
    tiers = TwoTiers(device, host, policy, _HISTORY, PrefillProfile.from_file(profile))
    sizes = {
        "capacity_tokens": SYSTEM_TOKENS + device,
        "host_tokens": host,
        "tier_policy": policy,
        "tier_copies": "evicted",
    }
    orderer = orderer_of(stream, **sizes, profile=profile if priced else None)
    seconds = cached = wrong = 0.0

    def look(ordering: Ordering[int], served: SimulatedPrefill) -> None:
        nonlocal seconds, cached, wrong
        seconds += served.seconds
        cached += served.cached_tokens
        wrong += abs(ordering.host_tokens - served.host_tokens)

    serve(stream, orderer, tiers, look)
    return Measured(seconds, wrong / cached)


def streams_of(corpora: Path | None, requests: int = _REQUESTS) -> Iterator[tuple[str, list[DocumentStream]]]:
    """By name, one for each seed."""
    for name in _WORKLOADS:
        yield name, [stream_of_trace(trace_of_workload(make_workload(name, seed), requests)) for seed in _SEEDS]
    for name in _CORPORA if corpora is not None else ():
        corpus = load_folder(Path(corpora or "") / name)
        traces = [trace_of_corpus(corpus, top_k=5, order="random", seed=seed, limit=requests) for seed in _SEEDS]
        yield f"{name}, top 5", [stream_of_trace(trace) for trace in traces]


def main(corpora: Path | None) -> None:
    heads = [f"{policy}, {host_us:g}" for policy in _POLICIES for host_us in _HOST_US]
    click.echo("prefill seconds by tokens -> by seconds (change; over the seeds), µs to load a token from the host;")
    click.echo("tokens predicted in the wrong tier, percent of those cached, by policy")
    click.echo(" | ".join(["trace", *heads, *_POLICIES]))
    with tempfile.TemporaryDirectory() as folder:
        profiles = {host_us: Path(folder) / f"{host_us}.json" for host_us in _HOST_US}
        for host_us, path in profiles.items():
            replace(A10G, loads={"host": 1e-6 * host_us}).to_file(path)
        for name, streams in streams_of(corpora):
            cells, wrong = [], []
            for policy in _POLICIES:
                shares = []
                for path in profiles.values():
                    pairs = [
                        [measure(each, policy, path, priced=priced) for priced in (False, True)] for each in streams
                    ]
                    seconds = [[each.prefill_s for each in pair] for pair in pairs]
                    changes = [100 * (after / before - 1) for before, after in seconds]
                    before, after = map(fmean, zip(*seconds, strict=True))
                    spread = f"{min(changes):+.1f} to {max(changes):+.1f}"
                    cells.append(f"{before:.0f} -> {after:.0f} ({100 * (after / before - 1):+.1f} %; {spread})")
                    shares += [each.wrong for _, each in pairs]
                wrong.append(f"{100 * min(shares):.1f} to {100 * max(shares):.1f}")
            click.echo(" | ".join([name, *cells, *wrong]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
