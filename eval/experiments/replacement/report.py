"""Tables and pictures of replacement policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ragorder.eval.experiments.replacement import KIB_PER_TOKEN
from ragorder.eval.experiments.replacement.record import ReplacementRecord
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.metrics import Metric
from ragorder.eval.report.paper import number
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, axis_words, format_number, interval_words, served_words, verdict_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Cell, Record
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_OURS, _LRU, _GDSF, _LFU = "pgdsf+history", "lru", "gdsf+history", "lfu+history"
_MORE_HITS, _SLOWER, _SCHEDULING_MS, _NODES = 1.05, 0.01, 0.2, 100_000
_KEPT = (
    "Hits: of the documents that were retrieved, those whose keys and values were there, from the first document on "
    "(RAGCache section 7.3). With history: frequencies and costs survive eviction; without, they end when a document "
    "has left both tiers. For LRU that makes no difference. Below each figure its ratio to {baseline}'s, with a 95 % "
    "interval, paired request by request; where there are thousands, blocks of a hundred are resampled."
)
_REQUIRED = (
    "Required on every stream and at every size: a hit rate of at least 1.05 times LRU's, and a mean prefill at most "
    "1 % above that of GDSF with history. In brackets 95 % intervals; where one reaches across the bound, it says so. "
    "Possible: by LRU's hits, a bound on what any policy can hit in tiers of these sizes, even one that knows the "
    "future (PFOO-U; where that was not kept, what tiers without end would hit). It need not be reached."
)
_TIMED = (
    "Wall times of a request with the tier full, in one thread: the median of the seeds, and their range. They are "
    "those of one machine with a load of its own."
)
_LOOKS = {
    "pgdsf+history": "auto",
    "pgdsf": "best",
    "gdsf+history": "greedy",
    "gdsf": "sorted",
    "lfu+history": "recency",
    "lfu": "other",
    "lru": "retrieval",
    "lru+history": "oracle",
    "device": "contextpilot",
    "none": "none",
}
_TIMES = ("p50_ms", "p99_ms", "max_ms")


@dataclass(frozen=True, slots=True)
class _SummedMetric(Metric):
    def columns(self, run: Record) -> tuple[Any, Any] | None:
        assert isinstance(run, ReplacementRecord)
        assert self.of is not None
        return self.scale * run.sums(self.column), run.sums(self.of)


_HITS = _SummedMetric("hits", "hits", "% of retrieved documents", of="retrieved", scale=100, relative=True)
_PREFILL = _SummedMetric("mean prefill", "prefill_ms", "ms", of="requests", relative=True, better="lower")
_METRICS = (_HITS, _PREFILL)

_Group = RecordGroup[ReplacementRecord]


def _fact(group: _Group, name: str) -> float:
    return fmean(line.facts[name] for line in group.runs())


def make_part(suite: Suite, results: Results) -> Part:
    lines = results.of(ReplacementRecord, suite.name)
    return Part(_tables(suite, lines), engine=_engine(lines), pictures=lambda: _pictures(suite, lines))


def _engine(lines: Sequence[ReplacementRecord]) -> str:
    kinds = ["simulated tiers" if line.scheduling is None else "one tier, metadata only, timed" for line in lines]
    return "; ".join(dict.fromkeys(kinds))


def _tables(suite: Suite, lines: Sequence[ReplacementRecord]) -> list[Table]:
    groups = group_runs([line for line in lines if line.scheduling is None])
    tables = _scheduling([line for line in lines if line.scheduling is not None])
    if groups:
        tables += [_figures(suite, groups, metric) for metric in _METRICS]
    wanted = [group for group in groups if {_OURS, _LRU, _GDSF} <= group.policies.keys()]
    if wanted:
        tables.append(_required(wanted))
    return tables


def _figures(suite: Suite, groups: Sequence[_Group], metric: Metric) -> Table:
    policies = list(dict.fromkeys(policy for group in groups for policy in group.policies))
    baseline = suite.baseline
    if baseline == "none" and metric is _HITS:
        baseline = "device"
        policies.remove("none")
    paper = [_beside(suite, group) for group in groups] if metric is _PREFILL else []
    table = Table(metric.heading.capitalize(), ["stream", "host", *map(_words, policies)], labels=2)
    for place, group in enumerate(groups):
        row = _labels(group)
        for policy in policies:
            found = group.compare(policy, baseline, metric)
            shown = format_number(group.value(policy, metric))
            if found is not None:
                row.append(
                    Entry(
                        shown,
                        f"{format_number(1 + found.difference, 2)} × {interval_words(found, 2, _times_of)}",
                        verdict_words(found),
                    )
                )
            else:
                row.append(Entry(shown, "baseline" if policy == baseline else ""))
        table.rows.append(row + ([paper[place]] if any(entry.text != "–" for entry in paper) else []))
    if any(entry.text != "–" for entry in paper):
        table.headings = [*table.headings, "paper: mean TTFT, s"]
    table.note = f"{_KEPT.format(baseline=_words(baseline))} {_counted(groups)}"
    return table


def _required(groups: Sequence[_Group]) -> Table:
    headings = ["stream", "host", "hits by LRU's", "1.05 ×", "possible", "hits by GDSF's", "hits by LFU's"]
    table = Table(
        "PGDSF with history, held against what is required", [*headings, "prefill by GDSF's", "1 %"], labels=2
    )
    held, impossible = [0, 0], 0
    for group in groups:
        hits, prefill = group.compare(_OURS, _LRU, _HITS), group.compare(_OURS, _GDSF, _PREFILL)
        verdicts = [
            _bound(hits, lambda difference: 1 + difference >= _MORE_HITS),
            _bound(prefill, lambda difference: difference <= _SLOWER),
        ]
        held = [count + verdict.startswith("holds") for count, verdict in zip(held, verdicts, strict=True)]
        possible = _possible(group)
        if possible is not None and possible < _MORE_HITS:
            verdicts[0], impossible = "no policy can", impossible + 1
        by_gdsf, by_lfu = (group.compare(_OURS, other, _HITS) for other in (_GDSF, _LFU))
        row = [*_labels(group), _compared(hits), Entry(verdicts[0]), Entry(_times(possible)), _compared(by_gdsf)]
        table.rows.append([*row, _compared(by_lfu), _compared(prefill), Entry(verdicts[1])])
    table.note = (
        f"{_REQUIRED} More hits than LRU: holds in {held[0]} of {len(groups)} cells; in {impossible} no policy can. No "
        f"slower than GDSF: in {held[1]}. GDSF and LFU with history."
    )
    return table


def _possible(group: _Group) -> float | None:
    plain = group.value(_LRU, _HITS)
    if not plain or group.cell.get("ordered"):
        return None
    return fmean(line.facts.get("most_hits_percent", line.facts["seen_percent"]) for line in group.runs()) / plain


def _times(ratio: float | None) -> str:
    return f"{format_number(ratio, 3)} ×" if ratio is not None else "–"


def _bound(found: PairedDifference | None, holds: Callable[[float], bool]) -> str:
    if found is None:
        return "–"
    words = "holds" if holds(found.difference) else "does not hold"
    sure = found.known and holds(found.low) == holds(found.high) == holds(found.difference)
    return words if sure else f"{words}, within its interval"


def _scheduling(lines: Sequence[ReplacementRecord]) -> list[Table]:
    if not lines:
        return []
    cells: dict[tuple[int, str], list[ReplacementRecord]] = {}
    for line in lines:
        cells.setdefault((int(line.cell["nodes"]), line.policy), []).append(line)
    headings = ["documents held", "policy", "p50, ms", "p99, ms", "longest, ms", f"p99 to {_SCHEDULING_MS} ms"]
    table = Table("Scheduling time a request", headings, labels=2)
    for (nodes, policy), seeds in sorted(cells.items(), key=lambda each: each[0][0]):
        times = [[line.scheduling[name] for line in seeds if line.scheduling] for name in _TIMES]
        holds = "holds" if max(times[1]) <= _SCHEDULING_MS else "does not hold"
        row = [Entry(f"{nodes:,}"), Entry(_words(policy)), *map(_spread, times)]
        table.rows.append([*row, Entry(holds, "required" if nodes == _NODES else "")])
    loads = sorted(line.load_average for line in lines if line.load_average is not None)
    load = f" Load average in front of each run: {loads[0]} to {loads[-1]}." if loads else ""
    table.note = f"{_TIMED}{load}"
    return [table]


def _spread(values: Sequence[float]) -> Entry:
    ordered = sorted(values)
    ends = f"{format_number(ordered[0], 3)} to {format_number(ordered[-1], 3)}" if len(ordered) > 1 else ""
    return Entry(format_number(ordered[len(ordered) // 2], 3), ends)


def _labels(group: _Group) -> list[Entry]:
    held = _fact(group, "working_set_tokens")
    seen = _fact(group, "seen_percent")
    device, host = (_fact(group, f"{tier}_tokens") for tier in ("device", "host"))
    kib = int(group.cell.get("kib_per_token", KIB_PER_TOKEN))
    return [
        Entry(_stream(group.cell), f"working set {_room(held, kib)}; seen before: {format_number(seen)}{THIN}%"),
        Entry(_tier(group.cell["host"]), f"{_room(host, kib)}, device {_room(device, kib)}"),
    ]


def _stream(cell: Cell) -> str:
    words = str(cell.get("workload") or cell.get("corpus"))
    words += ", as it came" if cell.get("order") == "data" else ""
    words += f", top {cell['top_k']}" if "top_k" in cell else ""
    return f"{words}, placed by ragorder" if cell.get("ordered") else words


def _tier(size: str) -> str:
    return size.replace("GiB", f"{THIN}GiB").replace("%", f"{THIN}%")


def _room(tokens: float, kib_per_token: int) -> str:
    gib = tokens * kib_per_token / (1 << 20)
    return f"{format_number(tokens, 0)} tokens ({format_number(gib, 0 if gib >= 10 else 1)}{THIN}GiB)"


def _beside(suite: Suite, group: _Group) -> Entry:
    for row in suite.paper_rows:
        times = [number(row, name) for name in ("pgdsf", "gdsf", "lru", "lfu")]
        if row.at and all(group.cell.get(name) == value for name, value in row.at.items()) and None not in times:
            return Entry(", ".join(format_number(time, 2) for time in times), "PGDSF, GDSF, LRU, LFU")
    return Entry("–")


def _compared(found: PairedDifference | None) -> Entry:
    if found is None:
        return Entry("–")
    return Entry(
        f"{format_number(1 + found.difference, 3)} ×", interval_words(found, 3, _times_of), verdict_words(found)
    )


def _times_of(difference: float) -> float:
    return 1 + difference


def _words(policy: str) -> str:
    name, history, _ = policy.partition("+history")
    if name in ("none", "device"):
        return {"none": "no cache", "device": "device alone, LRU"}[name]
    return name.upper() + (", history" if history else "")


def _counted(groups: Sequence[_Group]) -> str:
    lines = [line for group in groups for line in group.runs()]
    seeds = sorted({line.seed for line in lines})
    served = served_words([line.requests for line in lines], [line.warmup for line in lines])
    words = f"{served}; seeds {', '.join(map(str, seeds))}"
    once = any(len(group.policies[policy]) < len(seeds) for group in groups for policy in group.policies)
    return f"{words}{', a stream as it came with one of them' if once else ''}."


def _pictures(suite: Suite, lines: Sequence[ReplacementRecord]) -> list[Picture]:
    x = suite.report.x
    if x is None:
        return []
    panels: dict[str, list[_Group]] = {}
    for group in group_runs([line for line in lines if line.scheduling is None]):
        rest: Mapping[str, Any] = {name: value for name, value in group.cell.items() if name != x}
        panels.setdefault(_stream(rest), []).append(group)
    metrics = [metric for name in suite.report.metrics for metric in _METRICS if metric.column == name]
    drawn = {words: panel for words, panel in panels.items() if len(panel) > 1}
    return [_picture(words, x, panel, metric) for words, panel in drawn.items() for metric in metrics]


def _picture(words: str, x: str, panel: Sequence[_Group], metric: Metric) -> Picture:
    ticks = [_tier(str(group.cell[x])) for group in panel]
    policies = dict.fromkeys(policy for group in panel for policy in group.policies)
    values = {policy: [group.value(policy, metric) for group in panel] for policy in policies}
    drawn = {policy: [each for each in line if each is not None] for policy, line in values.items() if None not in line}

    def paint(axes: Any) -> None:
        ends = []
        for policy, line in drawn.items():
            looks = style(_LOOKS.get(policy, "other"))
            axes.plot(range(len(line)), line, looks.dashes, color=looks.colour, marker=looks.marker, markersize=4.5)
            ends.append((len(line) - 1.0, line[-1], _words(policy), looks))
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.set_xticks(range(len(ticks)), ticks)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(axis_words(x))
        axes.set_ylabel(metric.heading)
        label_ends(axes, ends)

    said = "; ".join(
        f"{_words(policy)}: {', '.join(f'{at} {format_number(value)}' for at, value in zip(ticks, line, strict=True))}"
        for policy, line in drawn.items()
    )
    title = f"{metric.name.capitalize()} by {axis_words(x).partition(',')[0]} ({words})"
    return draw(paint, title=title, alt=said)
