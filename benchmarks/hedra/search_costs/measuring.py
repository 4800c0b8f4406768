"""Processor time of scans and decoding steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.scanner import one_thread
from ragorder.pipelining.staged._ivf import ClusterIndex

if TYPE_CHECKING:
    from ragorder.eval.engines.torch import TorchEngine

__all__ = ["batch_ms", "cluster_ms", "decoding_ms", "scans"]

Vectors = NDArray[np.float32]

_K = 1
_FIRST_CODE_S = 1e-7
_REPEATS = 5
_SMALLEST_STEP = 64


def scans(index: Any, queries: Vectors, calls: int) -> dict[str, list[float]]:
    """Codes, milliseconds and predicted milliseconds of calls with one cluster up to a quarter of them."""
    scanned, draw, costs = ClusterIndex(index, "a measurement"), random.Random(0), ClusterCosts(_FIRST_CODE_S)
    rows: dict[str, list[float]] = {"codes": [], "ms": [], "predicted_ms": []}
    with one_thread():
        for number in range(calls):
            query = queries[number % len(queries), None]
            coarse, clusters = scanned.nearest_clusters(query, index.nlist, 1)
            count = draw.randint(1, max(1, index.nlist // 4))
            first = draw.randrange(index.nlist - count + 1)
            chosen = slice(first, first + count)
            codes = sum(map(index.get_list_size, clusters[0, chosen].tolist()))
            predicted_ms = 1e3 * costs.seconds(codes)
            ms = _cpu_ms(lambda: scanned.scan(query, _K, clusters[:, chosen], coarse[:, chosen]))  # noqa: B023
            costs.learn(codes, 1e-3 * ms)
            for name, value in (("codes", codes), ("ms", ms), ("predicted_ms", predicted_ms)):
                rows[name].append(round(value, 5))
    return rows


def cluster_ms(index: Any, query: Vectors) -> list[float]:
    """Of each cluster by itself, the median of some scans (Figure 6b)."""
    scanned = ClusterIndex(index, "a measurement")
    with one_thread():
        coarse, clusters = scanned.nearest_clusters(query[None], index.nlist, 1)
        return [
            _median_ms(lambda: scanned.scan(query[None], _K, clusters[:, [place]], coarse[:, [place]]))  # noqa: B023
            for place in range(index.nlist)
        ]


def batch_ms(index: Any, queries: Vectors) -> float:
    """Of whole searches in one call, each."""
    with one_thread():
        return _median_ms(lambda: index.search(queries, _K)) / len(queries)


def decoding_ms(engine: TorchEngine, vocabulary: int, requests: int, context: int, steps: int) -> float:
    """Of a step that decodes a token for each of these requests (Figures 4 and 6a). The median."""
    engine.reset()
    draw = random.Random(requests * context)
    # What has been prefilled decodes while the others are.
    longest = steps + requests * (1 + context // _SMALLEST_STEP)
    for _ in range(requests):
        prompt = [draw.randrange(vocabulary) for _ in range(context)]
        engine.engine.add(engine.request(prompt, output_tokens=longest))
    begun: set[int] = set()
    while len(begun) < requests:
        begun.update(update.request_id for update in engine.engine.step())
    times = [_cpu_ms(engine.engine.step) for _ in range(steps)]
    for request in begun:
        engine.engine.abort(request)
    return median(times)


def _cpu_ms(call: Callable[[], object]) -> float:
    started_s = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - started_s)


def _median_ms(call: Callable[[], object]) -> float:
    return median(_cpu_ms(call) for _ in range(_REPEATS))
