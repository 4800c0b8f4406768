"""Time that stages add to a search, and when its results are final (suite staged-search)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field

from ragorder.benchmarks.common.vectors import build_index, clustered, embedded
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.declared import Column, TableForm, figure, tables_of
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.common.vectors import Vectors
    from ragorder.pipelining import StagedSearch

RATIOS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the clusters that a search scans: the vector search ratios of RAGCache's Figure 22."""
_DEPTHS = (1, 2, 5)
_TOP_K = 5


class StagingCell(SeedlessCell):
    """Random vectors, or embeddings of a `corpus` and its questions, the first `queries` of them timed."""

    vectors: int = Field(40_000, ge=100)
    dimensions: int = Field(384, ge=1)
    queries: int = Field(200, ge=1)
    stages: int = Field(4, ge=1)
    corpus: str | None = None

    @property
    def words(self) -> str:
        return self.corpus or f"{self.vectors:,} random vectors"


def plain_ms(run: Record) -> float:
    return float(median(run.rows["plain_ms"]))


def added_ms(run: Record) -> float:
    return float(median(run.rows["added_ms"]))


class Staging(Experiment):
    """Columns: CPU time of each search, and what stages add. Fact `final` (of a corpus): see `final_shares`."""

    kind = "staging"
    cell = StagingCell
    columns = ("plain_ms", "added_ms")
    facts = ("stages",)
    policies: ClassVar[Any] = (
        *(f"IVF {ratio:g} {growth}" for ratio in RATIOS for growth in ("equal", "geometric")),
        *(f"HNSW {ef_search}" for ef_search in (64, 256)),
    )
    unit = "searches"
    sized_by = "queries"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True
    tables = (
        TableForm(
            "What stages add to a search: {cell.words}",
            [
                Column("search", lambda row: str(row.runs[0].facts["search"])),
                figure("stages", "stages", 0),
                figure("without, ms", plain_ms, 3),
                figure("added, ms", added_ms, 3),
                figure("added a stage, ms", lambda run: added_ms(run) / run.facts["stages"], 3),
            ],
            note=lambda block: f"Medians of {len(block.first.rows['plain_ms'])} queries, CPU time.",
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: StagingCell = job.cell
        if job.corpus is None:
            documents = clustered(cell.vectors, cell.dimensions, clusters=cell.vectors // 50, seed=0)
            queries = clustered(cell.queries, cell.dimensions, clusters=cell.vectors // 50, seed=1)
        else:
            documents = embedded(each.text for each in job.corpus.documents)
            queries = embedded(each.text for each in job.corpus.questions)
        for policy, search in _searches(documents, cell.stages, job.policies):
            stages, rows = time_stages(search.index.search, search.staged, queries[: job.requests], _TOP_K)
            facts: dict[str, Any] = {"search": search.name, "stages": stages}
            if job.corpus is not None:
                final = final_shares(search.staged, queries, _DEPTHS)
                facts |= {"questions": len(queries), "final": {str(k): shares for k, shares in final.items()}}
            rounded = {name: [round(value, 4) for value in values] for name, values in rows.items()}
            yield {"policy": policy, "engine": {"name": "faiss"}, "facts": facts, "rows": rounded}
            advance()


class _SearchPair(NamedTuple):
    name: str
    index: Any
    staged: StagedSearch


def _searches(vectors: Vectors, stages: int, policies: Collection[str]) -> Iterator[tuple[str, _SearchPair]]:
    """By policy ("IVF 0.25 equal", "HNSW 64"); to be used one after another, as they share an index."""
    import faiss

    from ragorder.pipelining import StagedHNSW, StagedIVF

    ivf: Any = None
    hnsw: Any = None
    for policy in policies:
        kind, size, *growth = policy.split()
        if kind == "IVF":
            ivf = ivf or build_index(vectors, 1.0, sampled=True)
            ivf.nprobe = max(1, round(ivf.nlist * float(size)))
            staged = StagedIVF(ivf, stages, growth=growth[0])  # type: ignore[arg-type]
            yield policy, _SearchPair(f"IVFFlat, {ivf.nprobe} of {ivf.nlist} clusters, {growth[0]}", ivf, staged)
        else:
            if hnsw is None:
                hnsw = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
                hnsw.add(vectors)
            hnsw.hnsw.efSearch = int(size)
            search = StagedHNSW(hnsw, stages=min(stages, 3))
            yield policy, _SearchPair(f"HNSWFlat, efSearch {size}", hnsw, search)


def time_stages(
    plain: Callable[[Vectors, int], object], staged: StagedSearch, queries: Vectors, k: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the number of stages, and CPU times in ms: of each query without stages, and added by them."""
    from ragorder.pipelining.search.scanner import one_thread

    with one_thread():
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
    return stages, rows


def final_shares(staged: StagedSearch, queries: Vectors, depths: Sequence[int]) -> dict[int, list[float]]:
    """Return for each k the share of queries, stage by stage, whose ordered top k no longer changes."""
    import numpy as np

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


_Group = RecordGroup[Record]


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(Staging.record, suite.name))
    final = [group for group in groups if "final" in group.runs()[0].facts]
    tables = [*tables_of(Staging, suite, results), *map(_convergence, final)]
    return Part(tables, pictures=lambda: [*map(_convergence_picture, final)])


def _words(group: _Group) -> str:
    return StagingCell.read(group.cell, "staging").words


def _convergence(group: _Group) -> Table:
    lines = group.runs()
    facts = lines[0].facts
    table = Table(f"Top k final: {_words(group)}, {facts['questions']:,} questions")
    table.headings = ["search", *(f"top {k}" for k in facts["final"])]
    for line in lines:
        shares = line.facts["final"].values()
        table.add(line.facts["search"], *(" ".join(format_number(100 * share) for share in each) for each in shares))
    table.note = "% of questions, after each stage in turn."
    return table


def _convergence_picture(group: _Group) -> Picture:
    shown = [line for line in group.runs() if line.policy in ("IVF 1 equal", "IVF 1 geometric", "HNSW 256")]

    points = {line.policy: list(enumerate(_shares(line), 1)) for line in shown}
    alt = "; ".join(f"{line.policy}: {', '.join(format_number(share) for share in _shares(line))} %" for line in shown)
    title = "When the best document is final"
    return draw_lines(title, points, "stage", "top 1 final, % of questions", alt=alt, caption=_words(group))


def _shares(line: Record) -> Sequence[float]:
    return [100 * share for share in next(iter(line.facts["final"].values()))]
