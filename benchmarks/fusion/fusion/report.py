"""Tables and pictures of answers from reused KV, and of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from ragorder.benchmarks.fusion.fusion.cells import RATIOS
from ragorder.benchmarks.fusion.fusion.experiment import ARMS, BASELINE, REUSE, FusionRecord, FusionTraining
from ragorder.eval.report.canvas import Picture, draw, label_ends, style, titled
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines, draw_table
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference, StatisticsError, compare
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import change_words, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Suite

ENOUGH = 0.95
"""Of the way from full reuse to full attention."""

_DEVIATION = "deviation"
_LEAST_GAP = 0.1
Group = RecordGroup[FusionRecord]


@dataclass(frozen=True, slots=True)
class Curve:
    """Exact match (0 to 1) of an arm at each ratio; `exact`: the share of the documents in an exact prefix."""

    ratios: Sequence[float]
    right: Sequence[float]
    exact: float
    _group: Group
    _arm: str

    def at(self, ratio: float) -> float | None:
        return dict(zip(self.ratios, self.right, strict=True)).get(ratio)

    def computed(self, ratio: float) -> float:
        """The share of the documents' tokens that a request computes, if its exact prefix was there."""
        return ratio * (1 - self.exact)

    def normalised(self, ratio: float) -> float | None:
        """Return Equation 11 of FusionRAG (0: full reuse, 1: full attention), or None where both answer alike."""
        full, reuse, ours = curve(self._group, BASELINE), curve(self._group, REUSE), self.at(ratio)
        if full is None or reuse is None or ours is None:
            return None
        if full.right[0] - reuse.right[0] < _LEAST_GAP:
            return None
        return (ours - reuse.right[0]) / (full.right[0] - reuse.right[0])

    def enough(self) -> float | None:
        """The least ratio from which on answers are nearly those of full attention."""
        found = None
        for ratio in sorted(self.ratios, reverse=True):
            share = self.normalised(ratio)
            if share is None or share < ENOUGH:
                break
            found = ratio
        return found

    def against(self, other: str, ratio: float) -> PairedDifference | None:
        """Paired question by question with another arm at the same ratio, or at the only one that it has."""
        pairs = [
            (theirs[seed], ours[seed])
            for theirs, ours in [(self._group.policies.get(other, {}), self._group.policies[self._arm])]
            for seed in sorted(theirs.keys() & ours.keys())
        ]
        columns = [(_answers(base, ratio), _answers(mine, ratio)) for base, mine in pairs]
        try:
            return compare([base for base, _ in columns], [mine for _, mine in columns]) if columns else None
        except StatisticsError:
            return None


def curve(group: Group, arm: str) -> Curve | None:
    """None if the arm was not measured."""
    lines = group.runs(arm)
    if not lines:
        return None
    ratios = lines[0].ratios
    right = [fmean(value for line in lines for value in _answers(line, ratio)) for ratio in ratios]
    return Curve(ratios, right, float(lines[0].facts["exact"]), group, arm)


def removed_deviation(group: Group, plain: str, changed: str) -> float | None:
    """The share of the second layer's KV deviation in full reuse that other copies do not have."""
    columns = [
        [line.rows[_DEVIATION] for line in group.runs(arm) if _DEVIATION in line.rows] for arm in (plain, changed)
    ]
    if not all(columns):
        return None
    before, after = (sum(map(sum, each)) for each in columns)
    return 1 - after / before if before else None


def removed_at_the_end(group: Group, plain: str, changed: str, share: float = 0.25) -> float | None:
    """The same of the last `share` of the prompts' tokens."""
    columns = [
        [line.facts[_DEVIATION] for line in group.runs(arm) if _DEVIATION in line.facts] for arm in (plain, changed)
    ]
    if not all(columns):
        return None
    before, after = (sum(sum(each[round((1 - share) * len(each)) :]) for each in arm) for arm in columns)
    return 1 - after / before if before else None


def _answers(line: FusionRecord, ratio: float) -> list[float]:
    ratios = line.ratios
    return line.rows[f"{ratio if len(ratios) > 1 else ratios[0]:g}"]


_UNKNOWABLE = ("retrieved", "in front")


def compares_copies(group: Group) -> bool:
    """Whether there are copies beside those that preprocessing can make."""
    return any(ARMS[arm].copies in _UNKNOWABLE for arm in group.policies)


def copies_table(groups: Sequence[Group]) -> Table:
    headings = [
        "copies",
        "documents refer",
        "neighbours",
        "of these retrieved together, %",
        "removed, %",
        "at the end, %",
        "behind the first document, %",
        "EM",
    ]
    table = Table("KV deviation of the second layer removed, and EM with nothing recomputed", headings, labels=2)
    said: set[tuple[int, str]] = set()
    for group in groups:
        cell = group.runs()[0].setting
        together = fmean(line.facts["retrieved"] for line in group.runs())
        for arm in group.policies:
            removed, found = removed_deviation(group, REUSE, arm), curve(group, arm)
            end = removed_at_the_end(group, REUSE, arm)
            behind = removed_at_the_end(group, REUSE, arm, 1 - 1 / cell.documents)
            by_number = ARMS[arm].copies not in _UNKNOWABLE
            if removed is None or found is None or arm in (BASELINE, REUSE) or (cell.topic, arm) in said:
                continue
            if not by_number:
                # The same for any number of neighbours.
                said.add((cell.topic, arm))
            table.add(
                arm,
                f"within topics of {cell.topic}" if cell.topic else "anywhere",
                str(cell.neighbours) if by_number else "–",
                format_number(100 * together) if by_number else "–",
                format_number(100 * removed),
                format_number(None if end is None else 100 * end),
                format_number(None if behind is None else 100 * behind),
                format_number(found.at(0.0), 2),
            )
    table.note = (
        "Less than with copies computed alone; the paper has 70 %. Squared distance of keys and values from full "
        "attention's, summed over the documents of a prompt; at the end: over its last quarter. The first document "
        "deviates by nothing if its copy was computed alone; its preprocessed copy has seen others. Retrieved "
        "together: of the neighbours of a prompt's documents, those in the prompt (the paper's Figure 7a: more than "
        "80 % at ten)."
    )
    return table


ALONE = "FusionRAG, online only"
"""Times are compared with its."""

_SHARES = (0.05, 0.15, 0.3)
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
    shown = [ratio for ratio in _SHARES if ratio in group.runs(ALONE)[0].ratios]
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


TOY = (
    "What this cannot show: the model is a toy (0.25 million parameters, lines of three tokens), trained for this task "
    "alone. It has no prose, no knowledge of the world, no attention sinks and no long documents. It shows which "
    "mechanism restores what reuse loses, and in which order the ways stand; a real model needs other ratios."
)
_SHOWN = (0.05, 0.15)
_PICTURED = {
    "random": "none",
    "CacheBlend": "greedy",
    "Cache-Craft": "sorted",
    "FusionRAG, online only": "prefix",
    "FusionRAG": "recency",
}
"""Arms of the pictures, and whose looks they have."""

_DEVIATING = {REUSE: "retrieval", "Cache-Craft": "sorted", "FusionRAG": "recency"}


def make_part(suite: Suite, results: Results) -> Part:
    every = group_runs(results.of(FusionRecord, suite.name))
    groups = [group for group in every if not compares_copies(group)]
    copies = [group for group in every if compares_copies(group)]
    trained = group_runs(results.of(FusionTraining.record, suite.name))
    tables = [table for group in groups for table in _tables(group)]
    return Part(
        [*tables, *([copies_table(copies)] if copies else []), *map(_training, trained)],
        words=[TOY] if every else [],
        pictures=lambda: [
            *(draw_table(_curves(group), "share recomputed", "exact match", rows=_PICTURED) for group in groups),
            *(_deviation_picture(group) for group in groups if _deviations(group)),
            *map(_training_picture, trained),
        ],
    )


def _tables(group: Group) -> list[Table]:
    setting = _setting(group)
    by_engine = [make(group, setting) for make in (seconds_table, reference_table)]
    return [_curves(group), _compared(group), *(table for table in by_engine if table is not None)]


def _setting(group: Group) -> str:
    cell = group.runs()[0].setting
    order = {"in front": "definitions in front", "behind": "definitions behind", "any": "documents in any order"}
    engine = ", embedded engine" if cell.by == "engine" else ""
    return f"{cell.hops} hops, {cell.documents} documents, {order[cell.order]}{engine}"


def _computed_by(group: Group) -> str:
    computed_by = "the embedded engine" if group.runs()[0].setting.by == "engine" else "a reference in plain torch"
    return f"Every row was computed by {computed_by}."


def _curves(group: Group) -> Table:
    table = Table(f"EM by share recomputed: {_setting(group)}", ["", *(_percent(ratio) for ratio in RATIOS)])
    for arm in group.policies:
        found = _known(group, arm)
        table.add(arm, *(format_number(found.at(ratio), 3) for ratio in RATIOS))
    first = group.runs()[0]
    facts = first.facts
    removed = removed_deviation(group, REUSE, "FusionRAG")
    note = (
        f"{first.requests:,} questions × seeds {', '.join(map(str, group.seeds))}, a model for each seed. Documents of "
        f"{facts['tokens']} tokens in all; 2 % of them are {format_number(0.02 * facts['tokens'])} tokens, a question "
        f"needs lines of {facts['answer_tokens']}."
    )
    note += f" {_computed_by(group)}"
    if removed is not None:
        note += f" Preprocessing removes {format_number(100 * removed)} % of the second layer's KV deviation."
    table.note = note
    return table


def _compared(group: Group) -> Table:
    headings = [""]
    for ratio in _SHOWN:
        headings += [f"at {_percent(ratio)}, normalised", "less full attention", "less CacheBlend"]
    table = Table(f"Against full attention: {_setting(group)}", [*headings, "enough", "tokens computed"])
    for arm in group.policies:
        found = _known(group, arm)
        if len(found.ratios) < 2:
            continue
        row = [Entry(arm)]
        for ratio in _SHOWN:
            row += [Entry(_normalised(found, ratio)), _change(found, BASELINE, ratio)]
            row.append(_change(found, "CacheBlend", ratio) if arm != "CacheBlend" else Entry("–"))
        enough = found.enough()
        row += [Entry("–" if enough is None else _percent(enough))]
        row += [Entry("–" if enough is None else _percent(found.computed(enough)))]
        table.rows.append(row)
    table.note = (
        "Normalised as in FusionRAG's equation 11: 0 is full reuse, 100 full attention. Differences of EM × 100, "
        "paired by question, with 95 % intervals. Enough: the least share from which on "
        f"{_percent(ENOUGH)} are reached; tokens computed: of all documents', those of an exact prefix are not. "
        f"{_computed_by(group)}"
    )
    return table


def _normalised(found: Curve, ratio: float) -> str:
    share = found.normalised(ratio)
    return "–" if share is None else format_number(100 * share)


def _change(found: Curve, other: str, ratio: float) -> Entry:
    comparison = found.against(other, ratio)
    if comparison is None:
        return Entry("–")
    words = change_words(_hundredfold(comparison))
    change, _, interval = words.partition(" ")
    return Entry(change, interval)


def _hundredfold(comparison: Any) -> Any:
    names = ("baseline", "value", "difference", "low", "high")
    return replace(comparison, **{name: 100 * getattr(comparison, name) for name in names})


def _known(group: Group, arm: str) -> Curve:
    found = curve(group, arm)
    assert found is not None, "of the group's own arms"
    return found


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _deviation_picture(group: Group) -> Picture:
    """Figures 3b and 7b of FusionRAG."""
    means = _deviations(group)

    def paint(axes: Any) -> None:
        ends = []
        for arm, mean in means.items():
            looks = style(_DEVIATING[arm])
            axes.plot(range(1, len(mean) + 1), mean, color=looks.colour, linewidth=1)
            ends.append((len(mean), fmean(mean[-len(mean) // 4 :]), arm, looks))
        axes.set_xlabel("token of the documents")
        axes.set_ylabel("squared KV deviation, second layer")
        label_ends(axes, ends)

    alt = "; ".join(f"{arm}: {format_number(fmean(mean), 2)} on average" for arm, mean in means.items())
    return draw(paint, title=titled("Deviation of reused KV", _setting(group)), alt=alt, caption="From full attention.")


def _deviations(group: Group) -> dict[str, list[float]]:
    """By arm, of each token of the documents; the engine does not measure it."""
    runs = {arm: [run for run in group.runs(arm) if "deviation" in run.facts] for arm in _DEVIATING}
    columns = {arm: [run.facts["deviation"] for run in found] for arm, found in runs.items() if found}
    return {arm: [fmean(each) for each in zip(*found, strict=True)] for arm, found in columns.items()}


def _training(group: RecordGroup[Record]) -> Table:
    kinds = ("one hop", "two hops", "three hops", "link", "link over a relay")
    table = Table(
        "Right predictions at the end of training, %", ["seed", *kinds, "steps", "million tokens", "CPU s", "kB"]
    )
    for line in group.runs():
        last = {name: column[-1] for name, column in line.rows.items()}
        shares = [last[kind] for kind in kinds]
        table.add(
            str(line.seed),
            *(format_number(None if share is None else 100 * share) for share in shares),
            format_number(line.facts["steps"], 0),
            format_number((last["tokens"] or 0) / 1e6),
            format_number(last["seconds"], 0),
            format_number(line.facts["bytes"] / 1e3, 0),
        )
    return table


def _training_picture(group: RecordGroup[Record]) -> Picture:
    kind = "three hops" if group.cell.get("hops") == 3 else "two hops"
    lines = group.runs()

    points = {}
    for line in lines:
        known = zip(line.rows["seconds"], line.rows[kind], strict=True)
        points[f"seed {line.seed}"] = [(at_s, share) for at_s, share in known if None not in (at_s, share)]
    alt = "; ".join(f"seed {line.seed}: {format_number(line.rows['seconds'][-1], 0)} s" for line in lines)
    caption = "More documents and hops as soon as fewer are learnt."
    return draw_lines("Training", points, "processor time, s", f"{kind}, share right", alt=alt, caption=caption)
