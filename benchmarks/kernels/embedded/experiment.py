"""The embedded engine by itself: prefills, fused prompts, and workloads with caches of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from ragorder.benchmarks.common.served import Speedup
from ragorder.benchmarks.kernels.embedded.cells import (
    BLOCKING,
    FUSED,
    NO_CACHE,
    NOTHING,
    PLAIN,
    TIERS,
    EmbeddedCell,
    way_of,
)
from ragorder.benchmarks.kernels.embedded.models import ONE_THREAD, SHAPES, hardware, threads
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Mark, draw_marks
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import Statistic, StatisticsError, bootstrap
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.measures import percentile
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

_COLUMNS = ("wall_ms", "cpu_ms", "device", "host", "disk")
_SERVED = ("prompt_tokens", "hits", "retrieved")
_OTHER_ENGINE = "the embedded engine is measured by itself: run it without --engine"


class EmbeddedRecord(Record):
    """One arm: times and cached tokens of each repetition or request. `facts`: the `profile` that PGDSF had."""

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return _COLUMNS + (_SERVED if self.setting.measure == "serving" else ())

    @property
    def setting(self) -> EmbeddedCell:
        return EmbeddedCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.figures("wall_ms"))

    def figures(self, name: str) -> list[float]:
        """The figures after the warm-up."""
        values: list[float] = self.rows[name]
        return values[self.warmup :]


class Embedded(Experiment):
    kind = "embedded"
    base = EmbeddedRecord
    cell = EmbeddedCell
    runs = True
    one_job = True
    unit = "prompts"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._models: dict[str, TorchModel] = {}

    def asked(self, suite: Suite) -> Sequence[str]:
        arms = dict.fromkeys(arm for cell in suite.cells for arm in cell.arms)
        return [arm for arm in arms if self.options.policies is None or arm in self.options.policies]

    def obstacle(self, suite: Suite, cell: EmbeddedCell, policy: str) -> str | None:
        if self.options.engine not in ("sim", "torch"):
            return _OTHER_ENGINE
        return lacks_torch() or SHAPES[cell.shape].obstacle

    def applies(self, suite: Suite, cell: EmbeddedCell, policy: str) -> bool:
        return policy in cell.arms

    def steps(self, job: Job) -> int:
        cell: EmbeddedCell = job.cell
        if cell.measure == "serving":
            return job.requests * len(job.policies)
        return cell.repeats * len(cell.arms)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        cell: EmbeddedCell = job.cell
        with threads(cell.threads):
            if cell.shape not in self._models:
                self._models[cell.shape] = SHAPES[cell.shape].make()
            model = self._models[cell.shape]
            engine = {"name": "torch", "model": cell.shape, "block_size": cell.block_size, "hardware": hardware()}
            try:
                for arm, warmup, rows, facts in self._measure(job, model, advance):
                    rounded = {name: [round(value, 3) for value in values] for name, values in rows.items()}
                    yield {"policy": arm, "engine": engine, "warmup": warmup, "facts": facts, "rows": rounded}
            except ValueError as error:
                # A workload that cannot be drawn so, or a prompt that is longer than the model's longest.
                yield from (Missing(job.suite.name, cell.fields, arm, str(error)) for arm in job.policies)

    def _measure(
        self, job: Job, model: TorchModel, advance: Callable[[], None]
    ) -> Iterator[tuple[str, int, dict[str, list[float]], dict[str, Any]]]:
        cell: EmbeddedCell = job.cell
        if cell.measure == "serving":
            from ragorder.benchmarks.kernels.embedded.serving import draw_trace, serve_trace

            trace = draw_trace(cell.workload, job.seed, job.requests, cell.top_k)
            # A shorter run has as large a share of warm-up.
            warmup = cell.warmup * job.requests // cell.requests
            for arm in job.policies:
                yield arm, warmup, *serve_trace(trace, cell, cell.setups[arm], model, job.seed, advance)
            return
        from ragorder.benchmarks.kernels.embedded.prefill import measure_prefill

        # All take turns, those too that have been measured: times of one cell are of one time.
        for arm, rows in measure_prefill(cell, model, job.seed, advance).items():
            if arm in job.policies:
                yield arm, 0, rows, {}


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
    least = required(ours[0].setting, ours[0].policy)
    return Speedup.of(values_of(baseline, clock), values_of(ours, clock), least, statistic)


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """With its 95 % bootstrap interval."""
    import numpy as np

    return bootstrap(values, np.median, resamples=2_000)


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
        whole = way_of(arm)
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
    blocks = any(arm.endswith(BLOCKING) for arm in group.policies)
    table.note = (
        f"{cell.documents} documents of {cell.document_tokens} tokens after {cell.system_tokens}, a question of "
        f"{cell.question_tokens}. Medians of {cell.repeats} turns × seeds {_seeds(group)}, with 95 % intervals."
        + " Wall time: mean of the batch; CPU time and tokens: the batch's, CPU time divided by it." * (cell.batch > 1)
        + " Blocking loads: the engine waits for them, request by request." * blocks
    )
    return table


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
    return Entry(f"{format_number(speedup.ratio, 2)} ×", speedup.interval)


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
