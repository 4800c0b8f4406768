"""Tables and pictures of times to the first token with and without tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragorder.adapters.observing.tier_stats import SOURCES, TIERS
from ragorder.benchmarks.common.served import Speedup
from ragorder.benchmarks.ragcache.tiering.experiment import ARMS, TieringRecord
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Compared, Mark, draw_marks
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.metrics import TTFT_MEAN
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import StatisticsError, compare
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, change_words, format_number, seeds_by_row, served_words, verdict_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

REQUIRED = 1.5
"""The least speed-up of the mean time to the first token, where the working set fits the host."""
MOST_WORSE = 0.03
"""The largest slow-down, where the working set fits the device."""
GOALS = {"host": REQUIRED, "device": 1 / (1 + MOST_WORSE)}
_FITS = {
    "device": "the device's pool",
    "host": "host memory",
    "beyond": "neither",
    "disk": "the disk",
}
_NOTE = (
    "One request at a time, on both servers by turns. Times shorter: the mean time with the prefix cache alone by that "
    "with tiers; its 95 % interval, paired request by request; that of each seed. Required: at least "
    f"{REQUIRED:g} times where the working set fits the host, at most {100 * MOST_WORSE:g} % longer where it fits the "
    "device. Hits: of all prompt tokens, those that were not computed, by where their keys and values came from."
)
_ALONE, _WITH = ARMS
_Group = RecordGroup[TieringRecord]


def judge(room: str, apc: Sequence[Sequence[float] | Floats], tiers: Sequence[Sequence[float] | Floats]) -> Speedup:
    """Compare both arms' mean times, paired request by request. Raises StatisticsError."""
    return Speedup.of(apc, tiers, GOALS.get(room), "mean")


def _arm(group: _Group, arm: str) -> list[TieringRecord]:
    return [pair[ARMS.index(arm)] for pair in group.pairs(*ARMS)]


def _sides(group: _Group) -> list[list[Floats]]:
    return [[line.ttft_ms for line in _arm(group, arm)] for arm in ARMS]


def _verdict(group: _Group) -> Speedup | None:
    try:
        return judge(str(group.cell["tier"]), *_sides(group))
    except StatisticsError:
        return None


def _shares(group: _Group, arm: str) -> dict[str, float]:
    sums = {source: sum(line.sources[source] for line in _arm(group, arm)) for source in SOURCES}
    every = max(1, sum(sums.values()))
    return {source: 100 * tokens / every for source, tokens in sums.items()}


def make_part(suite: Suite, results: Results) -> Part:
    lines = results.of(TieringRecord, suite.name)
    groups = _groups(lines)
    times = [(_fits(group), compare(*_sides(group), relative=True, better="lower")) for group, _ in groups]
    return Part(
        _tables(groups),
        engine=_engine(lines),
        pictures=lambda: _pictures(groups),
        compared=[Compared(TTFT_MEAN, "a cache with tiers", "the prefix cache alone", times)] if groups else [],
    )


def _fits(group: _Group) -> str:
    return _FITS.get(group.cell["tier"], str(group.cell["tier"]))


def _engine(lines: Sequence[TieringRecord]) -> str:
    found = [
        f"two live servers, model {line.engine.get('model')}, blocks of {line.block_size} tokens" for line in lines
    ]
    return "; ".join(dict.fromkeys(found))


def _tables(groups: Sequence[tuple[_Group, Speedup]]) -> list[Table]:
    if not groups:
        return []
    headings = ["the working set fits", "pool, host, disk", "alone → with tiers, mean ms", "times shorter", "required"]
    headings += ["alone → with tiers, p50 ms", "p95 ms", "hits alone, %", "hits with tiers: device, host, disk, %"]
    table = Table("Time to the first token", headings, labels=2)
    each, counted = seeds_by_row([[line.seed for line in _arm(group, _WITH)] for group, _ in groups])
    for (group, verdict), seeds in zip(groups, each, strict=True):
        alone, tiers = (_shares(group, arm) for arm in ARMS)
        table.rows.append(
            [
                Entry(_fits(group), ", ".join(filter(None, (_stream(group), seeds)))),
                _sizes(_arm(group, _WITH)[0]),
                Entry(f"{format_number(verdict.found.baseline, 0)} → {format_number(verdict.found.value, 0)}"),
                _ratio(verdict),
                Entry(
                    verdict.met or "–", "" if verdict.least is None else f"{format_number(verdict.least, 2)} × or more"
                ),
                *(_quantile(group, name) for name in ("p50", "p95")),
                Entry(format_number(alone["device"])),
                Entry(", ".join(format_number(tiers[tier]) for tier in TIERS)),
            ]
        )
    table.note = f"{_NOTE} {_served([group for group, _ in groups])}; {counted}."
    return [table]


def _pictures(groups: Sequence[tuple[_Group, Speedup]]) -> list[Picture]:
    groups = [(group, verdict) for group, verdict in groups if verdict.found.known]
    if not groups:
        return []
    axis = "mean TTFT, times shorter with tiers"
    marks = [Mark(_fits(group), verdict.ratio, verdict.low, verdict.high, verdict.by_seed) for group, verdict in groups]
    said = "; ".join(
        f"{_fits(group)}: {format_number(verdict.ratio, 2)} times {verdict.interval}" for group, verdict in groups
    )
    caption = "What the working set fits; bars are 95 % intervals, strokes the seeds."
    return [draw_marks(marks, title="What tiers save", axis=axis, alt=said, caption=caption, baseline=1)]


def _groups(lines: Sequence[TieringRecord]) -> list[tuple[_Group, Speedup]]:
    groups = group_runs([line for line in lines if line.policy in ARMS])
    return [(group, verdict) for group in groups if (verdict := _verdict(group)) is not None]


def _stream(group: _Group) -> str:
    cell, line = group.cell, _arm(group, _WITH)[0]
    words = f"{cell.get('corpus', '')}, top {cell['top_k']}" if "top_k" in cell else str(cell.get("corpus", ""))
    words += f", {cell['replacement']}" if "replacement" in cell else ""
    words += ", the device in vLLM's own order" if cell.get("device_order") is False else ""
    return f"{words}: {format_number(line.facts['working_set_tokens'], 0)} tokens"


def _sizes(line: TieringRecord) -> Entry:
    disk = line.facts.get("disk_bytes")
    sizes = [_megabytes(line.facts["host_bytes"]), "–" if disk is None else _megabytes(disk)]
    return Entry(f"{format_number(line.facts['blocks'] * line.block_size, 0)} tokens, {', '.join(sizes)}")


def _megabytes(size: int) -> str:
    return f"{format_number(size / 1e6, 0)}{THIN}MB"


def _ratio(verdict: Speedup) -> Entry:
    if not verdict.found.known:
        return Entry(f"{format_number(verdict.ratio, 2)} ×", "too few requests for an interval", "too few requests")
    by_seed = ", ".join(format_number(ratio, 2) for ratio in verdict.by_seed)
    seeds = f"; {by_seed}" if len(verdict.by_seed) > 1 else ""
    return Entry(f"{format_number(verdict.ratio, 2)} ×", f"{verdict.interval}{seeds}", verdict.found.verdict)


def _quantile(group: _Group, statistic: Any) -> Entry:
    found = compare(*_sides(group), statistic=statistic, relative=True, better="lower")
    shown = f"{format_number(found.baseline, 0)} → {format_number(found.value, 0)}"
    return Entry(shown, change_words(found), verdict_words(found))


def _served(groups: Sequence[_Group]) -> str:
    lines = [line for group in groups for line in _arm(group, _WITH)]
    return served_words([line.requests for line in lines], [line.warmup for line in lines])
