"""Tables and pictures of replacement policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from ragorder.benchmarks.ragcache.replacement.experiment import KIB_PER_TOKEN, ReplacementRecord
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Compared
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines, from_zero
from ragorder.eval.report.metrics import Metric
from ragorder.eval.report.paper import number
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import (
    THIN,
    axis_words,
    format_number,
    interval_words,
    seeds_by_row,
    served_words,
    verdict_words,
)
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Cell, Record, key_of
from ragorder.eval.running.suite import Suite

_OURS, _LRU, _GDSF, _LFU = "pgdsf+history", "lru", "gdsf+history", "lfu+history"
_FORECAST = "forecast+history"
_MORE_HITS, _SLOWER, _SCHEDULING_MS, _NODES = 1.05, 0.01, 0.2, 100_000
_SAVED, _SAVED_WAITING, _NEVER = 0.93, 0.85, 1.01
_FOLLOWED = {"mirror": "the orderer's own mirror", "events": "KV events"}
_KEPT = (
    "Hits: of the documents that were retrieved, those whose keys and values were there, from the first document on "
    "(RAGCache section 7.4). With history: frequencies and costs survive eviction; without, they end when a document "
    "has left both tiers. For LRU that makes no difference. Below each figure its ratio to {baseline}'s, with a 95 % "
    "interval, paired request by request; where there are thousands, blocks of a hundred are resampled."
)
_REQUIRED = (
    "Required on every stream and at every size: a hit rate of at least 1.05 times LRU's, and a mean prefill at most "
    "1 % above that of GDSF with history. In brackets 95 % intervals; where one reaches across the bound, it says so. "
    "Possible: by LRU's hits, a bound on what any policy can hit in tiers of these sizes, even one that knows the "
    "future (PFOO-U; where that was not kept, what tiers without end would hit). It need not be reached."
)
_REQUIRED_OF_FORECAST = (
    f"Required of documents that ragorder places: at most {_SAVED:g} times LRU's mean prefill on four of the six "
    f"streams, with waiting requests known {_SAVED_WAITING:g} times that of LRU which knows of none; never above "
    f"{_NEVER:g} times. In brackets 95 % intervals. At most: a bound on the hits of any policy with any order "
    "(PFOO-U), which need not be reached."
)
_TIMED = (
    "Wall times of a request with the tier full, in one thread: the median of the seeds, and their range. They are "
    "those of one machine with a load of its own."
)
_LOOKS = {
    "pgdsf+history": "earned",
    "pgdsf": "prefix",
    "forecast+history": "oracle",
    "gdsf+history": "greedy",
    "gdsf": "sorted",
    "lfu+history": "recency",
    "lfu": "other",
    "lru": "retrieval",
    "lru+history": "other",
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


def _most_hits(group: _Group) -> float | None:
    known = all("most_hits_percent" in line.facts for line in group.runs())
    return _fact(group, "most_hits_percent") if known else None


def make_part(suite: Suite, results: Results) -> Part:
    lines = results.of(ReplacementRecord, suite.name)
    groups = group_runs([line for line in lines if line.scheduling is None])
    return Part(
        _scheduling([line for line in lines if line.scheduling is not None]) + _tables(suite, groups),
        engine=_engine(lines),
        pictures=lambda: _pictures(suite, groups),
        compared=[found for metric in (_PREFILL, _HITS) if (found := _of_ours(suite, groups, metric)).cells],
    )


def _of_ours(suite: Suite, groups: Sequence[_Group], metric: Metric) -> Compared:
    baseline = _baseline(suite, metric)
    ours = _FORECAST if _FORECAST in suite.policies else _OURS
    compared = ((group, group.compare(ours, baseline, metric)) for group in groups)
    cells = [(f"{_stream(group.cell)}, host {_tier(group.cell['host'])}", found) for group, found in compared if found]
    return Compared(metric, _words(ours), _words(baseline), cells)


def _baseline(suite: Suite, metric: Metric) -> str:
    return "device" if suite.baseline == "none" and metric is _HITS else suite.baseline


def _engine(lines: Sequence[ReplacementRecord]) -> str:
    kinds = ["simulated tiers" if line.scheduling is None else "one tier, metadata only, timed" for line in lines]
    return "; ".join(dict.fromkeys(kinds))


def _tables(suite: Suite, groups: Sequence[_Group]) -> list[Table]:
    tables = [_figures(suite, groups, metric) for metric in _METRICS] if groups else []
    wanted = [group for group in groups if {_OURS, _LRU, _GDSF} <= group.policies.keys()]
    if wanted:
        tables.append(_required(wanted))
    forecast = [group for group in groups if {_FORECAST, _LRU} <= group.policies.keys() and group.cell.get("ordered")]
    if forecast:
        tables.append(_forecast(forecast))
    return tables


def _figures(suite: Suite, groups: Sequence[_Group], metric: Metric) -> Table:
    policies = list(dict.fromkeys(policy for group in groups for policy in group.policies))
    baseline = _baseline(suite, metric)
    if baseline != suite.baseline:
        policies = [policy for policy in policies if policy != suite.baseline]
    paper = [_beside(suite, group) for group in groups] if metric is _PREFILL else []
    table = Table(metric.heading.capitalize(), ["stream", "host", *map(_words, policies)], labels=2)
    seeds, _ = seeds_by_row([group.seeds for group in groups])
    for place, group in enumerate(groups):
        row = _labels(group)
        row[0] = replace(row[0], note="; ".join(filter(None, (row[0].note, seeds[place]))))
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
        most = "–" if possible is None else f"{format_number(possible, 3)} ×"
        by_gdsf, by_lfu = (group.compare(_OURS, other, _HITS) for other in (_GDSF, _LFU))
        row = [
            *_labels(group),
            _compared(hits),
            Entry(verdicts[0]),
            Entry(most),
            _compared(by_gdsf),
        ]
        table.rows.append([*row, _compared(by_lfu), _compared(prefill), Entry(verdicts[1])])
    table.note = (
        f"{_REQUIRED} More hits than LRU: holds in {held[0]} of {len(groups)} cells; in {impossible} no policy can. No "
        f"slower than GDSF: in {held[1]}. GDSF and LFU with history."
    )
    return table


def _forecast(groups: Sequence[_Group]) -> Table:
    """The forecast by LRU's figures with no waiting request known."""
    headings = ["stream", "host", "prefill by LRU's", "required", f"{_NEVER:g} ×", "hits, LRU", "hits, forecast"]
    table = Table("The forecast, held against what is required", [*headings, "hits, at most"], labels=2)
    counted: dict[tuple[str, int], list[bool]] = {}
    plain = {key_of({**group.cell, "waiting": 0}): group for group in groups if not group.cell.get("waiting")}
    for group in groups:
        waiting = int(group.cell.get("waiting", 0))
        before = plain.get(key_of({**group.cell, "waiting": 0}))
        if before is None:
            continue
        policies = {_LRU: before.policies[_LRU], _FORECAST: group.policies[_FORECAST]}
        found = RecordGroup(group.cell, group.engine, policies=policies).compare(_FORECAST, _LRU, _PREFILL)
        most = _SAVED_WAITING if waiting else _SAVED
        verdicts = [_bound(found, partial(_at_most, most)), _bound(found, partial(_at_most, _NEVER))]
        follow = str(group.cell.get("follow", "mirror"))
        counted.setdefault((follow, waiting), []).append(verdicts[0].startswith("holds"))
        hits = [before.value(_LRU, _HITS), group.value(_FORECAST, _HITS)]
        row = [*_labels(group), _compared(found), Entry(f"{most:g} ×", verdicts[0]), Entry(verdicts[1])]
        row += [Entry(format_number(value)) for value in hits]
        table.rows.append([*row, Entry(format_number(_most_hits(group)))])
    holds = "; ".join(
        f"{_FOLLOWED.get(follow, follow)}{f', {waiting} waiting requests known' if waiting else ''}: {sum(held)} of "
        f"{len(held)} streams"
        for (follow, waiting), held in counted.items()
    )
    table.note = f"{_REQUIRED_OF_FORECAST} It holds with {holds}."
    return table


def _at_most(most: float, difference: float) -> bool:
    return 1 + difference <= most


def _possible(group: _Group) -> float | None:
    plain = group.value(_LRU, _HITS)
    if not plain or group.cell.get("ordered"):
        return None
    return fmean(line.facts.get("most_hits_percent", line.facts["seen_percent"]) for line in group.runs()) / plain


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
    load = f" Load average before each run: {loads[0]} to {loads[-1]}." if loads else ""
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
    most = ""
    if group.cell.get("ordered") and (bound := _most_hits(group)) is not None:
        most = f"; in any order at most {format_number(bound)}{THIN}%"
    return [
        Entry(_stream(group.cell), f"working set {_room(held, kib)}; seen before: {format_number(seen)}{THIN}%{most}"),
        Entry(_tier(group.cell["host"]), f"{_room(host, kib)}, device {_room(device, kib)}"),
    ]


def _stream(cell: Cell) -> str:
    words = str(cell.get("workload") or cell.get("corpus"))
    words += ", as it came" if cell.get("order") == "data" else ""
    words += f", top {cell['top_k']}" if "top_k" in cell else ""
    words += ", placed by ragorder" if cell.get("ordered") else ""
    words += ", which follows events" if cell.get("follow") == "events" else ""
    return words + (f", {cell['waiting']} waiting requests known" if cell.get("waiting") else "")


def _tier(size: str) -> str:
    return size.replace("GiB", f"{THIN}GiB").replace("%", f"{THIN}%")


def _room(tokens: float, kib_per_token: int) -> str:
    gib = tokens * kib_per_token / (1 << 20)
    return f"{format_number(tokens, 0)} tokens ({format_number(gib, 0 if gib >= 10 else 1)}{THIN}GiB)"


def _beside(suite: Suite, group: _Group) -> Entry:
    for row in suite.paper_rows:
        times = [number(row, name) for name in ("pgdsf", "gdsf", "lru", "lfu")]
        if row.cell and all(group.cell.get(name) == value for name, value in row.cell.items()) and None not in times:
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


def _pictures(suite: Suite, groups: Sequence[_Group]) -> list[Picture]:
    x = suite.report.x
    if x is None:
        return []
    panels: dict[str, list[_Group]] = {}
    for group in groups:
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

    lines = {policy: list(enumerate(line)) for policy, line in drawn.items()}
    words_of = {policy: _words(policy) for policy in drawn}
    said = "; ".join(
        f"{_words(policy)}: {', '.join(f'{at} {format_number(value)}' for at, value in zip(ticks, line, strict=True))}"
        for policy, line in drawn.items()
    )
    title = f"{metric.name.capitalize()} by {axis_words(x).partition(',')[0]} ({words})"
    shown: dict[str, Any] = {"looks": _LOOKS, "words": words_of, "ticks": ticks, "adjust": from_zero}
    return draw_lines(title, lines, axis_words(x), metric.heading, alt=said, **shown)
