"""Synthetic request traces, deterministic for a seed.

`paper` is RAGCache++ section 4.1, `geo` 4.7. In `paper` documents kept from the predecessor stay in their places, which
flatters retrieval order; `paper-shuf` shuffles the ranks. `ovX-kept` is `paper` with overlap X, as the paper sweeps it,
`ovX` is `paper-shuf` with overlap X. In `disjoint` consecutive requests share nothing, in `unique` none do. `mix8`
interleaves eight tenants, `mixN` N of them, `zipf10` draws ten documents by Zipf(1.0), `zipf10-X` with exponent X.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate

from ragorder.document import Document
from ragorder.errors import RagorderError
from ragorder.eval.data.names import unknown

WORKLOADS = ("paper", "paper-shuf", "ov0.0", "ov0.2", "ov0.4", "ov0.6", "ov0.8", "mix8", "zipf10", "geo")
CONTROLS = ("disjoint", "unique")

Ranking = list[int]

_REGIONS = 50
_DOCUMENTS_PER_REGION = 10
_BURST = 10
_ZIPF_DOCUMENTS = 2_000
_CITIES = 20
_DOCUMENTS_PER_CITY = 10
_RADIUS = 0.7


class WorkloadError(RagorderError, ValueError):
    """A workload is unknown or cannot be drawn. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Workload:
    """For each request its documents by number, best first; `in_flight` requests are concurrent."""

    name: str
    documents: list[Document]
    rankings: list[Ranking]
    in_flight: int = 1


def make_workload(name: str, seed: int, *, top_k: int | None = None, requests: int = 0) -> Workload:
    """Raises WorkloadError for an unknown name, or for more documents a request than the workload can draw."""
    if mixed := re.fullmatch(r"mix([1-9]\d{0,3})", name):
        streams = int(mixed[1])
        rankings, corpus_size, in_flight = *_mixed(seed, max(requests, 1200), top_k or 5, streams), streams
    elif name.startswith("zipf10"):
        rankings, corpus_size, in_flight = *_zipf(seed, max(requests, 1200), top_k or 10, _exponent(name)), 1
    elif name == "disjoint":
        rankings, corpus_size, in_flight = *_disjoint(seed, max(requests, 600), top_k or 5), 1
    elif name == "unique":
        rankings, corpus_size, in_flight = *_unique(seed, max(requests, 600), top_k or 5), 1
    elif name == "geo":
        rankings, corpus_size, in_flight = *_geo(seed, max(requests, 600), top_k or 5), 1
    else:
        overlap, shuffle = _overlap(name)
        drawn = _bursts(seed, max(requests, 600), top_k or 5, overlap, shuffle)
        rankings, corpus_size, in_flight = *drawn, 1
    return Workload(name, [_document(number) for number in range(corpus_size)], rankings, in_flight)


def _overlap(name: str) -> tuple[float, bool]:
    if name in ("paper", "paper-shuf"):
        return 0.6, name == "paper-shuf"
    match = re.fullmatch(r"ov(0(?:\.\d+)?|1(?:\.0+)?)(-kept)?", name)
    if match is None:
        raise _unknown(name)
    return float(match[1]), match[2] is None


def _exponent(name: str) -> float:
    match = re.fullmatch(r"zipf10(?:-(\d+(?:\.\d+)?))?", name)
    if match is None:
        raise _unknown(name)
    return float(match[1] or 1)


def _unknown(name: str) -> WorkloadError:
    return WorkloadError(
        f"{unknown('workload', name, [*WORKLOADS, *CONTROLS, 'pydocs'])}, ovX or ovX-kept with X from 0 to 1, "
        "mixN with N streams, or zipf10-X with a popularity exponent"
    )


def document_tokens(number: int) -> int:
    """About 200, fixed for the number."""
    return 180 + (number * 7919) % 41


def _document(number: int) -> Document:
    rng = random.Random(number)
    length = document_tokens(number)
    words = (rng.choice(_ONSETS) + rng.choice(_RHYMES) for _ in range(length // 2))
    return Document(f"d{number}", " ".join(words), tokens=length)


_ONSETS = (
    *("b", "br", "c", "cl", "d", "dr", "f", "g", "gr", "h"),
    *("l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v"),
)
_RHYMES = ("ain", "and", "are", "ate", "eal", "ed", "ent", "er", "est", "ice", "ide", "ill", "ine", "on", "ore", "own")


def _bursts(seed: int, requests: int, k: int, overlap: float, shuffle: bool) -> tuple[list[Ranking], int]:
    if k > _DOCUMENTS_PER_REGION:
        raise WorkloadError(f"this workload draws from regions of {_DOCUMENTS_PER_REGION}: lower top-k ({k})")
    rng = random.Random(seed)
    trace: list[Ranking] = []
    for number in range(requests):
        region = (number // _BURST) % _REGIONS
        documents = [region * _DOCUMENTS_PER_REGION + i for i in range(_DOCUMENTS_PER_REGION)]
        if number % _BURST == 0:
            selected = rng.sample(documents, k)
        else:
            previous = trace[-1]
            kept_count = max(1, int(k * overlap))
            kept = rng.sample(previous, kept_count) if shuffle else previous[:kept_count]
            selected = kept + rng.sample([d for d in documents if d not in kept], k - kept_count)
            if shuffle:
                rng.shuffle(selected)
        trace.append(selected)
    return trace, _REGIONS * _DOCUMENTS_PER_REGION


def _disjoint(seed: int, requests: int, k: int) -> tuple[list[Ranking], int]:
    if k > _DOCUMENTS_PER_REGION:
        raise WorkloadError(f"this workload draws from regions of {_DOCUMENTS_PER_REGION}: lower top-k ({k})")
    rng = random.Random(seed)
    regions = [number % _REGIONS * _DOCUMENTS_PER_REGION for number in range(requests)]
    trace = [rng.sample(range(first, first + _DOCUMENTS_PER_REGION), k) for first in regions]
    return trace, _REGIONS * _DOCUMENTS_PER_REGION


def _unique(seed: int, requests: int, k: int) -> tuple[list[Ranking], int]:
    documents = list(range(requests * k))
    random.Random(seed).shuffle(documents)
    return [documents[number * k : (number + 1) * k] for number in range(requests)], requests * k


def _mixed(seed: int, requests: int, k: int, streams: int) -> tuple[list[Ranking], int]:
    rng = random.Random(seed + 99)
    starts = [rng.randrange(50) * 10 for _ in range(streams)]
    rates = [rng.expovariate(1) + 0.2 for _ in range(streams)]
    turns = [rng.choices(range(streams), rates)[0] for _ in range(requests)]
    drawn = Counter(turns)
    sources = []
    for stream, start in enumerate(starts):
        # Only as long as it is needed: there may be hundreds of streams.
        trace, _ = _bursts(seed * 1000 + stream, min(requests, start + drawn[stream]), k, 0.6, shuffle=True)
        sources.append(deque(trace[start:] + trace[:start]))
    return [sources[stream].popleft() for stream in turns], _REGIONS * _DOCUMENTS_PER_REGION


def _zipf(seed: int, requests: int, k: int, exponent: float) -> tuple[list[Ranking], int]:
    if k > _ZIPF_DOCUMENTS // 10:
        raise WorkloadError(f"zipf10 draws from {_ZIPF_DOCUMENTS} documents: lower top-k ({k})")
    rng = random.Random(seed)
    weights = [1 / (i + 1) ** exponent for i in range(_ZIPF_DOCUMENTS)]
    total = sum(weights)
    cumulative = list(accumulate(weight / total for weight in weights))
    by_popularity = list(range(_ZIPF_DOCUMENTS))
    rng.shuffle(by_popularity)
    trace = []
    for _ in range(requests):
        selected: Ranking = []
        while len(selected) < k:
            drawn = by_popularity[min(bisect_left(cumulative, rng.random()), _ZIPF_DOCUMENTS - 1)]
            if drawn not in selected:
                selected.append(drawn)
        rng.shuffle(selected)
        trace.append(selected)
    return trace, _ZIPF_DOCUMENTS


def _geo(seed: int, requests: int, k: int) -> tuple[list[Ranking], int]:
    if k > 15:
        raise WorkloadError(f"geo draws from the 15 nearest documents and more: lower top-k ({k}) to 15")
    rng = random.Random(seed)
    places = [(40 + (i // 5) * 0.5, -74 + (i % 5) * 0.4) for i in range(_CITIES)]
    city = rng.randrange(_CITIES)
    trace = []
    for _ in range(requests):
        if rng.random() < 0.3:
            city = rng.randrange(_CITIES)
        near = [i for i in range(_CITIES) if math.dist(places[city], places[i]) <= _RADIUS]
        documents = [i * _DOCUMENTS_PER_CITY + j for i in near for j in range(_DOCUMENTS_PER_CITY)]
        trace.append(rng.sample(documents[: max(k * 3, 15)], k))
    return trace, _CITIES * _DOCUMENTS_PER_CITY
