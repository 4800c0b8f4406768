"""Tables of answers by the embedded engine: its times, and how far it is from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ragorder.benchmarks.fusion.fusion.arms import RATIOS
from ragorder.benchmarks.fusion.fusion.record import FusionRecord
from ragorder.benchmarks.fusion.fusion.results import ENOUGH, Group, curve
from ragorder.eval.report.statistics import StatisticsError, compare
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number

__all__ = ["ALONE", "reference_table", "seconds_table"]

ALONE = "FusionRAG, online only"
"""Times are compared with its."""

_SHOWN = (0.05, 0.15, 0.3)
_CLOCKS = {"cpu_ms": "CPU", "wall_ms": "wall"}


def reference_table(group: Group, setting: str) -> Table | None:
    """None for answers of the reference itself."""
    compared = [line for line in group.runs() if "compared" in line.facts]
    if not compared:
        return None
    headings = ["", "questions", "answers compared", "others", "logits apart, at most"]
    table = Table(f"The engine beside the reference: {setting}", headings)
    for arm in group.policies:
        lines = [line for line in compared if line.policy == arm]
        answers, others = (sum(line.facts[name] for line in lines) for name in ("compared", "others"))
        apart = max(line.facts["apart"] for line in lines)
        table.add(arm, f"{sum(line.requests for line in lines):,}", f"{answers:,}", str(others), f"{apart:.1e}")
    table.note = (
        "Each question at each share, by the engine and by a reference in plain torch; of random tokens only none and "
        "all, as the draws differ."
    )
    return table


def seconds_table(group: Group, setting: str) -> Table | None:
    """Times at the same share, and at the least share with enough right answers; None without `ALONE`."""
    if not any("cpu_ms 0" in line.rows for line in group.runs(ALONE)):
        return None
    shown = [ratio for ratio in _SHOWN if ratio in group.runs(ALONE)[0].ratios]
    headings = [""]
    for ratio in shown:
        headings += [f"EM at {100 * ratio:g} %", "CPU ms", "times sooner, CPU", "wall"]
    table = Table(f"Time to the first token: {setting}", [*headings, "enough", "times sooner, CPU", "wall"])
    least = _enough(group, ALONE)
    for arm in group.policies:
        found = curve(group, arm)
        if found is None or set(found.ratios) != set(RATIOS):
            continue
        row = [Entry(arm)]
        for ratio in shown:
            times = [value for line in group.runs(arm) for value in line.rows[f"cpu_ms {ratio:g}"]]
            row += [Entry(format_number(found.at(ratio), 3)), Entry(format_number(median(times)))]
            row += [_sooner(group, arm, ratio, ratio, clock) for clock in _CLOCKS]
        enough = _enough(group, arm)
        row.append(Entry("–" if enough is None else f"{100 * enough:g} %"))
        row += [Entry("–") if None in (enough, least) else _sooner(group, arm, enough, least, each) for each in _CLOCKS]
        table.rows.append(row)
    table.note = (
        f"Times sooner than {ALONE}: ratio of medians of the same questions, with 95 % intervals, at the same share "
        f"recomputed, and each at the least share from which on {100 * ENOUGH:g} % of the way from full reuse to "
        f"full attention are reached. Arms take turns; each finds its documents cached. {_idle(group.runs())}"
    )
    return table


def _enough(group: Group, arm: str) -> float | None:
    found = curve(group, arm)
    return None if found is None else found.enough()


def _sooner(group: Group, arm: str, ratio: float | None, other: float | None, clock: str) -> Entry:
    ours, theirs = group.policies[arm], group.policies[ALONE]
    seeds = sorted(ours.keys() & theirs.keys())
    if arm == ALONE or not seeds:
        return Entry("–")
    columns = ([each[seed].rows[f"{clock} {at:g}"] for seed in seeds] for each, at in ((theirs, other), (ours, ratio)))
    try:
        found = compare(*columns, statistic="p50", relative=True, better="lower")
    except StatisticsError:
        return Entry("–")
    return Entry(_times(found.difference), f"[{_times(found.high)}, {_times(found.low)}]" if found.known else "")


def _times(difference: float) -> str:
    return f"{format_number(1 / max(1e-9, 1 + difference), 2)} ×"


def _idle(lines: Sequence[FusionRecord]) -> str:
    layers = lines[0].setting.idle_layers
    if not layers:
        return "Of a model this small most of the time is not computation."
    return f"The model has {layers} layers more, which change no answer and take the time of a larger model's."
