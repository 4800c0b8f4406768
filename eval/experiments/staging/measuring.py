"""Cost of searching in stages, and the stage at which its result is final.

`python -m ragorder.eval.staging` measures the CPU time that stages add, on vectors drawn at random;
`--corpus pydocs`, or a folder's, also after which stage the best documents of real questions are final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ragorder.eval.data.cache import cache_folder
from ragorder.eval.data.corpora import load_folder, load_pydocs
from ragorder.eval.experiments.pipelining.search import embed
from ragorder.pipelining import StagedHNSW, StagedIVF, StagedSearch

__all__ = [
    "Convergence",
    "Overhead",
    "clustered",
    "convergence_table",
    "main",
    "measure_convergence",
    "measure_overhead",
    "overhead_table",
    "searches",
]

Vectors = NDArray[np.float32]

RATIOS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the clusters that a search scans: the vector search ratios of RAGCache's Figure 22."""

DEPTHS = (1, 2, 5)
"""The k of the top k."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """What stages add to one query's search: medians over queries, in ms of this thread's CPU time."""

    search: str
    stages: int
    plain_ms: float
    added_ms: float

    @property
    def stage_ms(self) -> float:
        """What one stage adds."""
        return self.added_ms / self.stages


@dataclass(frozen=True, slots=True)
class Convergence:
    """After which stage the best documents stayed as they are.

    final: for each k the share of questions, stage by stage, whose top k was then already the last stage's, in the same
        order, and did not change in between
    """

    search: str
    questions: int
    final: dict[int, list[float]]


def measure_overhead(
    name: str, plain: Callable[[Vectors, int], object], staged: StagedSearch, queries: Vectors, k: int = 5
) -> Overhead:
    """Search for each query by turns with and without stages, one query at a time, on one thread of FAISS."""
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        stages = sum(1 for _ in staged.search(queries[:1], k))
        plain_ms, added_ms = [], []
        for number in range(len(queries)):
            query = queries[number : number + 1]
            # Who is first takes turns: the second finds the vectors in the processor's caches.
            times = [0.0, 0.0]
            for run in (0, 1, 0, 1) if number % 2 else (1, 0, 1, 0):
                start = time.thread_time_ns()
                if run:
                    list(staged.search(query, k))
                else:
                    plain(query, k)
                times[run] += (time.thread_time_ns() - start) / 2e6
            plain_ms.append(times[0])
            added_ms.append(times[1] - times[0])
    finally:
        faiss.omp_set_num_threads(threads)
    return Overhead(name, stages, median(plain_ms), median(added_ms))


def measure_convergence(
    name: str, staged: StagedSearch, queries: Vectors, depths: Sequence[int] = DEPTHS
) -> Convergence:
    """Search for all queries at once and compare each stage's best with the last's."""
    found = [stage.ids for stage in staged.search(queries, max(depths))]
    final = {}
    for k in depths:
        same = np.ones(len(queries), bool)
        shares = []
        for ids in reversed(found):
            same &= (ids[:, :k] == found[-1][:, :k]).all(axis=1)
            shares.append(float(same.mean()))
        final[k] = shares[::-1]
    return Convergence(name, len(queries), final)


def clustered(count: int, dimensions: int, *, clusters: int, seed: int) -> Vectors:
    """Vectors of length 1 around centres that are themselves drawn at random; the seed decides."""
    centres = np.random.default_rng(0).standard_normal((clusters, dimensions), np.float32)
    rng = np.random.default_rng(seed + 1)
    noise = rng.standard_normal((count, dimensions), np.float32)
    vectors: Vectors = centres[rng.integers(clusters, size=count)] + noise
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def searches(vectors: Vectors, stages: int) -> Iterator[tuple[str, Any, StagedSearch]]:
    """Each index over these vectors with the search in stages over it; those over one index by turns."""
    import faiss

    dimensions = vectors.shape[1]
    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    ivf: Any = faiss.index_factory(dimensions, f"IVF{clusters},Flat", faiss.METRIC_INNER_PRODUCT)
    ivf.train(vectors[:: max(1, len(vectors) // (clusters * 40))])
    ivf.add(vectors)
    for ratio in RATIOS:
        ivf.nprobe = max(1, round(clusters * ratio))
        equal, geometric = StagedIVF(ivf, stages), StagedIVF(ivf, stages, growth="geometric")
        for growth, staged in (("equal", equal), ("geometric", geometric)):
            yield f"IVFFlat, {ivf.nprobe} of {clusters} clusters, {growth}", ivf, staged
    hnsw: Any = faiss.IndexHNSWFlat(dimensions, 32, faiss.METRIC_INNER_PRODUCT)
    hnsw.add(vectors)
    for ef_search in (64, 256):
        hnsw.hnsw.efSearch = ef_search
        yield f"HNSWFlat, efSearch {ef_search}", hnsw, StagedHNSW(hnsw, stages=min(stages, 3))


def overhead_table(measured: Sequence[Overhead]) -> Table:
    """One row a search."""
    table = Table(title="What stages add to a search", caption="medians, ms of CPU time")
    table.add_column("search", no_wrap=True)
    for heading in ("stages", "without", "added", "added a stage"):
        table.add_column(heading, justify="right")
    for row in measured:
        cells = (f"{row.plain_ms:.3f}", f"{row.added_ms:.3f}", f"{row.stage_ms:.3f}")
        table.add_row(row.search, str(row.stages), *cells)
    return table


def convergence_table(measured: Sequence[Convergence], corpus: str) -> Table:
    """One row a search: the share of questions whose top k is final, after stage 1/2/…"""
    table = Table(
        title=f"Top k final: {corpus}, {measured[0].questions:,} questions",
        caption="% of questions, after each stage in turn",
    )
    table.add_column("search", no_wrap=True)
    for k in measured[0].final:
        table.add_column(f"top {k}", justify="right")
    for row in measured:
        table.add_row(row.search, *(" ".join(f"{100 * share:.1f}" for share in row.final[k]) for k in row.final))
    return table


def _embeddings(corpus: str) -> tuple[str, Vectors, Vectors]:
    loaded = load_pydocs(cache=cache_folder()) if corpus == "pydocs" else load_folder(Path(corpus))
    documents = embed([document.text for document in loaded.documents], cache_folder())
    return loaded.name, documents, embed([question.text for question in loaded.questions], cache_folder())


@click.command()
@click.option("--vectors", default=40_000, show_default=True, type=click.IntRange(min=100), help="Vectors searched.")
@click.option("--dimensions", default=384, show_default=True, type=click.IntRange(min=1), help="Of each vector.")
@click.option("--queries", default=200, show_default=True, type=click.IntRange(min=1), help="Timed one by one.")
@click.option("--stages", default=4, show_default=True, type=click.IntRange(min=1), help="Of each search.")
@click.option("--corpus", help="'pydocs', or a corpus's folder: measures on its embeddings, and when they are final.")
def main(vectors: int, dimensions: int, queries: int, stages: int, corpus: str | None) -> None:
    """Measure what stages add to vector searches, and how early their answers are final."""
    if corpus is None:
        name = "random vectors"
        documents = clustered(vectors, dimensions, clusters=vectors // 50, seed=0)
        questions = clustered(queries, dimensions, clusters=vectors // 50, seed=1)
    else:
        name, documents, questions = _embeddings(corpus)
    overheads, converged = [], []
    for search, index, staged in searches(documents, stages):
        overheads.append(measure_overhead(search, index.search, staged, questions[:queries]))
        converged.append(measure_convergence(search, staged, questions))
    console = Console()
    console.print(overhead_table(overheads))
    if corpus is not None:
        console.print(convergence_table(converged, name))


if __name__ == "__main__":
    main()
