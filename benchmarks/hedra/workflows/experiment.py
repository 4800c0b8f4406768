"""Workflows on a virtual clock, with costs fitted to data sheets or guessed (HedraRAG Figures 13 to 19)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.common.served import Cells, cells_along, late_s, mean_s, share
from ragorder.benchmarks.common.vectors import build_index, embedded
from ragorder.benchmarks.hedra.workflows.cells import CLUSTERS, System, WorkflowsCell
from ragorder.common.files import cache_folder
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.retrieval import DenseRetriever
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.kernels.preprocessing.encoder import default_model
from ragorder.pipelining.workflow.transformations import (
    OrderDocuments,
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
    Transformation,
)

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.workflows.measuring import Materials
    from ragorder.benchmarks.hedra.workflows.script import Embedder

_AT_ONCE = 8


def _ours(*, across: bool = True) -> tuple[Transformation, ...]:
    generations = SpeculateGeneration(across=across)
    return (generations, SpeculateRetrieval(generations=generations), Split(), Reorder())


def _ordered() -> tuple[Transformation, ...]:
    return (*_ours(), OrderDocuments())


SYSTEMS = {
    "langchain": System("batches stage by stage (LangChain)", "alone", lockstep=32),
    "flashrag": System("whole searches batched (FlashRAG)", "batch"),
    "dealt": System("whole searches batched, dealt to all cores", "dealt"),
    "pieces": System("searches in pieces", transformations=lambda: (Split(),)),
    "ragcache": System(
        "Algorithm 2 alone (RAGCache)", transformations=lambda: (SpeculateGeneration(odds=False), Split())
    ),
    "ralmspec": System(
        "local cache alone (RaLMSpec)",
        transformations=lambda: (SpeculateGeneration(odds=False, recalled_only=True), Split(), Reorder()),
    ),
    "hedra": System("ours", transformations=_ours),
    "hedra-across": System("ours, one stage ahead", transformations=lambda: _ours(across=False)),
    "hedra+order": System("ours, ordered", transformations=_ordered),
    "hedra+line": System(
        "ours, ordered, 8 on the engine", transformations=_ordered, max_generations=_AT_ONCE, window=0
    ),
    "hedra+next": System("the same, most cached first", transformations=_ordered, max_generations=_AT_ONCE),
    "hedra+fast": System("ours, a GPU beside the cores", transformations=_ours, fast=True),
}
"""By policy. LangChain's `batch` runs a chain in lockstep; its default pool has 32 threads. RAGCache and RaLMSpec
search in pieces, as in the paper, which gave both to its own system."""


class Workflows(Experiment):
    """Columns: seconds from each request's arrival to its answer, and its workflow. Facts: see `serve`."""

    kind = "workflows"
    cell = WorkflowsCell
    columns = ("latency_s", "workflow")
    facts = ("total_s", "prompt_tokens", "computed_tokens")
    runs = True
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._embed: Embedder | None = None

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.common.virtual.loop import run_virtual
        from ragorder.benchmarks.hedra.workflows.measuring import serve

        cell: WorkflowsCell = job.cell
        materials = self.kept((cell.corpus, cell.nprobe, job.seed), lambda: self._materials(job))
        at_s = [0.0] * job.requests
        if cell.rate:
            at_s = [arrival.at_s for arrival in poisson_arrivals(cell.rate, job.requests, job.seed)]
        draw = random.Random(job.seed)
        first, *others = cell.workflow.split("+")
        workflows = [
            first if not others or draw.random() < cell.share else draw.choice(others) for _ in range(job.requests)
        ]
        for policy in job.policies:
            yield {
                "policy": policy,
                "engine": {"name": "virtual", "model": cell.model},
                **run_virtual(serve(SYSTEMS[policy], cell, materials, at_s, workflows)),
            }
            advance()
        materials.embed.save()

    def _materials(self, job: Job) -> Materials:
        from ragorder.benchmarks.hedra.workflows.measuring import Materials
        from ragorder.benchmarks.hedra.workflows.script import Embedder, Script

        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        if self._embed is None:
            retriever = DenseRetriever(default_model())
            self._embed = Embedder(retriever.embed, cache_folder() / "workflow-vectors.npz")
        index = build_index(embedded(each.text for each in corpus.documents), job.cell.nprobe / CLUSTERS)
        return Materials(corpus.documents, index, self._embed, Script(corpus, job.seed))


_SLO_S = 10.0
_OURS = "hedra"

_COSTS = (
    "Measured: 77 ns to scan a vector of 128 dimensions on a core, hence 616 ns of 1,024, and 0.2 ms for a piece of a "
    "search beside its scan. Estimated from data sheets: the H100's steps. Guessed: the share of memory bandwidth that "
    "searches get, 38 cores' worth of 64; the lengths of answers, 24 to 96 words; batches of 32 for LangChain. Not "
    "counted: embeddings of queries, and handing the shares of a piece or a batch to threads. The paper publishes none "
    "of its costs: compare shapes and orders of magnitude.",
)


def make_part(suite: Suite, results: Results) -> Part:
    settings = cells_along("rate", Workflows, suite, results)
    if not settings:
        return Part()
    if suite.report.chart == "compared":
        return Part(list(_compared(settings, suite.baseline)), words=_COSTS)
    tables = {"offline": _offline, "speculation": _speculation}.get(suite.report.chart, _serving)
    return Part(list(tables(settings)), words=_COSTS)


def _name(cells: Cells, settings: Sequence[Cells]) -> str:
    """What the runs of a table have in common, with what differs among the others, too."""
    cell: WorkflowsCell = cells[0][0]
    others: list[WorkflowsCell] = [each[0][0] for each in settings]
    first, *second = cell.workflow.split("+")
    name = f"{first} and {second[0]}" if second else first
    if second and len({each.share for each in others}) > 1:
        name += f", {format_number(100 * cell.share, 0)} % {first}"
    said = [name, f"nprobe {cell.nprobe}"]
    said += [f"{cell.cores} cores"] * (len({each.cores for each in others}) > 1)
    said += [cell.model] * (len({each.model for each in others}) > 1)
    said += [f"top {cell.top_k}"] * (len({each.top_k for each in others}) > 1)
    if len({(each.fast, each.fast_ns) for each in others}) > 1:
        said.append(f"{format_number(100 * cell.fast, 0)} % on the GPU at {format_number(cell.fast_ns)} ns a vector")
    return ", ".join(said)


def _serving(settings: Sequence[Cells]) -> Iterator[Table]:
    policies = _policies(settings)
    table = Table("Requests a second at a mean latency of 10 s", ["", *policies])
    for cells in settings:
        most = {policy: _sustained(cells, policy) for policy in policies}
        table.add(_name(cells, settings), *(_rate_entry(most[policy], most.get("flashrag")) for policy in policies))
    table.note = "Interpolated between the rates that were run. Below it: times that of whole searches batched."
    yield table

    table = Table("Mean latency, times shorter than whole searches batched", ["", *policies])
    for cells in settings:
        table.add(_name(cells, settings), *(_times(cells, policy) for policy in policies))
    table.note = "Least to most of the rates."
    yield table

    for cells in settings:
        table = _by_rate(cells, settings)
        for policy in policies:
            table.add(_words(policy), *(_latency_entry(group.runs(policy)) for _, group in cells))
        table.note = "Below it: the 99th percentile."
        yield table
    yield _cached(settings)


def _offline(settings: Sequence[Cells]) -> Iterator[Table]:
    policies = _policies(settings)
    table = Table("Time until all are answered, s", ["", *policies])
    for cells in settings:
        _, group = cells[0]
        ours = _mean(group.runs(_OURS), _total_s)
        row = []
        for policy in policies:
            seconds = _mean(group.runs(policy), _total_s)
            note = f"{format_number(seconds / ours, 2)} of ours" if seconds and ours and policy != _OURS else ""
            row.append(Entry(format_number(seconds), note))
        table.add(_name(cells, settings), *row)
    yield table
    yield _cached(settings)


def _speculation(settings: Sequence[Cells]) -> Iterator[Table]:
    policies = _policies(settings)
    for cells in settings:
        table = _by_rate(cells, settings)
        for policy in policies:
            row = [group.runs(policy) for _, group in cells]
            table.add(_words(policy), *(Entry(format_number(_mean(each, mean_s), 2), _odds(each)) for each in row))
        ratios = []
        for _, group in cells:
            ours, *theirs = (_mean(group.runs(policy), mean_s) for policy in (_OURS, "ragcache", "ralmspec"))
            best = min(filter(None, theirs), default=None)
            ratios.append(best / ours if best and ours else None)
        table.add("best of the two / ours", *(format_number(ratio, 2) for ratio in ratios))
        table.note = "Below it: speculative generations that turned out right, of those that ran."
        yield table
    yield from _ahead(settings)


def _ahead(settings: Sequence[Cells]) -> Iterator[Table]:
    kinds = {"": "generations", "near_": "of these one stage ahead", "search_": "searches"}
    table = Table("Right of what ran speculatively, %", ["", *kinds.values()])
    for cells in settings:
        for policy in dict.fromkeys(policy for _, group in cells for policy in group.policies):
            records = [record for record in _all_runs(cells, policy) if "near_speculations" in record.facts]
            shares = [share(records, f"{kind}right", f"{kind}speculations") for kind in kinds]
            if any(share is not None for share in shares):
                shown = (format_number(None if share is None else 100 * share) for share in shares)
                table.add(f"{_name(cells, settings)}: {_words(policy)}", *shown)
    table.note = "One stage ahead: on what a due search has found so far, as the paper counts. All rates together."
    if table.rows:
        yield table


def _compared(settings: Sequence[Cells], baseline: str) -> Iterator[Table]:
    policies = _policies(settings)
    for cells in settings:
        table = _by_rate(cells, settings)
        for policy in policies:
            row = [group.runs(policy) for _, group in cells]
            theirs = [group.runs(baseline) if policy != baseline else [] for _, group in cells]
            table.add(_words(policy), *map(_against, row, theirs))
            if (shares := [_fast_share(each) for each in row]) and any(shares):
                table.add("on the GPU, % of the vectors scanned", *shares)
        table.note = f"Below it: times shorter than {_words(baseline)}, the mean and the 99th percentile."
        yield table
    yield _cached(settings)


def _against(records: Sequence[Record], theirs: Sequence[Record]) -> Entry:
    ours_s, their_s = _mean(records, mean_s), _mean(theirs, mean_s)
    if not ours_s or not their_s:
        return Entry(format_number(ours_s, 2))
    late = (_mean(theirs, late_s) or 0.0) / (_mean(records, late_s) or math.inf)
    return Entry(format_number(ours_s, 2), f"{format_number(their_s / ours_s, 2)}, {format_number(late, 2)}")


def _fast_share(records: Sequence[Record]) -> str:
    shares = [record.facts["fast_share"] for record in records if "fast_share" in record.facts]
    return format_number(100 * fmean(shares)) if shares else ""


def _cached(settings: Sequence[Cells]) -> Table:
    policies = _policies(settings)
    table = Table("Prompt tokens found in the engine's cache, %", ["", *policies])
    for cells in settings:
        row = []
        for policy in policies:
            records = _all_runs(cells, policy)
            later = share(records, "later_cached_tokens", "later_prompt_tokens")
            note = "" if later is None else f"after a request's first {format_number(100 * later)}"
            computed = share(records, "computed_tokens", "prompt_tokens")
            row.append(Entry(format_number(None if computed is None else 100 * (1 - computed)), note))
        table.add(_name(cells, settings), *row)
    table.note = "Of all rates, speculations included. Below it: in the generations after a request's first one."
    return table


def _by_rate(cells: Cells, settings: Sequence[Cells]) -> Table:
    return Table(f"Mean latency, s: {_name(cells, settings)}", ["", *(f"{cell.rate:g}/s" for cell, _ in cells)])


def _policies(settings: Sequence[Cells]) -> list[str]:
    measured = {policy for cells in settings for _, group in cells for policy in group.policies}
    return [policy for policy in SYSTEMS if policy in measured]


def _words(policy: str) -> str:
    return SYSTEMS[policy].words


def _all_runs(cells: Cells, policy: str) -> list[Record]:
    return [record for _, group in cells for record in group.runs(policy)]


def _total_s(record: Record) -> float:
    return float(record.facts["total_s"])


def _mean(records: Sequence[Record], figure: Callable[[Record], float]) -> float | None:
    return fmean(map(figure, records)) if records else None


def _latency_entry(records: Sequence[Record]) -> Entry:
    if not records:
        return Entry("–")
    return Entry(format_number(_mean(records, mean_s), 2), format_number(_mean(records, late_s), 2))


def _odds(records: Sequence[Record]) -> str:
    right = share(records, "right", "speculations")
    return "" if right is None else f"{format_number(100 * right)} %"


def _sustained(cells: Cells, policy: str) -> tuple[str, float | None]:
    """The rate at which the mean latency is 10 s, as text, and as a number unless it lies beyond those run."""
    before: tuple[float, float] | None = None
    for cell, group in cells:
        latency_s = _mean(group.runs(policy), mean_s)
        if latency_s is None:
            continue
        if latency_s > _SLO_S:
            if before is None:
                return f"< {cell.rate:g}", None
            part = (_SLO_S - before[1]) / (latency_s - before[1])
            found = before[0] + part * (cell.rate - before[0])
            return format_number(found), found
        before = cell.rate, latency_s
    return ("–", None) if before is None else (f"> {before[0]:g}", None)


def _rate_entry(rate: tuple[str, float | None], theirs: tuple[str, float | None] | None) -> Entry:
    times = rate[1] / theirs[1] if theirs is not None and rate[1] and theirs[1] else None
    return Entry(rate[0], "" if times is None or rate == theirs else f"{format_number(times, 2)} times")


def _times(cells: Cells, policy: str) -> str:
    pairs = [[_mean(group.runs(each), mean_s) for each in (policy, "flashrag")] for _, group in cells]
    ratios = [their / our for our, their in pairs if our and their]
    return range_words(ratios, 2) if ratios else "–"
