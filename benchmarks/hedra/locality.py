"""Successive searches of one request: what the first says of the second (HedraRAG Figures 7 to 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.common.vectors import build_index, embedded
from ragorder.eval.report.declared import Block, Column, TableForm, figure, policy_column
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Ids = NDArray[np.int64]

_PATIENCE = (1, 2, 4, 8, 16)
_GENERATED = (0.1, 0.3, 0.5, 0.7, 0.9)
_HELD = (0.05, 0.1, 0.2, 0.4)
_NEIGHBOURS = 5
_EMBEDDED = 300
"""Answers in the making that are embedded, and compared with the whole answer."""
# No time for a piece: each is one cluster.
_ONE_CLUSTER_S = 1e-30
_KEPT = 20
_AT_ONCE = 64
_SCANNED = (0.05, 0.125, 0.25, 0.5)
_ORDERS = {"nearest": "nearest first", "history": "by the first search"}


class LocalityCell(SeedlessCell):
    """Two searches for each question: alone, and with the first `generated` share of its first document."""

    corpus: str = "pydocs"
    questions: int = Field(300, ge=1)
    nprobe: float = Field(0.5, gt=0, le=1)
    generated: float = Field(0.5, gt=0, le=1)
    top_k: int = Field(2, ge=1, le=20)


def _percent(share: float) -> str:
    return format_number(100 * share)


def final_share(run: Record, scanned: float) -> float:
    """Return the share of searches, in per cent, whose results are final after this share of their clusters."""
    clusters = scanned * float(run.facts["nprobe"])
    final_at: list[float] = run.rows["final_at"]
    return 100 * sum(number <= clusters for number in final_at) / len(final_at)


def _titled(words: str) -> Callable[[Block], str]:
    return lambda block: (
        f"{words}: {block.cell.corpus}, {len(block.first.rows['final_at']):,} questions, top {block.cell.top_k}"
    )


def _final_note(block: Block) -> str:
    facts = block.first.facts
    note = (
        f"% of searches, after this share of the {facts['nprobe']} clusters of {facts['clusters']} that each scans; "
        "and after which cluster one is final: up to 28 % earlier by the first search's order in HedraRAG (Figure 9b)."
    )
    if "as_faiss" in facts:
        searched = 2 * len(block.first.rows["final_at"])
        note += f" Of {searched:,} searches that shared their time {facts['as_faiss']:,} found what FAISS finds."
    return note


_FINAL = TableForm(
    _titled("Second searches that are final"),
    [
        policy_column("clusters", _ORDERS),
        *(figure(f"{_percent(share)} %", partial(final_share, scanned=share)) for share in _SCANNED),
        figure("final after, mean", lambda run: fmean(run.rows["final_at"])),
    ],
    note=_final_note,
)


def _ends_column(patience: str) -> Column:
    return Column(patience, lambda row: ", ".join(map(_percent, row.runs[0].facts["patience"][patience])))


_ENDS = TableForm(
    _titled("What patience saves, and its recall"),
    lambda block: [policy_column("patience", _ORDERS), *map(_ends_column, block.first.facts["patience"])],
    note="% of clusters not scanned, % of the results found.",
)


def _distances(block: Block) -> Iterator[tuple[str, str]]:
    facts = block.first.facts
    yield "the first query", format_number(facts["to_first_query"], 2)
    yield "its five nearest passages", format_number(facts["to_neighbours"], 2)
    yield "its nearest passage", format_number(facts["to_nearest"], 2)
    for share, distance in facts["to_whole"].items():
        yield f"{_percent(float(share))} % of the whole answer, from the whole", format_number(distance, 2)


def _each(fact: str, name: Callable[[str], str]) -> Callable[[Block], list[tuple[str, str]]]:
    return lambda block: [(name(key), _percent(share)) for key, share in block.first.facts[fact].items()]


_FACTS = (
    TableForm(
        _titled("What a first search says about the second"),
        ["of the second's results", "%"],
        rows=_each("observations", "all {}".format),
    ),
    TableForm(_titled("Distances between embeddings"), ["from the second query to", "mean"], rows=_distances),
    TableForm(
        _titled("Work in the clusters used most"),
        ["of the clusters", "of the codes scanned, %"],
        rows=_each("skew", lambda share: f"{_percent(float(share))} %"),
    ),
)


class Locality(Experiment):
    """Column `final_at`: clusters after which a second search's best stayed. Facts: of the functions below."""

    kind = "locality"
    cell = LocalityCell
    columns = ("final_at",)
    facts = ("nprobe",)
    policies: ClassVar[Any] = tuple(_ORDERS)
    unit = "searches"
    sized_by = "questions"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True
    tables: ClassVar[Any] = ((_FINAL, _ENDS, *_FACTS),)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import numpy as np

        cell: LocalityCell = job.cell
        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        questions = [each.text for each in corpus.questions[: job.requests]]
        passages = [corpus.documents[ranking[0]].text for ranking in corpus.rankings[: job.requests]]
        first = embedded(questions)
        second = embedded(partial_texts(questions, passages, cell.generated))
        index = build_index(embedded(each.text for each in corpus.documents), cell.nprobe)
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
        whole = embedded(partial_texts(*some, 1.0))
        facts["to_whole"] = {
            f"{share:g}": float(np.linalg.norm(embedded(partial_texts(*some, share)) - whole, axis=1).mean())
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


def partial_texts(questions: Sequence[str], passages: Sequence[str], share: float) -> list[str]:
    """Each question with the first words of its passage."""
    return [
        f"{question} {' '.join(words[: max(1, round(share * len(words)))])}"
        for question, words in zip(questions, map(str.split, passages), strict=True)
    ]


def trace(index: Any, pairs: Iterable[tuple[Vectors, Vectors]], k: int, *, history: bool) -> Ids:
    """The k best of each pair's second query after each cluster: (pairs, nprobe, k)."""
    import numpy as np

    from ragorder.pipelining import ContinuousIVF
    from ragorder.pipelining.search import Budget, History

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
    from ragorder.pipelining import ContinuousIVF
    from ragorder.pipelining.search import Budget, History

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
    import numpy as np

    right = (found == found[:, -1:]).all(axis=2)
    last_wrong = right.shape[1] - 1 - np.argmin(right[:, ::-1], axis=1)
    final: list[int] = np.where(right.all(axis=1), 1, last_wrong + 2).tolist()
    return final


def early_ends(found: Ids, patience: int) -> tuple[float, float]:
    """The share of clusters that this patience saves, and the recall of the final results."""
    import numpy as np

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
    """Return shares of second searches: in the first's 20 best, their clusters, shared clusters (Figure 9a)."""
    import faiss
    import numpy as np

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
    import numpy as np

    _, clusters = index.quantizer.search(queries, index.nprobe)
    sizes = np.array([index.get_list_size(cluster) for cluster in range(index.nlist)])
    work = np.sort(np.bincount(clusters.ravel(), minlength=index.nlist) * sizes)[::-1]
    total = np.cumsum(work) / work.sum()
    return {f"{share:g}": float(total[max(1, round(share * index.nlist)) - 1]) for share in shares}
