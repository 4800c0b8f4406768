"""Searches of a cold index file that memory holds in part (HedraRAG Figures 8 and 20)."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.common.served import Cells, cells_along, draw_table, faster_entry
from ragorder.benchmarks.common.vectors import build_index, clustered, embedded
from ragorder.benchmarks.hedra.locality import skew
from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.common.vectors import Vectors
    from ragorder.benchmarks.hedra.tiers.index_tiers import IndexTiers

_BOTH = "file and memory"
_PICTURED = {"hit share, %": "earned", "work in as many clusters, %": "retrieval"}
_EVERY = 50
_WARMUP = 0.5
_SHARE = 0.2
_MADV_RANDOM, _MADV_DONTNEED = 1, 4
_K = 1


class HybridCell(SuiteCell):
    """Searches of an index whose share `held` is in memory; `skew`: work in a fifth of the clusters."""

    corpus: str | None = None
    held: float = Field(0.2, gt=0, lt=1)
    skew: float = Field(0.69, gt=0.2, lt=1)
    vectors: int = Field(100_000, ge=1000)
    dimensions: int = Field(64, ge=1)
    nprobe: float = Field(0.0625, gt=0, le=1)
    requests: int = Field(800, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None


class HybridIndex(Experiment):
    """Column `latency_ms`: of each search after the first `warmup`, which the tiers learn from."""

    kind = "hybrid-index"
    cell = HybridCell
    columns = ("latency_ms",)
    facts = ("skew", "hit_share")
    policies: ClassVar[Any] = ("file", _BOTH)
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval", "torch": "torch"}
    one_job = True

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: HybridCell = job.cell
        index, queries = self._index(job)
        warmup = int(_WARMUP * len(queries))
        facts: dict[str, Any] = {
            "clusters": index.nlist,
            "nprobe": index.nprobe,
            "skew": skew(index, queries, [cell.held, 0.2]),
        }
        with (
            threads(1),
            TemporaryDirectory() as folder,
            closing(ColdIndex(index, Path(folder, "index"))) as cold,
        ):
            for policy in job.policies:
                tiers = _tiers(index, cell.held) if policy == _BOTH else None
                times, hit_share = latencies(cold.index, queries, index.nprobe, tiers, cold.cool, warmup)
                yield {
                    "policy": policy,
                    "engine": {"name": "faiss"},
                    "warmup": warmup,
                    "facts": {**facts, "hit_share": hit_share},
                    "rows": {"latency_ms": [round(each, 4) for each in times]},
                }
                for _ in times:
                    advance()

    def _index(self, job: Job) -> tuple[Any, Vectors]:
        """The index, and what is searched for."""
        cell, corpus = job.cell, job.corpus

        def start() -> Any:
            if corpus is None:
                vectors = clustered(cell.vectors, cell.dimensions, clusters=cell.vectors // 50, seed=0)
            else:
                vectors = embedded(each.text for each in corpus.documents)
            return build_index(vectors, cell.nprobe)

        index = self.kept((cell.corpus, cell.vectors, cell.dimensions, cell.nprobe), start)
        if corpus is None:
            return index, skewed_queries(index, job.requests, cell.skew, job.seed)
        return index, embedded(each.text for each in corpus.questions)[: job.requests]


def _tiers(index: Any, held: float) -> IndexTiers:
    from ragorder.benchmarks.hedra.tiers.index_tiers import IndexTiers
    from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan

    fast = TorchClusterScan()
    return IndexTiers(fast, max(1, int(held * fast.bytes_of(index.ntotal, index.d))), every=_EVERY)


class ColdIndex:
    """An IVF index mapped from a file, whose pages `cool` takes out of memory."""

    def __init__(self, index: Any, path: Path) -> None:
        from ragorder.pipelining.staged._faiss import load_faiss

        faiss = load_faiss()
        faiss.write_index(index, str(path))
        self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        self._start, self._size = int(lists.ptr), int(lists.totsize)
        self._file = os.open(path, os.O_RDONLY)
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        os.fsync(self._file)
        self._advise(_MADV_RANDOM)

    def _advise(self, advice: int) -> None:
        if self._madvise(ctypes.c_void_p(self._start), ctypes.c_size_t(self._size), advice):
            raise OSError(ctypes.get_errno(), "madvise: this system does not let go of a file's pages")

    def cool(self) -> None:
        """Raises OSError where the system does not let go of them."""
        self._advise(_MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


def skewed_queries(index: Any, count: int, share: float, seed: int) -> Vectors:
    """Near centroids, by a power law of their ranks, so that a fifth of the clusters has this share of the work."""
    import numpy as np

    centroids = index.quantizer.reconstruct_n(0, index.nlist)
    rng = np.random.default_rng(seed)
    ranks = 1.0 + np.random.default_rng(0).permutation(index.nlist)
    noise = 0.3 * centroids.std() * rng.standard_normal((count, index.d), np.float32)
    uniform = rng.random(count)

    def draw(power: float) -> Vectors:
        weights = np.cumsum(ranks**-power)
        near = centroids[np.searchsorted(weights / weights[-1], uniform)]
        return np.ascontiguousarray(near + noise, dtype=np.float32)

    low, high = 0.0, 3.0
    for _ in range(12):
        power = (low + high) / 2
        if skew(index, draw(power), [_SHARE])[f"{_SHARE:g}"] < share:
            low = power
        else:
            high = power
    return draw(high)


def latencies(
    index: Any, queries: Vectors, nprobe: int, tiers: IndexTiers | None, cool: Callable[[], None], warmup: int
) -> tuple[list[float], float]:
    """Return milliseconds of each search on one core, and the share of codes that the fast tier scanned."""
    from ragorder.benchmarks.hedra.tiers.index_tiers import TieredScanner
    from ragorder.pipelining import ContinuousIVF
    from ragorder.pipelining.search.scanner import PieceScanner

    scanner = PieceScanner if tiers is None else partial(TieredScanner, tiers)
    found, before = [], (0, 0)
    with ContinuousIVF(index, nprobe=nprobe, cores=1, thread=False, scanner=scanner) as search:
        for number, query in enumerate(queries):
            cool()
            if tiers is not None and number == warmup:
                before = tiers.codes, tiers.fast_codes
            start_s = time.perf_counter()
            search.submit(query, _K).result()
            found.append(1e3 * (time.perf_counter() - start_s))
    if tiers is None:
        return found, 0.0
    codes, fast_codes = tiers.codes - before[0], tiers.fast_codes - before[1]
    return found, fast_codes / codes if codes else 0.0


def make_part(suite: Suite, results: Results) -> Part:
    found = cells_along("held", HybridIndex, suite, results)
    tables = [_table(each, suite.baseline) for each in found]
    return Part(tables, pictures=lambda: [draw_table(each, "", "%", rows=_PICTURED) for each in tables])


def _name(cells: Cells) -> str:
    cell: HybridCell = cells[0][0]
    return cell.corpus or f"{cell.vectors:,} random vectors, {format_number(100 * cell.skew, 0)} % in a fifth"


def _hit_share(group: RecordGroup[Any]) -> float:
    """In per cent."""
    values = [run.facts["hit_share"] for run in group.runs(_BOTH)]
    return 100 * sum(values) / len(values) if values else float("nan")


def _table(cells: Cells, baseline: str) -> Table:
    held = [f"{format_number(100 * cell.held, 0)} % held" for cell, _ in cells]
    table = Table(f"An index that memory holds in part: {_name(cells)}", ["", *held])
    possible = []
    for cell, group in cells:
        shares = [run.facts["skew"][f"{cell.held:g}"] for run in group.runs()]
        possible.append(format_number(100 * sum(shares) / len(shares)))
    table.add("work in as many clusters, %", *possible)
    table.add("hit share, %", *(format_number(_hit_share(group)) for _, group in cells))
    for policy in (baseline, _BOTH):
        table.add(f"{policy}, ms", *(faster_entry(group, policy, baseline, interval=False) for _, group in cells))
    table.note = "Hit share: of the codes scanned, after the first half of the searches. Mean latency of one search."
    return table
