"""Processor time of the smallest pieces of work: scans of clusters, and decoding steps (HedraRAG Figures 4 and 6)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.declared import Block, TableForm
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.common.vectors import Vectors
    from ragorder.eval.engines.torch import TorchEngine

_QUERIES = 40
_BATCHES = (1, 4, 16, 64)
_NPROBE = 0.25
_REQUESTS = (1, 2, 4, 8, 16)
_CONTEXTS = (128, 512, 1024)
_K = 1
_FIRST_CODE_S = 1e-7
_REPEATS = 5
_SMALLEST_STEP = 64


class CostsCell(SeedlessCell):
    """`calls` that scan clusters of an index of random vectors, and `steps` of a model of one `shape`."""

    vectors: int = Field(100_000, ge=1000)
    dimensions: int = Field(128, ge=1)
    calls: int = Field(1000, ge=16)
    shape: Literal["tiny", "small"] = "small"
    steps: int = Field(10, ge=1)


def explained(line: Record) -> float:
    """Return R²: the share of the variance of the later half of the calls that was predicted from those before each."""
    half = len(line.rows["ms"]) // 2
    times, predicted = line.rows["ms"][half:], line.rows["predicted_ms"][half:]
    mean = fmean(times)
    unexplained = sum((ms - guess) ** 2 for ms, guess in zip(times, predicted, strict=True))
    return 1 - float(unexplained / sum((ms - mean) ** 2 for ms in times))


def _scanned(block: Block) -> Iterator[tuple[str, str]]:
    for line in block.groups[0].runs("scans"):
        codes, times, clusters = line.rows["codes"], line.rows["ms"], line.facts["clusters"]
        yield "calls", f"{len(times):,}"
        yield "ns a vector, mean", format_number(1e6 * sum(times) / sum(codes))
        yield "R² of what was predicted", format_number(explained(line), 3)
        tenths = quantiles(clusters, n=10)
        for name, ms in (("first tenth", tenths[0]), ("median", tenths[4]), ("last tenth", tenths[8])):
            yield f"a cluster, {name}, µs", format_number(1e3 * ms)
        yield "a cluster, longest, µs", format_number(1e3 * max(clusters))
        for batch, ms in line.facts["queries"].items():
            yield f"a whole search in a call of {batch}, ms", format_number(ms, 2)


def _decoded(block: Block) -> Iterator[list[str]]:
    for line in block.groups[0].runs("decoding"):
        ms = iter(line.rows["ms"])
        yield from ([str(requests), *(format_number(next(ms)) for _ in _CONTEXTS)] for requests in _REQUESTS)


_TABLES = (
    TableForm(
        lambda block: (
            f"Scans of some clusters: {block.cell.vectors:,} vectors of {block.cell.dimensions} in "
            f"{len(block.groups[0].runs('scans')[0].facts['clusters'])} clusters"
        ),
        ["", ""],
        "Processor time. R²: of the later half of the calls, each predicted by ClusterCosts from those before.",
        rows=_scanned,
    ),
    TableForm(
        "A decoding step, ms: the embedded engine, {cell.shape}",
        ["requests", *(f"context {context}" for context in _CONTEXTS)],
        "Processor time of one core, median.",
        rows=_decoded,
    ),
)


class SearchCosts(Experiment):
    """Scans: columns `codes` and `ms` of each call, and the `predicted_ms` of it from those before; facts:
    milliseconds of the `clusters` one by one, and of a call with several `queries`. Decoding: `ms` of a step by
    `requests` and `context`."""

    kind = "search-costs"
    cell = CostsCell
    columns = ("ms",)
    policies: ClassVar[Any] = ("scans", "decoding")
    unit = "measurements"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    tables: ClassVar[Any] = (_TABLES,)

    def obstacle(self, suite: Suite, cell: CostsCell, policy: str) -> str | None:
        return (lacks_torch() if policy == "decoding" else None) or super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        for policy in job.policies:
            found = _scans(job.cell) if policy == "scans" else _decoding(job.cell)
            yield {"policy": policy, **found}
            advance()


def _scans(cell: CostsCell) -> dict[str, Any]:
    clusters = cell.vectors // 50
    index = build_index(clustered(cell.vectors, cell.dimensions, clusters=clusters, seed=0), _NPROBE, sampled=True)
    queries = clustered(max(_BATCHES), cell.dimensions, clusters=clusters, seed=1)
    facts = {
        "clusters": [round(each, 5) for each in cluster_ms(index, queries[0])],
        "queries": {str(batch): _batch_ms(index, queries[:batch]) for batch in _BATCHES},
    }
    return {"engine": {"name": "faiss"}, "facts": facts, "rows": scans(index, queries[:_QUERIES], cell.calls)}


def _decoding(cell: CostsCell) -> dict[str, Any]:
    from ragorder.benchmarks.kernels.embedded.models import SHAPES, threads
    from ragorder.eval.engines.torch import TorchEngine

    rows: dict[str, list[float]] = {"requests": [], "context": [], "ms": []}
    shape = SHAPES[cell.shape]
    with threads(1), closing(TorchEngine(shape.make())) as engine:
        for requests in _REQUESTS:
            for context in _CONTEXTS:
                ms = _decoding_ms(engine, shape.vocabulary, requests, context, cell.steps)
                for name, value in (("requests", requests), ("context", context), ("ms", round(ms, 4))):
                    rows[name].append(value)
    return {"engine": {"name": "torch", "model": cell.shape}, "rows": rows}


def scans(index: Any, queries: Vectors, calls: int) -> dict[str, list[float]]:
    """Return codes, milliseconds and predicted milliseconds of calls with one cluster up to a quarter of them."""
    from ragorder.pipelining.search.costs import ClusterCosts
    from ragorder.pipelining.search.scanner import one_thread
    from ragorder.pipelining.staged._ivf import ClusterIndex

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
    """Return the median of some scans of each cluster by itself (Figure 6b)."""
    from ragorder.pipelining.search.scanner import one_thread
    from ragorder.pipelining.staged._ivf import ClusterIndex

    scanned = ClusterIndex(index, "a measurement")
    with one_thread():
        coarse, clusters = scanned.nearest_clusters(query[None], index.nlist, 1)
        return [
            _median_ms(lambda: scanned.scan(query[None], _K, clusters[:, [place]], coarse[:, [place]]))  # noqa: B023
            for place in range(index.nlist)
        ]


def _batch_ms(index: Any, queries: Vectors) -> float:
    """Of whole searches in one call, each."""
    from ragorder.pipelining.search.scanner import one_thread

    with one_thread():
        return _median_ms(lambda: index.search(queries, _K)) / len(queries)


def _decoding_ms(engine: TorchEngine, vocabulary: int, requests: int, context: int, steps: int) -> float:
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
