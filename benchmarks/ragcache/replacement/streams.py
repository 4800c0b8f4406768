"""Streams of requests as a cache of documents sees them."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ragorder.document import Document
from ragorder.eval.data.trace import Trace
from ragorder.eval.data.workloads import WorkloadError

SKEWED = {"mmlu-like": 0.6, "nq-like": 0.4}
"""Streams with RAGCache's statistics: the share of the requests that the most popular 3 % of the documents have.

60 % is the paper's for MMLU (section 3.2); for Natural Questions it shows only a curve, and 40 % is our choice."""

_DOCUMENTS = 10_000
_POPULAR = 0.03
MEAN_TOKENS = 3_718
"""Of a document of the paper's."""
_SPREAD = 0.8
_LONGEST = 16_384
_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class DocumentStream:
    """Requests as numbers of documents, best first; `tokens` are lengths by number."""

    name: str
    requests: Sequence[tuple[int, ...]]
    tokens: Sequence[int]

    @property
    def working_set_tokens(self) -> int:
        """The final size of a cache that never evicts: each document once for each sequence before it."""
        paths = {request[:end] for request in self.requests for end in range(1, len(request) + 1)}
        return sum(self.tokens[path[-1]] for path in paths)

    @property
    def longest_tokens(self) -> int:
        return max((sum(self.tokens[document] for document in request) for request in self.requests), default=0)

    def seen_before(self) -> list[int]:
        """The documents of each request that such a cache would hit."""
        seen: set[tuple[int, ...]] = set()
        found = []
        for request in self.requests:
            paths = [request[:end] for end in range(1, len(request) + 1)]
            found.append(sum(path in seen for path in paths))
            seen.update(paths)
        return found


def stream_of_trace(trace: Trace) -> DocumentStream:
    """A document that a request has twice counts once."""
    numbers: dict[str, int] = {}
    known: list[Document] = []
    requests = []
    for request in trace.requests:
        for document in request.documents:
            if document.key not in numbers:
                numbers[document.key] = len(known)
                known.append(document)
        requests.append(tuple(dict.fromkeys(numbers[document.key] for document in request.documents)))
    return DocumentStream(trace.name, requests, [max(1, document.token_count) for document in known])


def skewed_stream(name: str, seed: int, *, top_k: int, requests: int) -> DocumentStream:
    """A stream with RAGCache's statistics: of 10,000 documents the most popular 3 % come first in a share of the
    requests (`SKEWED`), the others of a request are neighbours of the first, and lengths are lognormal with mean 3,718
    tokens (section 3.1), cut at 16,384. Neighbours (twenty, near ones more often) and sigma are our choice.

    Raises WorkloadError for more documents a request than neighbours.
    """
    if not 1 <= top_k <= _NEIGHBOURS:
        raise WorkloadError(f"{name} draws from {_NEIGHBOURS} neighbours: lower top-k ({top_k})")
    rng = random.Random(f"{name} {seed}")
    cumulative = _zipf(_exponent(SKEWED[name]))
    by_popularity = list(range(_DOCUMENTS))
    rng.shuffle(by_popularity)
    mean = math.log(MEAN_TOKENS) - _SPREAD**2 / 2
    tokens = [min(_LONGEST, max(1, round(rng.lognormvariate(mean, _SPREAD)))) for _ in range(_DOCUMENTS)]
    nearness = [1 / rank for rank in range(1, _NEIGHBOURS + 1)]
    neighbours: dict[int, list[int]] = {}

    def draw(source: random.Random) -> int:
        return by_popularity[min(bisect_left(cumulative, source.random()), _DOCUMENTS - 1)]

    trace = []
    for _ in range(requests):
        first = draw(rng)
        if top_k > 1 and first not in neighbours:
            # The same neighbours, whichever request draws the document first.
            own = random.Random(f"{name} {seed} {first}")
            found: dict[int, None] = {}
            while len(found) < _NEIGHBOURS:
                if (near := draw(own)) != first:
                    found[near] = None
            neighbours[first] = list(found)
        request = [first]
        while len(request) < top_k:
            (near,) = rng.choices(neighbours[first], nearness)
            if near not in request:
                request.append(near)
        trace.append(tuple(request))
    return DocumentStream(name, trace, tokens)


def _exponent(share: float) -> float:
    """The exponent with which the most popular 3 % have this share."""
    low, high = 0.0, 3.0
    popular = round(_DOCUMENTS * _POPULAR)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _zipf(middle)[popular - 1] < share else (low, middle)
    return high


def _zipf(exponent: float) -> list[float]:
    weights = [rank**-exponent for rank in range(1, _DOCUMENTS + 1)]
    total = sum(weights)
    return list(accumulate(weight / total for weight in weights))
