"""A batch of searches of vectors on disk: bytes in memory, bytes read, and what is found (suite doll-disk-index)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field

from ragorder.benchmarks.common.vectors import build_index, clustered, embedded
from ragorder.eval.report.declared import TableForm, figure, policy_column
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Ids = NDArray[np.int64]

_PAGE = 4096
_ID_BYTES = 8

_WORDS = {
    "partitions": "partitions, loaded one by one",
    "codes": "product quantisation in memory",
    "codes refined": "and refined from disk",
}


class DiskIndexCell(SuiteCell):
    """A batch of `requests` searches for the `top_k` nearest of a `corpus`, or of random `vectors`. `nprobe`: share of
    the clusters that each scans; `partitions`: into which the vectors are cut; `dimensions_a_byte` of the codes;
    `factor`: candidates for each result that are refined."""

    corpus: str | None = None
    vectors: int = Field(50_000, ge=1000)
    dimensions: int = Field(64, ge=8)
    requests: int = Field(64, ge=1)
    top_k: int = Field(5, ge=1)
    nprobe: float = Field(0.25, gt=0, le=1)
    partitions: int = Field(32, ge=1)
    dimensions_a_byte: int = Field(4, ge=1)
    factor: int = Field(8, ge=1)

    @property
    def words(self) -> str:
        return self.corpus or f"{self.vectors:,} random vectors of {self.dimensions}"

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None


class DiskIndex(Experiment):
    """Facts of a batch: `memory_bytes` of codes and vectors held, `read_bytes` from disk, and its `recall`."""

    kind = "disk-index"
    cell = DiskIndexCell
    facts = ("memory_bytes", "read_bytes", "recall", "vector_bytes")
    policies: ClassVar[Any] = ("partitions", "codes", "codes refined")
    unit = "batches"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True
    tables = (
        TableForm(
            "A batch of {cell.requests} searches: {cell.words}, top {cell.top_k}",
            [
                policy_column("", _WORDS),
                figure("memory, % of the vectors", lambda run: _of_vectors(run, "memory_bytes")),
                figure("read, % of the vectors", lambda run: _of_vectors(run, "read_bytes")),
                figure("found, %", "recall", scale=100),
            ],
            note=lambda block: (
                f"Of the true nearest; each search scans {100 * block.cell.nprobe:.0f} % of the clusters. Pages of "
                f"4 KiB, each read once a batch; {block.cell.factor} candidates a result are refined."
            ),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: DiskIndexCell = job.cell
        if job.corpus is None:
            clusters = cell.vectors // 50
            vectors = clustered(cell.vectors, cell.dimensions, clusters=clusters, seed=2 * job.seed)
            queries = clustered(job.requests, cell.dimensions, clusters=clusters, seed=2 * job.seed + 1)
        else:
            vectors = embedded(each.text for each in job.corpus.documents)
            queries = embedded(each.text for each in job.corpus.questions[: job.requests])
        for policy in job.policies:
            with TemporaryDirectory() as folder:
                found, recall = measure(policy, vectors, queries, cell, Path(folder))
            facts = {
                "memory_bytes": found.memory_bytes,
                "read_bytes": found.read_bytes,
                "recall": recall,
                "vector_bytes": int(vectors.nbytes),
            }
            yield {"policy": policy, "engine": {"name": "faiss"}, "rows": {}, "facts": facts}
            advance()


def _of_vectors(run: Record, fact: str) -> float:
    return float(100 * run.facts[fact] / run.facts["vector_bytes"])


class Found(NamedTuple):
    """`ids` of shape (queries, k); most bytes of codes and vectors in memory at a time, and bytes read."""

    ids: Ids
    memory_bytes: int
    read_bytes: int


def measure(policy: str, vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path) -> tuple[Found, float]:
    """Return what the batch found, and the share of the true nearest that is in it."""
    import numpy as np

    from ragorder.pipelining.staged._faiss import load_faiss

    faiss = load_faiss()
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    _, nearest = exact.search(queries, cell.top_k)
    found = POLICIES[policy](vectors, queries, cell, folder)
    hits = sum(len(np.intersect1d(row, true)) for row, true in zip(found.ids, nearest, strict=True))
    return found, hits / nearest.size


def refine(file: NDArray[np.float32], queries: Vectors, candidates: Ids, k: int) -> Found:
    """Return the k best of each query's candidates by the vectors in a mapped file; each page is read once for all."""
    import numpy as np

    width = file.shape[1] * file.itemsize
    wanted = np.unique(candidates[candidates >= 0])
    vectors = dict(zip(wanted.tolist(), np.asarray(file[wanted]), strict=True))
    ids = np.full((len(queries), k), -1, np.int64)
    for row, (query, numbers) in enumerate(zip(queries, candidates, strict=True)):
        numbers = numbers[numbers >= 0]
        products = np.array([vectors[number] @ query for number in numbers.tolist()])
        best = numbers[np.argsort(-products, kind="stable")[:k]]
        ids[row, : len(best)] = best
    pages = {page for number in wanted.tolist() for page in _pages(number * width, width)}
    return Found(ids, 0, len(pages) * _PAGE)


def _pages(offset: int, width: int) -> range:
    return range(offset // _PAGE, (offset + width - 1) // _PAGE + 1)


def _partitions(vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path) -> Found:
    """All are read, one after another; one is in memory."""
    index = build_index(vectors, cell.nprobe)
    _, ids = index.search(queries, cell.top_k)
    size = vectors.nbytes + _ID_BYTES * len(vectors)
    return Found(ids, -(-size // cell.partitions), size)


def _codes(vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path, *, factor: int = 1) -> Found:
    """Product quantisation in memory alone."""
    from ragorder.pipelining.staged._faiss import load_faiss

    faiss = load_faiss()
    dimensions = vectors.shape[1]
    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    codes = f"IVF{clusters},PQ{dimensions // cell.dimensions_a_byte}x8"
    index: Any = faiss.index_factory(dimensions, codes, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    # Takes a minute, and serves Hamming distances alone.
    index.do_polysemous_training = False
    index.train(vectors)
    index.add(vectors)
    index.nprobe = max(1, round(cell.nprobe * clusters))
    _, ids = index.search(queries, factor * cell.top_k)
    return Found(ids, (index.code_size + _ID_BYTES) * len(vectors), 0)


def _refined(vectors: Vectors, queries: Vectors, cell: DiskIndexCell, folder: Path) -> Found:
    """More candidates by their codes, the best of them by their vectors on disk."""
    import numpy as np

    candidates = _codes(vectors, queries, cell, folder, factor=cell.factor)
    path = folder / "vectors.npy"
    np.save(path, vectors)
    found = refine(np.load(path, mmap_mode="r"), queries, candidates.ids, cell.top_k)
    return found._replace(memory_bytes=candidates.memory_bytes)


POLICIES: dict[str, Callable[[Vectors, Vectors, DiskIndexCell, Path], Found]] = {
    "partitions": _partitions,
    "codes": _codes,
    "codes refined": _refined,
}
