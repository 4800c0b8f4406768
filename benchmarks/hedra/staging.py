"""Searches in stages by themselves: the suites of kind "staging"."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ragorder.benchmarks.common.vectors import clustered
from ragorder.common.files import cache_folder
from ragorder.eval.data.machine import load_average
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.pipelining import StagedHNSW, StagedIVF, StagedSearch

__all__ = [
    "Staging",
    "StagingCell",
    "StagingRecord",
    "final_shares",
    "make_part",
    "searches",
    "time_stages",
]

Vectors = NDArray[np.float32]


class _SearchPair(NamedTuple):
    name: str
    index: Any
    staged: StagedSearch


def time_stages(
    plain: Callable[[Vectors, int], object], staged: StagedSearch, queries: Vectors, k: int
) -> tuple[int, dict[str, list[float]]]:
    """The number of stages, and columns of CPU time in ms: of each query without stages, and added by them. FAISS has
    one thread."""
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        stages = sum(1 for _ in staged.search(queries[:1], k))
        rows: dict[str, list[float]] = {"plain_ms": [], "added_ms": []}
        for number in range(len(queries)):
            query = queries[number : number + 1]
            # The first one alternates: the second finds the vectors in the processor's caches.
            times = [0.0, 0.0]
            for run in (0, 1, 0, 1) if number % 2 else (1, 0, 1, 0):
                start = time.thread_time_ns()
                if run:
                    list(staged.search(query, k))
                else:
                    plain(query, k)
                times[run] += (time.thread_time_ns() - start) / 2e6
            rows["plain_ms"].append(times[0])
            rows["added_ms"].append(times[1] - times[0])
    finally:
        faiss.omp_set_num_threads(threads)
    return stages, rows


def final_shares(staged: StagedSearch, queries: Vectors, depths: Sequence[int]) -> dict[int, list[float]]:
    """For each k the share of queries, stage by stage, whose ordered top k no longer changes."""
    found = [stage.ids for stage in staged.search(queries, max(depths))]
    final = {}
    for k in depths:
        same = np.ones(len(queries), bool)
        shares = []
        for ids in reversed(found):
            same &= (ids[:, :k] == found[-1][:, :k]).all(axis=1)
            shares.append(float(same.mean()))
        final[k] = shares[::-1]
    return final


def searches(vectors: Vectors, stages: int, policies: Collection[str]) -> Iterator[tuple[str, _SearchPair]]:
    """By policy ("IVF 0.25 equal", "HNSW 64"); to be used one after another, as they share an index."""
    import faiss

    ivf: Any = None
    hnsw: Any = None
    dimensions = vectors.shape[1]
    clusters = min(len(vectors), round(4 * len(vectors) ** 0.5))
    for policy in policies:
        kind, size, *growth = policy.split()
        if kind == "IVF":
            if ivf is None:
                ivf = faiss.index_factory(dimensions, f"IVF{clusters},Flat", faiss.METRIC_INNER_PRODUCT)
                ivf.train(vectors[:: max(1, len(vectors) // (clusters * 40))])
                ivf.add(vectors)
            ivf.nprobe = max(1, round(clusters * float(size)))
            staged = StagedIVF(ivf, stages, growth=growth[0])  # type: ignore[arg-type]
            yield policy, _SearchPair(f"IVFFlat, {ivf.nprobe} of {clusters} clusters, {growth[0]}", ivf, staged)
        else:
            if hnsw is None:
                hnsw = faiss.IndexHNSWFlat(dimensions, 32, faiss.METRIC_INNER_PRODUCT)
                hnsw.add(vectors)
            hnsw.hnsw.efSearch = int(size)
            search = StagedHNSW(hnsw, stages=min(stages, 3))
            yield policy, _SearchPair(f"HNSWFlat, efSearch {size}", hnsw, search)


class StagingCell(SuiteCell):
    """Random vectors, or embeddings of a `corpus` and its questions, the first `queries` of them timed."""

    vectors: int = Field(40_000, ge=100)
    dimensions: int = Field(384, ge=1)
    queries: int = Field(200, ge=1)
    stages: int = Field(4, ge=1)
    corpus: str | None = None

    @property
    def varies_with_seed(self) -> bool:
        return False


class StagingRecord(Record):
    """CPU times of one search. Fact "final" (of a corpus): see `final_shares`."""

    called: ClassVar[str] = "a measurement of staged searches"
    is_run: ClassVar[bool] = False

    type: Literal["staging"] = "staging"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("plain_ms") or not self.rows.get("added_ms") or not self.facts.get("stages"):
            raise ValueError("times or stages are missing")
        return self

    @property
    def plain_ms(self) -> float:
        return median(self.rows["plain_ms"])

    @property
    def added_ms(self) -> float:
        return median(self.rows["added_ms"])


RATIOS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the clusters that a search scans: the vector search ratios of RAGCache's Figure 22."""

_DEPTHS = (1, 2, 5)
_TOP_K = 5


class Staging(Experiment):
    kind = "staging"
    record = StagingRecord
    cell = StagingCell
    policies: ClassVar[Any] = (
        *(f"IVF {ratio:g} {growth}" for ratio in RATIOS for growth in ("equal", "geometric")),
        *(f"HNSW {ef_search}" for ef_search in (64, 256)),
    )
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True

    def requests(self, suite: Suite, cell: StagingCell) -> int:
        return min(cell.queries, self.options.limit or cell.queries)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.eval.suites.pipelining.search import embed

        cell: StagingCell = job.cell
        if job.corpus is None:
            documents = clustered(cell.vectors, cell.dimensions, clusters=cell.vectors // 50, seed=0)
            queries = clustered(cell.queries, cell.dimensions, clusters=cell.vectors // 50, seed=1)
        else:
            documents, queries = (
                embed([each.text for each in texts], cache_folder())
                for texts in (job.corpus.documents, job.corpus.questions)
            )
        for policy, search in searches(documents, cell.stages, job.policies):
            load = load_average()
            stages, rows = time_stages(search.index.search, search.staged, queries[: job.requests], _TOP_K)
            facts: dict[str, Any] = {"search": search.name, "stages": stages}
            if job.corpus is not None:
                final = final_shares(search.staged, queries, _DEPTHS)
                facts |= {"questions": len(queries), "final": {str(k): shares for k, shares in final.items()}}
            rounded = {name: [round(value, 4) for value in values] for name, values in rows.items()}
            yield {"policy": policy, "engine": {"name": "faiss"}, "load_average": load, "facts": facts, "rows": rounded}
            advance()


_Group = RecordGroup[StagingRecord]


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(StagingRecord, suite.name))
    final = [group for group in groups if "final" in group.runs()[0].facts]
    tables = [*map(_overhead, groups), *map(_convergence, final)]
    return Part(tables, pictures=lambda: [*map(_overhead_picture, groups), *map(_convergence_picture, final)])


def _vectors(group: _Group) -> str:
    cell = group.cell
    return str(cell.get("corpus") or f"{cell.get('vectors', 40_000):,} random vectors")


def _overhead(group: _Group) -> Table:
    headings = ["search", "stages", "without, ms", "added, ms", "added a stage, ms"]
    table = Table(f"What stages add to a search: {_vectors(group)}", headings)
    for line in group.runs():
        stages = line.facts["stages"]
        times = (line.plain_ms, line.added_ms, line.added_ms / stages)
        table.add(line.facts["search"], str(stages), *(format_number(ms, 3) for ms in times))
    table.note = f"Medians of {len(group.runs()[0].rows['plain_ms'])} queries, CPU time."
    return table


def _convergence(group: _Group) -> Table:
    lines = group.runs()
    facts = lines[0].facts
    table = Table(f"Top k final: {_vectors(group)}, {facts['questions']:,} questions", ["search"])
    table.headings = ["search", *(f"top {k}" for k in facts["final"])]
    for line in lines:
        shares = line.facts["final"].values()
        table.add(line.facts["search"], *(" ".join(format_number(100 * share) for share in each) for each in shares))
    table.note = "% of questions, after each stage in turn."
    return table


def _overhead_picture(group: _Group) -> Picture:
    lines = group.runs()

    def paint(axes: Any) -> None:
        places = range(len(lines))[::-1]
        axes.barh(places, [line.plain_ms for line in lines], color=style("retrieval").colour, label="the search")
        added = [max(0.0, line.added_ms) for line in lines]
        left = [line.plain_ms for line in lines]
        axes.barh(places, added, left=left, color=style("earned").colour, label="added by stages")
        axes.set_yticks(places, [line.policy for line in lines])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("CPU time a query, ms")
        axes.legend(fontsize=8, frameon=False)

    alt = "; ".join(
        f"{line.policy}: {format_number(line.plain_ms, 3)} + {format_number(line.added_ms, 3)} ms" for line in lines
    )
    return draw(paint, title="What stages add", alt=alt, caption=f"{_vectors(group)}; medians.", height=3.6)


def _convergence_picture(group: _Group) -> Picture:
    shown = [line for line in group.runs() if line.policy in ("IVF 1 equal", "IVF 1 geometric", "HNSW 256")]

    def paint(axes: Any) -> None:
        ends = []
        for line, name in zip(shown, ("earned", "greedy", "sorted"), strict=False):
            looks, shares = style(name), _shares(line)
            axes.plot(range(1, len(shares) + 1), shares, looks.dashes, marker=looks.marker, color=looks.colour)
            ends.append((len(shares), shares[-1], line.policy, looks))
        axes.set_xlabel("stage")
        axes.set_ylabel("top 1 final, % of questions")
        label_ends(axes, ends)

    alt = "; ".join(f"{line.policy}: {', '.join(format_number(share) for share in _shares(line))} %" for line in shown)
    return draw(paint, title="When the best document is final", alt=alt, caption=_vectors(group))


def _shares(line: StagingRecord) -> Sequence[float]:
    return [100 * share for share in next(iter(line.facts["final"].values()))]
