"""Answers of a small trained model by the place of what they need, on a simulated cache (suite quality-positions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import Field

from ragorder.benchmarks.fusion.toy.weights import SHIPPED, checkpoint
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_table
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference, StatisticsError, compare, wilson
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import change_words, format_number, policy_words
from ragorder.eval.running.cells import SuiteCell, SuiteError
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.eval.suites.quality.compare import mcnemar_exact
from ragorder.eval.suites.quality.orders import Order, QualityError


class PositionsCell(SuiteCell):
    """`requests` of a `task` with `documents` each (the models were trained with up to 16), ordered for a
    prefix cache of `capacity_tokens`. `models` is a folder of suite toy-training, instead of the models that come with
    ragorder."""

    task: Literal["look-up", "definition first", "link first"] = "look-up"
    documents: int = Field(8, ge=2, le=24)
    requests: int = Field(500, ge=1)
    capacity_tokens: int | None = Field(65_536, ge=1)
    models: str | None = None

    def weights(self, seed: int) -> Path:
        return checkpoint(Path(self.models) if self.models else SHIPPED, seed)


_STREAM_SEED = 2_000
"""Requests of seed 0; no model was trained with it."""


class QualityPositions(Experiment):
    """Columns, by request: whether the answer is `right`; the `rank` and the `place` (from 0) of the document that the
    question names, and for chains `other_place`, of the one that this refers to; the mean number of places that its
    documents moved; cached and prompt tokens, of a simulated engine."""

    kind = "quality-positions"
    cell = PositionsCell
    columns = ("right", "rank", "place", "displacement", "cached_tokens", "prompt_tokens")
    runs = True
    one_job = True

    @classmethod
    def check(cls, suite: Suite, where: str) -> None:
        super().check(suite, where)
        for policy in suite.policies:
            try:
                order = Order.parse(policy)
            except QualityError as error:
                raise SuiteError(f"{where}: {error}") from None
            if order.fused or order.state_ranking:
                raise SuiteError(f"{where}: {policy!r}: the model reads documents alone, and all of them again")

    def plan(self, suite: Suite) -> Iterator[Job | Missing]:
        for cell in suite.cells:
            for seed in self.options.seeds:
                if not (path := cell.weights(seed)).is_file():
                    train = f"ragorder eval run toy-training --seeds {seed} -o DIR"
                    why = f"no model of seed {seed} in {path.parent}: {train}, then --set models=DIR"
                    yield Missing(suite.name, cell.fields, f"seed {seed}", why)
        yield from super().plan(suite)

    def seeds(self, cell: PositionsCell) -> Sequence[int]:
        return [seed for seed in super().seeds(cell) if cell.weights(seed).is_file()]

    def obstacle(self, suite: Suite, cell: PositionsCell, policy: str) -> str | None:
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.fusion.quality_positions.measuring import Answers, draw_stream, order_stream, rows_of
        from ragorder.benchmarks.fusion.toy.task import ChainModel
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: PositionsCell = job.cell
        with threads(1):
            stream = draw_stream(job.requests, cell.task, cell.documents, _STREAM_SEED + job.seed)
            answers = Answers(ChainModel.load(cell.weights(job.seed)), stream)
            for policy in job.policies:
                orders = order_stream(stream, policy, cell.capacity_tokens, job.seed)
                rows = rows_of(stream, orders, answers, advance)
                yield {"policy": policy, "engine": {"name": "sim", "model": "chains"}, "rows": rows}


BANDS = 8
"""Places are taken together, so that there are no more of these."""

Group = RecordGroup[Record]


@dataclass(frozen=True, slots=True)
class Share:
    """Right answers of `count`, with Wilson's 95 % interval."""

    right: int
    count: int

    @property
    def share(self) -> float | None:
        return self.right / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return wilson(self.right / self.count, self.count) if self.count else None


def _cell(group: Group) -> PositionsCell:
    return PositionsCell.read(group.cell, "quality-positions")


def total(group: Group, policy: str) -> Share:
    return _share(group, policy, lambda _: True)


def bands(group: Group) -> list[range]:
    """Places that are taken together, from 0."""
    documents = _cell(group).documents
    several = -(-documents // BANDS)
    return [range(start, min(start + several, documents)) for start in range(0, documents, several)]


def by_place(group: Group, policy: str) -> list[Share]:
    """By the place of the document that the question names."""

    def within(band: range) -> Share:
        return _share(group, policy, lambda row: row["place"] in band)

    return [within(band) for band in bands(group)]


def definition_in_front(group: Group, policy: str, *, behind: bool = False) -> Share:
    """Return the share of chains whose definition stands before the link, or after it."""
    return _share(group, policy, lambda row: (row["other_place"] > row["place"]) == behind)


def mean(group: Group, policy: str, column: str, of: str | None = None) -> float:
    """Over all requests; `of`: of the sum of another column."""
    values = [value for run in group.runs(policy) for value in run.rows[column]]
    return fmean(values) if of is None else sum(values) / sum(v for run in group.runs(policy) for v in run.rows[of])


def change(group: Group, policy: str, baseline: str) -> PairedDifference | None:
    """Of the share of right answers, in points, paired by question; None without the baseline."""
    pairs = list(_pairs(group, policy, baseline))
    try:
        return compare([_points(before) for before, _ in pairs], [_points(after) for _, after in pairs])
    except StatisticsError:
        return None


def swapped(group: Group, policy: str, baseline: str) -> tuple[int, int, float]:
    """Questions that the baseline alone answers, those that this policy alone answers, and McNemar's exact p-value."""
    pairs = [pair for before, after in _pairs(group, policy, baseline) for pair in zip(before, after, strict=True)]
    return mcnemar_exact([int(before) for before, _ in pairs], [int(after) for _, after in pairs])


def _pairs(group: Group, policy: str, baseline: str) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    theirs, ours = group.policies.get(baseline, {}), group.policies.get(policy, {})
    for seed in sorted(theirs.keys() & ours.keys()):
        yield theirs[seed].rows["right"], ours[seed].rows["right"]


def _points(right: Sequence[float]) -> list[float]:
    return [100 * each for each in right]


def _share(group: Group, policy: str, chosen: Callable[[dict[str, float]], bool]) -> Share:
    rows = [
        dict(zip(run.rows, values, strict=True))
        for run in group.runs(policy)
        for values in zip(*run.rows.values(), strict=True)
    ]
    right = [int(row["right"]) for row in rows if chosen(row)]
    return Share(sum(right), len(right))


_TASKS = {
    "look-up": "a look-up of one document",
    "definition first": "chains of two documents, ranked with the definition in front of the link",
    "link first": "chains of two documents, ranked with the link in front of the definition",
}
_PICTURED = {policy_words(policy): policy for policy in ("retrieval", "prefix", "free", "random")}

_ALL = (
    "%: exact match, with Wilson's 95 % interval. Change: points to retrieval order, paired by question, with the "
    "bootstrap's 95 % interval. Lost, won: questions that retrieval order alone answers, and this order alone, with "
    "McNemar's exact test. Place: of the document that the question names, from the front. Moved: places a document, "
    "on average. Cached: of the prompts' tokens, on a simulated engine, as though each document had 200."
)
_EACH = (
    "%: exact match by the place of the document that the question names, from the front, with Wilson's 95 % interval "
    "and the number of questions. Questions differ from place to place: retrieval puts the popular ones in front."
)
_TOY = (
    "What this cannot show: the model is a toy (0.25 million parameters, lines of three tokens), trained for this task "
    "alone. It has no prose, no knowledge of the world, no attention sinks and no long documents. It shows which moves "
    "can change an answer, and how often each order makes them; a real model has a taste of its own."
)
_CHAINS = "The model has learnt to follow links to what stands in front of them: this is the toy's own, and total."


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(QualityPositions.record, suite.name))
    tables = [table for group in groups for table in _tables(group, suite.baseline)]
    axes = "place of the document that the question names", "exact match, %"
    return Part(
        tables,
        words=[_TOY] if groups else [],
        pictures=lambda: [draw_table(_placed(group), *axes, rows=_PICTURED) for group in groups],
    )


def _tables(group: Group, baseline: str) -> list[Table]:
    tables = [_compared(group, baseline), _placed(group)]
    if all("other_place" in run.rows for run in group.runs()):
        tables.append(_chained(group))
    return tables


def _setting(group: Group) -> str:
    cell = _cell(group)
    return f"{_TASKS[cell.task]}, of {cell.documents}"


def _compared(group: Group, baseline: str) -> Table:
    headings = ["order of documents", "right, %", "change", "lost, won", "place", "moved", "cached, %"]
    table = Table(f"Right answers: {_setting(group)}", headings)
    for policy in group.policies:
        table.add(
            policy_words(policy),
            _percent(total(group, policy)),
            *(_against(group, policy, baseline) if policy != baseline else (Entry("–"), Entry("–"))),
            format_number(1 + mean(group, policy, "place")),
            format_number(mean(group, policy, "displacement"), 2),
            format_number(100 * mean(group, policy, "cached_tokens", of="prompt_tokens")),
        )
    first = group.runs()[0]
    seeds = ", ".join(map(str, group.seeds))
    table.note = f"{first.requests:,} questions × seeds {seeds}, a model and a stream for each seed. {_ALL}"
    return table


def _against(group: Group, policy: str, baseline: str) -> tuple[Entry, Entry]:
    found = change(group, policy, baseline)
    if found is None:
        return Entry("–"), Entry("–")
    difference, _, interval = change_words(found).partition(" ")
    lost, won, p = swapped(group, policy, baseline)
    chance = f"p {p:.2g}" if p >= 0.001 else "p < 0.001"
    return Entry(difference, interval, found.verdict), Entry(f"{lost:,}, {won:,}", chance if lost + won else "")


def _placed(group: Group) -> Table:
    table = Table(f"By place: {_setting(group)}", ["order of documents", *map(_band, bands(group))])
    for policy in group.policies:
        shares = by_place(group, policy)
        table.add(policy_words(policy), *(_percent(share, counted=True) for share in shares))
    table.note = _EACH
    return table


def _chained(group: Group) -> Table:
    headings = ["order of documents", "definition in front, %", "right, %", "definition behind, %", "right, %"]
    table = Table(f"By what stands in front: {_setting(group)}", headings)
    for policy in group.policies:
        sides = [definition_in_front(group, policy, behind=behind) for behind in (False, True)]
        count = sum(side.count for side in sides)
        entries = ((Entry(format_number(100 * side.count / count)), _percent(side, counted=True)) for side in sides)
        table.add(policy_words(policy), *(each for pair in entries for each in pair))
    table.note = _CHAINS
    return table


def _percent(share: Share, *, counted: bool = False) -> Entry:
    if share.share is None or share.interval is None:
        return Entry("–")
    low, high = (format_number(100 * end) for end in share.interval)
    return Entry(format_number(100 * share.share), f"[{low}, {high}]" + f" of {share.count:,}" * counted)


def _band(places: range) -> str:
    return str(places.start + 1) if len(places) == 1 else f"{places.start + 1} to {places.stop}"
