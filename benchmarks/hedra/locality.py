"""Successive searches of one request: the suites of kind "locality"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ragorder.benchmarks.common.vectors import build_index
from ragorder.common.files import cache_folder
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import Budget, History

__all__ = [
    "Locality",
    "LocalityCell",
    "LocalityRecord",
    "as_faiss",
    "early_ends",
    "final_at",
    "make_part",
    "observations",
    "partial_texts",
    "skew",
    "trace",
]

Vectors = NDArray[np.float32]
Ids = NDArray[np.int64]

# No time for a piece: each is one cluster.
_ONE_CLUSTER_S = 1e-30
_KEPT = 20
_AT_ONCE = 64


def partial_texts(questions: Sequence[str], passages: Sequence[str], share: float) -> list[str]:
    """Each question with the first words of its passage."""
    return [
        f"{question} {' '.join(words[: max(1, round(share * len(words)))])}"
        for question, words in zip(questions, map(str.split, passages), strict=True)
    ]


def trace(index: Any, pairs: Iterable[tuple[Vectors, Vectors]], k: int, *, history: bool) -> Ids:
    """The k best of each pair's second query after each cluster: (pairs, nprobe, k)."""
    search = ContinuousIVF(index, cores=1, budget=Budget(_ONE_CLUSTER_S), thread=False)
    found = []
    for first, second in pairs:
        past = History(kept=_KEPT) if history else None
        if past is not None:
            search.submit(first, k, history=past).result()
        stages = search.submit(second, k, history=past).stages()
        found.append([stage.ids[0] for stage in stages if stage.number])
    return np.array(found)


def as_faiss(index: Any, pairs: Sequence[tuple[Vectors, Vectors]], k: int) -> int:
    """Searches whose ids and distances are FAISS's: both of each pair, with a history, those of 64 pairs at a time."""
    search, equal = ContinuousIVF(index, cores=1, budget=Budget(_ONE_CLUSTER_S), thread=False), 0
    for start in range(0, len(pairs), _AT_ONCE):
        group = pairs[start : start + _AT_ONCE]
        histories = [History(kept=_KEPT) for _ in group]
        for queries in zip(*group, strict=True):
            handles = [search.submit(query, k, history=past) for query, past in zip(queries, histories, strict=True)]
            for query, handle in zip(queries, handles, strict=True):
                distances, ids = index.search(query[None], k)
                found = handle.result()
                equal += bool((found.ids == ids).all() and (found.distances == distances).all())
    return equal


def final_at(found: Ids) -> list[int]:
    """The cluster after which the best, in their order, no longer change, from 1."""
    right = (found == found[:, -1:]).all(axis=2)
    last_wrong = right.shape[1] - 1 - np.argmin(right[:, ::-1], axis=1)
    final: list[int] = np.where(right.all(axis=1), 1, last_wrong + 2).tolist()
    return final


def early_ends(found: Ids, patience: int) -> tuple[float, float]:
    """The share of clusters that this patience saves, and the recall of the final results."""
    nprobe, k = found.shape[1:]
    before = np.concatenate((np.full_like(found[:, :1], -1), found[:, :-1]), axis=1)
    changed = (found != before).any(axis=2)
    saved, hits = 0, 0
    for row, changes in zip(found, changed, strict=True):
        ends = (
            end
            for end in range(patience, nprobe, patience)
            if not changes[end - patience : end].any() and (row[end - 1] != -1).all()
        )
        end = next(ends, nprobe)
        saved += nprobe - end
        hits += np.isin(row[end - 1], row[-1]).sum()
    return float(saved / (nprobe * len(found))), float(hits / (k * len(found)))


def observations(index: Any, first: Vectors, second: Vectors, k: int) -> dict[str, float]:
    """The share of second searches whose results are all among the 20 best of the first; in the clusters of these; in
    clusters that both scan (Figure 9a)."""
    import faiss

    _, wide = index.search(first, _KEPT)
    _, near = index.search(second, k)
    home = np.empty(index.ntotal, np.int64)
    for cluster in range(index.nlist):
        size = index.get_list_size(cluster)
        if size:
            home[faiss.rev_swig_ptr(index.invlists.get_ids(cluster), size)] = cluster
    _, scanned = index.quantizer.search(first, index.nprobe)
    _, again = index.quantizer.search(second, index.nprobe)
    shares = np.zeros(3)
    for row, ids in enumerate(near):
        ids = ids[ids >= 0]
        both = np.intersect1d(scanned[row], again[row])
        shares += (
            np.isin(ids, wide[row]).all(),
            np.isin(home[ids], home[wide[row][wide[row] >= 0]]).all(),
            np.isin(home[ids], both).all(),
        )
    names = ("in the first's 20 best", "in their clusters", "in clusters of both")
    return dict(zip(names, (shares / len(near)).tolist(), strict=True))


def skew(index: Any, queries: Vectors, shares: Sequence[float]) -> dict[str, float]:
    """The share of all codes scanned that is in this share of the clusters, those that cost most (Figure 8)."""
    _, clusters = index.quantizer.search(queries, index.nprobe)
    sizes = np.array([index.get_list_size(cluster) for cluster in range(index.nlist)])
    work = np.sort(np.bincount(clusters.ravel(), minlength=index.nlist) * sizes)[::-1]
    total = np.cumsum(work) / work.sum()
    return {f"{share:g}": float(total[max(1, round(share * index.nlist)) - 1]) for share in shares}


class LocalityCell(SuiteCell):
    """Two searches for each question of a `corpus`: for the question, and for the question with the first
    `generated` share of its first document, which stands for an answer in the making (IRG)."""

    corpus: str = "pydocs"
    questions: int = Field(300, ge=1)
    nprobe: float = Field(0.5, gt=0, le=1)
    generated: float = Field(0.5, gt=0, le=1)
    top_k: int = Field(2, ge=1, le=20)

    @property
    def varies_with_seed(self) -> bool:
        return False


class LocalityRecord(Record):
    """`rows["final_at"]`: clusters after which a second search's best no longer changed. See `measuring` for the
    facts."""

    called: ClassVar[str] = "a measurement of successive searches"
    is_run: ClassVar[bool] = False

    type: Literal["locality"] = "locality"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("final_at") or not self.facts.get("nprobe"):
            raise ValueError("the clusters after which searches are final, or nprobe, are missing")
        return self

    @property
    def mean_final_at(self) -> float:
        return fmean(self.rows["final_at"])

    def final_share(self, scanned: float) -> float:
        """Of searches, those whose results are final after this share of their clusters."""
        final_at = self.rows["final_at"]
        clusters = scanned * float(self.facts["nprobe"])
        return sum(number <= clusters for number in final_at) / len(final_at)


_PATIENCE = (1, 2, 4, 8, 16)
_GENERATED = (0.1, 0.3, 0.5, 0.7, 0.9)
_HELD = (0.05, 0.1, 0.2, 0.4)
_NEIGHBOURS = 5
_EMBEDDED = 300
"""Answers in the making that are embedded, and compared with the whole answer."""


class Locality(Experiment):
    kind = "locality"
    record = LocalityRecord
    cell = LocalityCell
    policies: ClassVar[Any] = ("nearest", "history")
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True

    def requests(self, suite: Suite, cell: LocalityCell) -> int:
        return min(cell.questions, self.options.limit or cell.questions)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import numpy as np

        from ragorder.eval.suites.pipelining.search import embed

        cell: LocalityCell = job.cell
        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        cache = cache_folder()
        documents = embed([each.text for each in corpus.documents], cache)
        questions = [each.text for each in corpus.questions[: job.requests]]
        passages = [corpus.documents[ranking[0]].text for ranking in corpus.rankings[: job.requests]]
        first = embed(questions, cache)
        second = embed(partial_texts(questions, passages, cell.generated), cache)
        index = build_index(documents, cell.nprobe)
        distances, _ = index.search(second, _NEIGHBOURS)
        facts: dict[str, Any] = {
            "as_faiss": as_faiss(index, list(zip(first, second, strict=True)), cell.top_k),
            "clusters": index.nlist,
            "nprobe": index.nprobe,
            "observations": observations(index, first, second, cell.top_k),
            "skew": skew(index, np.concatenate((first, second)), _HELD),
            # Of vectors of length 1.
            "to_first_query": float(np.linalg.norm(second - first, axis=1).mean()),
            "to_neighbours": float(np.sqrt(np.maximum(0, 2 - 2 * distances)).mean()),
            "to_nearest": float(np.sqrt(np.maximum(0, 2 - 2 * distances[:, 0])).mean()),
        }
        some = questions[:_EMBEDDED], passages[:_EMBEDDED]
        whole = embed(partial_texts(*some, 1.0), cache)
        facts["to_whole"] = {
            f"{share:g}": float(np.linalg.norm(embed(partial_texts(*some, share), cache) - whole, axis=1).mean())
            for share in _GENERATED
        }
        for policy in job.policies:
            pairs = zip(first, second, strict=True)
            found = trace(index, pairs, cell.top_k, history=policy == "history")
            ends = {str(patience): early_ends(found, patience) for patience in _PATIENCE}
            yield {
                "policy": policy,
                "engine": {"name": "faiss"},
                "facts": {**facts, "patience": ends},
                "rows": {"final_at": final_at(found)},
            }
            advance()


_SCANNED = (0.05, 0.125, 0.25, 0.5)
_ORDERS = {"nearest": "nearest first", "history": "by the first search"}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(LocalityRecord, suite.name))
    return Part([table for group in groups for table in _tables(group)], pictures=lambda: [*map(_picture, groups)])


def _tables(group: RecordGroup[LocalityRecord]) -> Iterable[Table]:
    lines = group.runs()
    facts = lines[0].facts
    cell = LocalityCell.read(group.cell, "locality")
    setting = f"{cell.corpus}, {len(lines[0].rows['final_at']):,} questions, top {cell.top_k}"
    scanned = [f"{format_number(100 * share)} %" for share in _SCANNED]
    table = Table(f"Second searches that are final: {setting}", ["clusters", *scanned, "final after, mean"])
    for line in lines:
        shares = [_percent(line.final_share(share)) for share in _SCANNED]
        table.add(_ORDERS[line.policy], *shares, format_number(line.mean_final_at))
    table.note = (
        f"% of searches, after this share of the {facts['nprobe']} clusters of {facts['clusters']} that each scans; "
        "and after which cluster one is final: up to 28 % earlier by the first search's order in HedraRAG (Figure 9b)."
    )
    if "as_faiss" in facts:
        searched = 2 * len(lines[0].rows["final_at"])
        table.note += f" Of {searched:,} searches that shared their time {facts['as_faiss']:,} found what FAISS finds."
    yield table

    table = Table(f"What patience saves, and its recall: {setting}", ["patience", *facts["patience"]])
    for line in lines:
        ends = line.facts["patience"].values()
        table.add(_ORDERS[line.policy], *(f"{_percent(saved)}, {_percent(recall)}" for saved, recall in ends))
    table.note = "% of clusters not scanned, % of the results found."
    yield table

    table = Table(f"What a first search says about the second: {setting}", ["of the second's results", "%"])
    for name, share in facts["observations"].items():
        table.add(f"all {name}", _percent(share))
    yield table

    table = Table(f"Distances between embeddings: {setting}", ["from the second query to", "mean"])
    table.add("the first query", format_number(facts["to_first_query"], 2))
    table.add("its five nearest passages", format_number(facts["to_neighbours"], 2))
    table.add("its nearest passage", format_number(facts["to_nearest"], 2))
    for share, distance in facts["to_whole"].items():
        table.add(
            f"{format_number(100 * float(share))} % of the whole answer, from the whole", format_number(distance, 2)
        )
    yield table

    table = Table(f"Work in the clusters used most: {setting}", ["of the clusters", "of the codes scanned, %"])
    for share, work in facts["skew"].items():
        table.add(f"{format_number(100 * float(share))} %", _percent(work))
    yield table


def _picture(group: RecordGroup[LocalityRecord]) -> Picture:
    """The curve of early ends: each point a patience."""
    lines = group.runs()
    points = {
        line.policy: [(100 * saved, 100 * recall) for saved, recall in line.facts["patience"].values()]
        for line in lines
    }

    def paint(axes: Any) -> None:
        for policy, found in points.items():
            looks = style("earned" if policy == "history" else "retrieval")
            axes.plot(
                *zip(*found, strict=True), looks.dashes, marker=looks.marker, color=looks.colour, label=_ORDERS[policy]
            )
        for patience, (saved, recall) in zip(lines[-1].facts["patience"], points[lines[-1].policy], strict=True):
            axes.annotate(patience, (saved, recall), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        axes.set_xlabel("clusters not scanned, %")
        axes.set_ylabel("results found, %")
        axes.legend(fontsize=8, frameon=False, loc="lower left")

    alt = "; ".join(
        f"{_ORDERS[policy]}: "
        + ", ".join(f"{format_number(recall)} % at {format_number(saved)} %" for saved, recall in found)
        for policy, found in points.items()
    )
    corpus = LocalityCell.read(group.cell, "locality").corpus
    return draw(paint, title="What an early end costs", alt=alt, caption=f"{corpus}; at each point its patience.")


def _percent(share: float) -> str:
    return format_number(100 * share)
