"""Figures by which suites compare two policies: the headline and the overview of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ragorder.eval.report.canvas import LINE, Picture, draw, style
from ragorder.eval.report.groups import Group, RecordGroup
from ragorder.eval.report.metrics import CACHED, TTFT_P50, Metric
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, capital, change_words, format_number, policy_words, signed, spread_words
from ragorder.eval.running.record import key_of

if TYPE_CHECKING:
    from rich.text import Text

_BAR = 30


@dataclass(frozen=True, slots=True)
class Chart:
    """Differences to a baseline, one row each: a picture on the page, bars on the console."""

    title: str
    axis: str
    marks: Sequence[Mark]
    caption: str = ""
    lower_is_better: bool = False

    def picture(self) -> Picture:
        """Raises ImportError naming the extra."""
        said = "; ".join(f"{mark.label}: {mark.shown}" for mark in self.marks)
        caption = self.caption + " Strokes are the seeds." * any(mark.seeds for mark in self.marks)
        return draw_marks(self.marks, title=self.title, axis=self.axis, alt=said, caption=caption, baseline=0)

    def __rich__(self) -> Text:
        from rich.text import Text

        text = Text(f"{self.title} ({self.axis})\n", "bold")
        width = max(len(mark.label) for mark in self.marks)
        longest = max(abs(mark.value) for mark in self.marks) or 1
        for mark in self.marks:
            bar = "█" * max(1, round(_BAR * abs(mark.value) / longest))
            text.append(f"  {mark.label:<{width}}  ", "")
            text.append(f"{bar} ", "green" if (mark.value > 0) != self.lower_is_better else "red")
            text.append(f"{mark.shown}\n", "")
        return text.append(self.caption, "dim") if self.caption else text


@dataclass(frozen=True, slots=True)
class Lead:
    """The first figure of a report: the smallest and the largest of these changes. The first sentence has the same."""

    changes: Sequence[float]
    unit: str
    says: str

    @property
    def figure(self) -> str:
        return spread_words(self.changes)


@dataclass(slots=True)
class Headline:
    """The most important sentence comes first; it says in words what `lead` says."""

    words: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    lead: Lead | None = None


def main_policy(policies: Sequence[str], baseline: str) -> str | None:
    """The default policy, or else the last one that is ours."""
    ours = [policy for policy in ("earned", "free", "prefix", "events", "greedy") if policy in policies]
    others = [policy for policy in policies if policy not in (baseline, "none", "oracle")]
    return next((policy for policy in [*ours, *reversed(others)] if policy != baseline), None)


def _saving_words(
    policy: str, baseline: str, cached: PairedDifference, times: PairedDifference | None, where: str
) -> str:
    words = (
        f"{where}: {policy_words(policy)} finds {format_number(cached.value)}{THIN}% of the prompt tokens in the "
        f"cache, {policy_words(baseline)} {format_number(cached.baseline)}{THIN}%: {_changed(cached, ' points')}"
    )
    if times is not None:
        words += f". The median time to the first token changes by {_changed(times, '')}"
    return f"{words}."


def _changed(found: PairedDifference, unit: str) -> str:
    if not found.known:
        shown = f"{signed(100 * found.difference)}{THIN}%" if found.relative else signed(found.difference)
        return f"{shown}{unit} (not decided: too few requests)"
    return f"{change_words(found)}{unit}" + (
        " (not decided: the interval covers zero)" if found.verdict == "no difference" else ""
    )


_FEW_CELLS, _FEW_SUITES = 24, 3
_VERDICTS = ("better", "no difference", "not decided", "worse", "too few requests")


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of one policy against another's, both in words, in the cells of a suite, each by its label; `drawn_as`
    is the policy whose colour and marker it has."""

    metric: Metric
    policy: str
    baseline: str
    cells: Sequence[tuple[str, PairedDifference]]
    drawn_as: str = "earned"

    @property
    def differences(self) -> list[PairedDifference]:
        return [found for _, found in self.cells]

    @property
    def changes(self) -> list[float]:
        """As the report writes them: in percentage points, or in per cent of the baseline."""
        return [(100 if self.metric.relative else 1) * found.difference for found in self.differences]

    @property
    def unit(self) -> str:
        return f"{THIN}%" if self.metric.relative else f" {self.metric.change_unit}"


def compare_groups(groups: Sequence[RecordGroup[Any]], baseline: str) -> list[Compared]:
    """Cached tokens and, where there is a clock, times, of the policy that matters most."""
    policy = main_policy(list(dict.fromkeys(policy for group in groups for policy in group.policies)), baseline)
    if policy is None:
        return []
    made = []
    for metric in (CACHED, TTFT_P50):
        cells = [
            (group.label, found) for group in groups if (found := group.compare(policy, baseline, metric)) is not None
        ]
        made += [Compared(metric, policy_words(policy), policy_words(baseline), cells, policy)] if cells else []
    return made


def headline_of(suites: Sequence[tuple[str, Sequence[Compared]]]) -> Headline:
    """By the titles of suites, each with its most important figure first."""
    headline = Headline()
    metrics = dict.fromkeys(compared[0].metric for _, compared in suites if compared)
    for metric in metrics:
        chosen = [(title, compared) for title, compared in suites if compared and compared[0].metric == metric]
        if len(chosen) > 1:
            headline.words.append(_over_all([compared[0] for _, compared in chosen]))
        if len(chosen) <= _FEW_SUITES:
            headline.words.extend(_words(title, compared) for title, compared in chosen)
        headline.lead = headline.lead or _lead([compared[0] for _, compared in chosen])
        headline.charts.append(_chart(metric, [(title, compared[0]) for title, compared in chosen]))
    return headline


def _lead(compared: Sequence[Compared]) -> Lead:
    first, changes = compared[0], [change for each in compared for change in each.changes]
    _, against = _sides(compared)
    says = f"{capital(first.metric.words or first.metric.name)}, against {against}"
    if len(changes) > 1:
        says += (
            f": the smallest and the largest change of {len(changes)} cells. A cell is one setting of what was varied, "
            "such as a trace, a cache size or a load"
        )
    return Lead(changes, "per cent" if first.metric.relative else "percentage points", f"{says}.")


def _over_all(compared: Sequence[Compared]) -> str:
    """The sentence of `_lead`."""
    (policy, against), lead = _sides(compared), _lead(compared)
    first, verdicts = compared[0], [found.verdict for each in compared for found in each.differences]
    name = first.metric.words or first.metric.name
    return (
        f"{capital(policy)} changes the {name} by {lead.figure}{first.unit} against {against}; of {len(verdicts)} "
        f"cells in {len(compared)} suites {_decided(verdicts)}."
    )


def _sides(compared: Sequence[Compared]) -> tuple[str, str]:
    """Policy and baseline in words, if all have the same."""
    policies, baselines = {each.policy for each in compared}, {each.baseline for each in compared}
    return (
        policies.pop() if len(policies) == 1 else "ordering",
        baselines.pop() if len(baselines) == 1 else "the baseline of each suite",
    )


def _words(title: str, compared: Sequence[Compared]) -> str:
    main, times = compared[0], next((each for each in compared[1:] if each.metric == TTFT_P50), None)
    if main.metric == CACHED and len(main.cells) == 1:
        timed = times.differences[0] if times else None
        return _saving_words(main.policy, main.baseline, main.differences[0], timed, title)
    name = f"the {main.metric.words or main.metric.name}"
    if len(main.cells) == 1:
        (found,) = main.differences
        decided = "" if found.known and found.verdict != "no difference" else " (not decided)"
        unit = "" if main.metric.relative else main.unit
        return f"{title}: {main.policy} changes {name} by {change_words(found)}{unit}{decided} against {main.baseline}."
    return (
        f"{title}: {main.policy} changes {name} by {_lead([main]).figure}{main.unit} against {main.baseline}; of "
        f"{len(main.cells)} cells {_decided([found.verdict for found in main.differences])}."
    )


def _decided(verdicts: Sequence[str]) -> str:
    return _counted([each if each != "no difference" else "not decided" for each in verdicts])


def _chart(metric: Metric, suites: Sequence[tuple[str, Compared]]) -> Chart:
    marks: list[Mark] = []
    for title, compared in suites:
        if len(compared.cells) == 1 or (len(suites) == 1 and len(compared.cells) <= _FEW_CELLS):
            named = [(label if len(compared.cells) > 1 else title, found) for label, found in compared.cells]
            marks += [Mark.of(label or title, compared.drawn_as, found) for label, found in named]
        else:
            changes = compared.changes
            marks.append(Mark(title, median(changes), min(changes), max(changes), policy=compared.drawn_as))
    caption = "95 % intervals; of a suite with several cells the median change, from the smallest to the largest."
    axis = "per cent" if metric.relative else "percentage points"
    title = f"{metric.name[0].upper()}{metric.name[1:]}, against the baseline"
    return Chart(title, axis, marks, caption, lower_is_better=metric.better == "lower")


def overview_of(suites: Sequence[tuple[Entry, Sequence[Compared]]]) -> Table | None:
    """A row for each figure; None without any."""
    table = Table("At a glance", ["suite", "compared", "figure", "change", "verdicts"])
    for suite, compared in suites:
        for each in compared:
            verdicts = [found.verdict if found.known else "too few requests" for found in each.differences]
            row = [suite, Entry(f"{each.policy} against {each.baseline}"), Entry(each.metric.name)]
            table.rows.append([*row, Entry(f"{spread_words(each.changes)}{each.unit}"), Entry(_counted(verdicts))])
    table.note = "Over all cells of a suite, from the smallest change to the largest."
    return table if table.rows else None


def _counted(verdicts: Sequence[str]) -> str:
    return ", ".join(f"{count} {each}" for each in _VERDICTS if (count := verdicts.count(each)))


_PLAIN = "retrieval"
_PREFERRED = ("earned", "free", "prefix", "greedy")
_SHOWN = ("retrieval", "sorted", "recency", "greedy", "contextpilot", "prefix", "earned", "free", "oracle")


def finding(groups: Sequence[Group]) -> tuple[list[str], Table | None]:
    """Paragraphs, and both variants of the trace side by side."""
    pair = _pair(groups)
    if pair is None:
        have = [name for name in ("paper", "paper-shuf") if _of(groups, name)]
        missing = (
            "neither was measured",
            f"only {have[0] if have else ''} was measured",
            "they were not measured alike",
        )
        return [
            "In the paper's trace the documents that two queries share stand in the same places, so that retrieval "
            "order hits without any ordering. It must be read beside paper-shuf, the same trace with its ranks "
            f"shuffled; here {missing[len(have)]}. Run 'ragorder eval run table-1'."
        ], None
    kept, shuffled = pair
    shared = kept.policies.keys() & shuffled.policies.keys() - {_PLAIN, "none"}
    policy = next(policy for policy in (*_PREFERRED, *kept.policies) if policy in shared)
    plain = [format_number(group.value(_PLAIN, CACHED)) for group in pair]
    words = [
        "In the paper's trace the documents that a query shares with the one before it stay in place: its first three "
        "are again the first three. So the prompts already begin alike, and retrieval order, without any ordering, "
        f"finds {plain[0]}{THIN}% of the prompt tokens in the cache. {_gain(kept, policy)} On paper-shuf, the same "
        "trace where any of the documents may be the shared ones and the ranks are shuffled, retrieval order finds "
        f"{plain[1]}{THIN}%. {_gain(shuffled, policy)}",
        "A figure on paper says what ordering adds to prompts that are in order already; one on paper-shuf what it "
        "adds where the order is lost. Neither is your traffic: 'ragorder replay LOG' tells about that.",
    ]
    return words, _side_by_side(pair)


def _gain(group: Group, policy: str) -> str:
    cached = group.compare(policy, _PLAIN, CACHED)
    if cached is None:
        return ""
    words = f"{policy_words(policy)} changes that by {change_words(cached)} points"
    words += " (no difference)" if cached.verdict == "no difference" else ""
    times = group.compare(policy, _PLAIN, TTFT_P50)
    if times is not None:
        words += f", and the median TTFT by {change_words(times)}"
        words += " (no difference)" if times.verdict == "no difference" else ""
    return f"{words}."


def _side_by_side(pair: tuple[Group, Group]) -> Table:
    headings = ["policy", *(f"{name}: {CACHED.heading}" for name in ("paper", "paper-shuf"))]
    timed = [group.has("ttft_ms") for group in pair]
    headings += [f"{name}: TTFT p50, ms" for name, known in zip(("paper", "paper-shuf"), timed, strict=True) if known]
    table = Table("The paper's trace and its shuffled clone", headings)
    shared = [p for p in pair[0].policies if p in pair[1].policies and p != "none"]
    for policy in sorted(shared, key=lambda p: _SHOWN.index(p) if p in _SHOWN else len(_SHOWN)):
        row = [Entry(policy_words(policy))]
        for metric in (CACHED, TTFT_P50):
            for group in pair:
                if metric is CACHED or group.has(metric.column):
                    found = group.compare(policy, _PLAIN, metric)
                    note = change_words(found) if found else "baseline" if policy == _PLAIN else ""
                    verdict = (found.verdict if found.known else "too few requests") if found else ""
                    row.append(Entry(format_number(group.value(policy, metric)), note, verdict))
        table.rows.append(row)
    return table


def _pair(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    pairs = [
        (kept, shuffled)
        for kept in _of(groups, "paper")
        for shuffled in _of(groups, "paper-shuf")
        if _rest(kept) == _rest(shuffled) and len(kept.policies.keys() & shuffled.policies.keys() - {"none"}) >= 2
    ]
    return max(pairs, key=lambda pair: len(pair[0].policies.keys() & pair[1].policies.keys()), default=None)


def _of(groups: Sequence[Group], workload: str) -> list[Group]:
    return [group for group in groups if group.cell.get("workload") == workload and _PLAIN in group.policies]


def _rest(group: Group) -> object:
    cell = {name: value for name, value in group.cell.items() if name != "workload"}
    return key_of(cell), group.engine.get("name"), group.engine.get("model")


@dataclass(frozen=True, slots=True)
class Mark:
    """A value with its interval (infinite: unknown), and that of each seed."""

    label: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    seeds: Sequence[float] = ()
    policy: str = "earned"

    @classmethod
    def of(cls, label: str, policy: str, found: PairedDifference) -> Mark:
        """A difference in percentage points, or in per cent of the baseline."""
        scale = 100 if found.relative else 1
        low, high = (scale * end for end in (found.low, found.high))
        return cls(label, scale * found.difference, low, high, [scale * each for each in found.by_seed], policy)

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def shown(self) -> str:
        interval = f" [{signed(self.low)}, {signed(self.high)}]" if self.known else ""
        return f"{signed(self.value)}{interval}"


def draw_marks(
    marks: Sequence[Mark],
    *,
    title: str,
    axis: str,
    alt: str,
    caption: str,
    baseline: float | None = None,
    row_height: float = 0.42,
) -> Picture:
    """A picture of the intervals, the first on top, with a line at the baseline; without one the axis begins at 0."""

    def paint(axes: Any) -> None:
        if baseline is not None:
            axes.axvline(baseline, color=LINE, linewidth=1.2)
        for place, mark in enumerate(reversed(marks)):
            looks = style(mark.policy)
            if mark.known:
                axes.plot([mark.low, mark.high], [place, place], color=looks.colour, linewidth=5, alpha=0.35)
            axes.plot(mark.seeds, [place] * len(mark.seeds), "|", color=looks.colour, markersize=9)
            axes.plot(mark.value, place, looks.marker, color=looks.colour, markersize=7)
        axes.set_yticks(range(len(marks)), [mark.label for mark in reversed(marks)])
        axes.set_ylim(-0.6, len(marks) - 0.4)
        if baseline is None:
            axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis)

    return draw(paint, title=title, alt=alt, caption=caption, height=1.1 + row_height * len(marks))
