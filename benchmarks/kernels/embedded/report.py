"""Tables and pictures of the embedded engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from ragorder.benchmarks.kernels.embedded.cells import (
    BLOCKING,
    EXACTLY,
    FUSED,
    HALF,
    NO_CACHE,
    NOTHING,
    PLAIN,
    TIERS,
    EmbeddedCell,
)
from ragorder.benchmarks.kernels.embedded.experiment import EmbeddedRecord
from ragorder.benchmarks.kernels.embedded.models import ONE_THREAD
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Mark, draw_marks
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference, Statistic, StatisticsError, compare, need_scipy
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.measures import percentile
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["judge", "make_part", "median", "required"]

BASELINES = {"cached": "0", "overhead": PLAIN, "tiers": NOTHING, "fused": NOTHING, "serving": NO_CACHE}
Clock = Literal["wall_ms", "cpu_ms"]
_TIMES_SHORTER = {"2": 1.5, "4": 3.5}
# FusionRAG: 2.66 to 9.39 times.
_FUSED_SHORTER = {0.0: 4.0, 0.15: 2.7}
_MOST_WORSE = 0.08
_Group = RecordGroup[EmbeddedRecord]
_TITLES = {
    "cached": "Time to the first token, by how many documents are cached",
    "overhead": "Time to the first token with nothing cached, and that of plain transformers",
    "tiers": "Time to the first token, by where all documents are cached",
    "fused": "Time to the first token, by how much of documents computed elsewhere is recomputed",
}
_STORED = {"device": "on the device", "host": "in host memory", "disk": "on the disk"}
_CLOCKS = {"wall_ms": "wall ms", "cpu_ms": "CPU ms"}


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times shorter an arm's time is, with its 95 % interval; whether the goal is met ("": there is none)."""

    ratio: float
    low: float
    high: float
    met: Literal["met", "not met", "not decided", ""]


def required(cell: EmbeddedCell, arm: str) -> float | None:
    """The goal: the least speed-up of an arm."""
    if cell.measure == "fused" and (cell.documents, cell.document_tokens, cell.batch) == (10, 200, 1):
        return _FUSED_SHORTER.get(FUSED.get(arm, 1.0))
    if (cell.documents, cell.document_tokens) != (5, 200):
        return None
    if cell.measure == "overhead":
        return 1 / (1 + _MOST_WORSE) if arm == NOTHING else None
    return _TIMES_SHORTER.get(arm) if cell.measure == "cached" else None


def values_of(lines: Sequence[EmbeddedRecord], name: str) -> list[list[float]]:
    """A column, seed by seed."""
    return [line.figures(name) for line in sorted(lines, key=lambda line: line.seed)]


def judge(
    baseline: Sequence[EmbeddedRecord],
    ours: Sequence[EmbeddedRecord],
    clock: Clock = "wall_ms",
    *,
    statistic: Statistic = "p50",
) -> Speedup:
    """Paired row by row. Raises StatisticsError for different seeds or rows."""
    columns = values_of(baseline, clock), values_of(ours, clock)
    found = compare(*columns, statistic=statistic, relative=True, better="lower")
    ratio, low, high = (_shorter(value) for value in (found.difference, found.high, found.low))
    least = required(ours[0].setting, ours[0].policy)
    return Speedup(ratio, low, high, "" if least is None else _met(found, ratio, low, least))


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """With its 95 % bootstrap interval."""
    import numpy as np

    stats = need_scipy()
    middle = float(np.median(values))
    if len(set(values)) < 2:
        return middle, middle, middle
    found = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.median,
        n_resamples=2_000,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return middle, float(found.low), float(found.high)


def _shorter(difference: float) -> float:
    return 0.0 if difference == math.inf else 1 / max(1e-9, 1 + difference)


def _met(found: PairedDifference, ratio: float, low: float, least: float) -> Literal["met", "not met", "not decided"]:
    if ratio < least:
        return "not met"
    return "met" if found.known and low >= least else "not decided"


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(EmbeddedRecord, suite.name))
    return Part(
        [table for each in groups for table in _tables(each)],
        engine="; ".join(dict.fromkeys(_engine(each.engine) for each in groups)),
        pictures=lambda: [_picture(each) for each in groups],
    )


def _cell(group: _Group) -> EmbeddedCell:
    return group.runs()[0].setting


def _engine(engine: Mapping[str, Any]) -> str:
    return (
        f"the embedded engine, shape {engine['model']}, {engine['hardware']}, blocks of {engine['block_size']} tokens"
    )


def _title(group: _Group) -> str:
    cell = _cell(group)
    title = _TITLES.get(cell.measure) or f"Workload {cell.workload} by size of the cache"
    where = f", stored {_STORED[cell.stored]}" if cell.measure == "fused" else ""
    return title + where + (f", {cell.batch} prompts at once" if cell.batch > 1 else "")


def _tables(group: _Group) -> list[Table]:
    if _cell(group).measure == "serving":
        return [_serving(group)]
    beside = _beside(group)
    return [_prefill(group), beside] if beside.rows else [_prefill(group)]


def _beside(group: _Group) -> Table:
    """Arms that differ in one thing alone."""
    table = Table(f"Beside the same without it: {_title(group)}", ["", "times shorter, CPU", "wall"])
    for arm in group.policies:
        whole = arm.removesuffix(HALF).removesuffix(BLOCKING).removesuffix(EXACTLY)
        if whole != arm and whole in group.policies:
            pair = group.runs(whole), group.runs(arm)
            table.rows.append([Entry(arm), _ratio(_speedup(*pair, "cpu_ms")), _ratio(_speedup(*pair, "wall_ms"))])
    return table


def _prefill(group: _Group) -> Table:
    cell = _cell(group)
    baseline = group.runs(BASELINES[cell.measure])
    clocks: Sequence[Clock] = ("wall_ms", "cpu_ms") if group.engine["hardware"] == ONE_THREAD else ("wall_ms",)
    headings = [{"overhead": "served by", "fused": "reused"}.get(cell.measure, "cached"), "tokens"]
    headings += [heading for clock in clocks for heading in (_CLOCKS[clock], "times shorter")]
    table = Table(_title(group), [*headings, "required"])
    for arm in group.policies:
        lines = group.runs(arm)
        tokens = {sum(row) for line in lines for row in zip(*(line.figures(tier) for tier in TIERS), strict=True)}
        row = [Entry(_arm(arm, cell)), Entry(", ".join(format_number(each, 0) for each in sorted(tokens)))]
        verdicts: list[str] = []
        for clock in clocks:
            middle, low, high = map(_ms, median(_values(lines, clock)))
            speedup = _speedup(baseline, lines, clock)
            row += [Entry(middle, f"[{low}, {high}]"), _ratio(speedup)]
            verdicts += [speedup.met] if speedup is not None and speedup.met else []
        least = required(cell, arm)
        bound = "" if least is None else f"{format_number(least, 2)} × or more"
        table.rows.append([*row, Entry(" / ".join(dict.fromkeys(verdicts)) or "–", bound)])
    table.note = (
        f"{cell.documents} documents of {cell.document_tokens} tokens behind {cell.system_tokens}, a question of "
        f"{cell.question_tokens}. Medians of {cell.repeats} turns × seeds {_seeds(group)}, with 95 % intervals."
        + " Wall time: mean of the batch; CPU time and tokens: the batch's, CPU time divided by it." * (cell.batch > 1)
        + " Blocking loads: the engine waits for them, request by request." * any(map(_blocks, group.policies))
    )
    return table


def _blocks(arm: str) -> bool:
    return arm.endswith(BLOCKING)


def _serving(group: _Group) -> Table:
    cell = _cell(group)
    baselines = {name: group.runs(name) for name in (NO_CACHE, "device, lru") if name in group.policies}
    headings = ["cache", "hits, %", "device, %", "host, %", "nodes to host", "TTFT ms, p50", "p95", "mean"]
    table = Table(_title(group), [*headings, *(f"times shorter than {name}" for name in baselines)])
    for arm in group.policies:
        lines = group.runs(arm)
        times, prompt_tokens = _values(lines, "wall_ms"), sum(_values(lines, "prompt_tokens"))
        shares = [(sum(_values(lines, "hits")), sum(_values(lines, "retrieved")))]
        shares += [(sum(_values(lines, tier)), prompt_tokens) for tier in ("device", "host")]
        row = [Entry(arm), *(Entry(format_number(100 * part / max(1, whole))) for part, whole in shares)]
        row.append(Entry(format_number(sum(_copied(lines)), 0)))
        row += [Entry(format_number(value)) for value in (percentile(times, 50), percentile(times, 95), fmean(times))]
        row += [_ratio(_speedup(baseline, lines, "wall_ms", statistic="mean")) for baseline in baselines.values()]
        table.rows.append(row)
    top_k = "" if cell.top_k is None else f", top {cell.top_k}"
    first = group.runs()[0]
    measured = any("profile" in line.facts for line in group.runs())
    costs = " PGDSF by measured prefill times." if measured else ""
    table.note = (
        f"{len(first.rows['wall_ms'])} requests × seeds {_seeds(group)}{top_k}, the first {first.warmup} left out, one "
        f"at a time; device {cell.device}. Hits: of the documents; device and host: of the prompt tokens. Means "
        f"compared, with 95 % intervals.{costs}"
    )
    return table


def _arm(arm: str, cell: EmbeddedCell) -> str:
    if cell.measure == "overhead":
        return arm if arm == PLAIN else "the engine"
    if not arm.isdigit():
        return arm
    return "the system prompt" if arm == "0" else f"and {arm} of {cell.documents} documents"


def _values(lines: Sequence[EmbeddedRecord], name: str) -> list[float]:
    return [value for of_seed in values_of(lines, name) for value in of_seed]


def _copied(lines: Sequence[EmbeddedRecord]) -> list[float]:
    # The committed results of some runs do not have them.
    return [value for line in lines if "copied" in line.rows for value in line.figures("copied")]


def _speedup(
    baseline: Sequence[EmbeddedRecord], lines: Sequence[EmbeddedRecord], clock: Clock, **options: Any
) -> Speedup | None:
    # After an interruption there may be nothing to compare with.
    if baseline == lines:
        return None
    try:
        return judge(baseline, lines, clock, **options)
    except StatisticsError:
        return None


def _ms(value: float) -> str:
    return format_number(value, 0 if value >= 100 else 1)


def _ratio(speedup: Speedup | None) -> Entry:
    if speedup is None:
        return Entry("–")
    return Entry(
        f"{format_number(speedup.ratio, 2)} ×", f"[{format_number(speedup.low, 2)}, {format_number(speedup.high, 2)}]"
    )


def _seeds(group: _Group) -> str:
    return ", ".join(map(str, group.seeds))


def _picture(group: _Group) -> Picture:
    cell = _cell(group)
    serving = cell.measure == "serving"
    marks = []
    for arm in group.policies:
        times = _values(group.runs(arm), "wall_ms")
        middle, low, high = median(times)
        ends = (middle, percentile(times, 95)) if serving else (low, high)
        marks.append(Mark(_arm(arm, cell), middle, *ends))
    axis, alt = "time to the first token, ms", "; ".join(f"{mark.label}: {_ms(mark.value)} ms" for mark in marks)
    caption = "Medians; bars end at the 95th percentile." if serving else "Medians; bars are 95 % intervals."
    return draw_marks(marks, title=_title(group), axis=axis, alt=alt, caption=caption, row_height=0.3)
