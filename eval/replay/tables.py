"""Tables of a replay, and their section in a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape

from ragorder.eval.replay.report import CapacityInfo, ReplayReport, Verdict
from ragorder.eval.replay.runs import RETRIEVAL
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.headline import Chart, Headline, Lead
from ragorder.eval.report.marks import Mark
from ragorder.eval.report.sections import Section
from ragorder.eval.report.statistics import compare_seeds
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import policy_words
from ragorder.eval.running.cells import complaint
from ragorder.eval.running.reading import ResultsError
from ragorder.eval.running.suite import Suite

__all__ = ["is_replay", "print_report", "replay_section"]

_STYLES = {"helps": "bold green", "helps a little": "green", "not worth it": "yellow", "costs": "bold red"}
_TONES: Mapping[Verdict, Tone] = {"helps": "good", "helps a little": "good", "not worth it": "doubtful", "costs": "bad"}
_INTERVAL = "95 % intervals over the tenths of the log."


def is_replay(value: Any) -> bool:
    return isinstance(value, dict) and {"log", "runs", "capacities", "overlap"} <= value.keys()


def replay_section(path: Path, value: Mapping[str, Any]) -> Section:
    """A section on the JSON of `ragorder replay --json`. Raises ResultsError naming the file and the field."""
    try:
        engine, speed = value["engine"], value.get("speed") or {}
        report = TypeAdapter(ReplayReport).validate_python(
            {name: value[name] for name in ("log", "overlap", "capacities", "left_out")}
            | {name: engine[name] for name in ("block_size", "timed", "prefill_tokens_per_s")}
            | {"figures": value["runs"]}
            | {name: speed[name] for name in ("processes", "seconds") if name in speed}
        )
    except (KeyError, TypeError, ValidationError) as error:
        said = complaint(error) if isinstance(error, ValidationError) else f"{error} is missing"
        raise ResultsError(f"{path}: {said}: give the JSON of 'ragorder replay --json'") from None
    suite = Suite.unlisted(f"replay-{path.stem}", f"Replay of {report.log.name}", says=_served(report))
    section = Section(suite, "", [], "", "", headline=_headline(report), environment=value.get("environment") or {})
    section.tables = [_cached(report), *([_moves(report), _savings(report)] if report.savings else [])]
    section.words = report.notes
    section.drawings.append(lambda: [_by_capacity(report)])
    return section


def _headline(report: ReplayReport) -> Headline:
    policy, marks = report.compared_policy, []
    for capacity in report.capacities if policy is not None else ():
        sides = [report.at(each, capacity).tenths for each in (RETRIEVAL, str(policy))]
        found = compare_seeds(*([100 * ratio for ratio in side] for side in sides))
        plain, ordered = (100 * report.at(each, capacity).cached_ratio for each in (RETRIEVAL, str(policy)))
        marks.append(Mark(f"cache {capacity.name}", ordered - plain, found.low, found.high, (), str(policy)))
    words = [f"{report.log.name}: {report.answer}"]
    if not marks:
        return Headline(words)
    focus = marks[list(report.capacities).index(report.focus)]
    decided = "" if focus.known and not focus.low <= 0 <= focus.high else " (not decided: the interval covers zero)"
    changed = f"changes the cached share of prompt tokens by {focus.shown} points"
    words.append(f"With {focus.label} {policy_words(str(policy))} {changed}{decided}.")
    title = f"Cached tokens of {policy_words(str(policy))}, against retrieval order"
    lead = Lead([focus.value], "percentage points", f"{title}, {focus.label}.")
    return Headline(words, [Chart(title, "percentage points", marks, _INTERVAL)], lead)


def _by_capacity(report: ReplayReport) -> Picture:
    lines = {
        policy: [100 * report.at(policy, capacity).cached_ratio for capacity in report.capacities]
        for policy in report.policies
    }

    names = [capacity.name.replace("unlimited", "no\nlimit") for capacity in report.capacities]

    def paint(axes: Any) -> None:
        ends = []
        for policy, line in lines.items():
            looks = style(policy)
            axes.plot(range(len(line)), line, looks.dashes, color=looks.colour, marker=looks.marker, markersize=4.5)
            ends.append((len(line) - 1.0, line[-1], policy_words(policy), looks))
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.set_xticks(range(len(names)), names)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("cache")
        axes.set_ylabel("cached, % of prompt tokens")
        label_ends(axes, ends)

    said = "; ".join(f"{policy}: {', '.join(f'{ratio:.1f}' for ratio in line)}" for policy, line in lines.items())
    return draw(paint, title="Cached tokens by cache", alt=said)


def print_report(report: ReplayReport, *, stderr: bool = False) -> None:
    """What was cached, what that saves, why, and the answer."""
    console = Console(stderr=stderr, highlight=False)
    console.print(f"[bold]{escape(report.log.name)}[/]: {_served(report)}.\n")
    console.print(_cached(report))
    if report.savings:
        console.print("", _moves(report), "", _savings(report), sep="\n")
    for saving in report.savings:
        if saving.verdict != "helps":
            console.print(f"{saving.says[0].upper()}{saving.says[1:]}.", style=_STYLES[saving.verdict])
    for line in _why(report):
        console.print(line)
    for note in report.notes:
        console.print(f"Note: {note}.", style="yellow")
    console.print(f"\n[bold]Would it help?[/] {report.answer}")
    console.print(f"Replayed at {report.requests_per_s:,.0f} requests/s.", style="dim")


def _served(report: ReplayReport) -> str:
    log = report.log
    served = "one request at a time"
    if report.timed:
        in_flight = max(figures.in_flight_mean for figures in report.figures)
        served = f"requests at their recorded times, up to {in_flight:,.1f} in flight on average"
    tenants = f", {log.tenants:,} tenants" if log.tenants > 1 else ""
    documents = f"{log.documents:,} documents of {log.working_set_tokens:,} tokens together (100 %)"
    return f"{log.requests:,} requests{tenants}, {documents}; {served}; blocks of {report.block_size}"


def _cached(report: ReplayReport) -> Table:
    headings = ["policy", *(_heading(report, capacity) for capacity in report.capacities)]
    table = Table("Cached tokens, % of prompt tokens, by policy and by cache", headings)
    best = [max(report.at(policy, each).cached_tokens for policy in report.policies) for each in report.capacities]
    for policy in report.policies:
        figures = [report.at(policy, capacity) for capacity in report.capacities]
        entries = [
            Entry(f"{100 * each.cached_ratio:.1f}", tone="good" if each.cached_tokens == most else "")
            for each, most in zip(figures, best, strict=True)
        ]
        table.add(policy_words(policy), *entries)
    return table


def _moves(report: ReplayReport) -> Table:
    capacity, requests = report.focus, report.log.requests
    headings = ["policy", "reordered", "nothing\ncached", "best not\nfirst", "places\nmoved"]
    table = Table(
        f"What moves at {capacity.name}: % of the prompts, and tokens saved for each reordered one",
        [*headings, "saved\neach"],
    )
    plain = report.at(RETRIEVAL, capacity).cached_tokens
    for policy in report.policies:
        figures = report.at(policy, capacity)
        counts = figures.reordered, figures.reordered_cold, figures.best_moved
        each = f"{(figures.cached_tokens - plain) / figures.reordered:,.0f}" if figures.reordered else "–"
        shares = [f"{100 * count / requests:.1f}" for count in counts]
        table.add(policy_words(policy), *shares, f"{figures.displacement_mean:.2f}", each)
    return table


def _heading(report: ReplayReport, capacity: CapacityInfo) -> str:
    if capacity.tokens is None:
        return "no\nlimit"
    share = 100 * capacity.tokens / max(1, report.log.working_set_tokens)
    return f"{share:.3g} %\n{capacity.tokens:,}"


def _savings(report: ReplayReport) -> Table:
    timed = report.prefill_tokens_per_s is not None
    headings = ["cache", "of the\nlog", "share", "per 1,000\nrequests", *["seconds\nper 1,000"] * timed, "verdict"]
    title = f"Prefill tokens that {policy_words(str(report.compared_policy))} saves: prompt tokens that are not cached"
    table = Table(title, headings)
    for saving in report.savings:
        fields = [f"{saving.saved_tokens:,}", f"{100 * saving.share_of_prefill:.1f} %"]
        fields += [f"{saving.tokens_per_1000_requests:,.0f}"]
        fields += [f"{saving.seconds_per_1000_requests:,.2f}"] if timed else []
        verdict = Entry(saving.verdict, tone=_TONES[saving.verdict])
        table.add(saving.capacity.removesuffix(" tokens"), *fields, verdict)
    return table


def _why(report: ReplayReport) -> list[str]:
    overlap = report.overlap
    about, estimated = "", ""
    if not overlap.exact:
        about, estimated = "about ", f" (estimated from {overlap.compared_requests:,} requests)"
    return [
        f"\n{100 * overlap.sharing_two_ratio:.1f} % of the requests share two documents or more with an earlier one; "
        f"the two sets are alike by {overlap.jaccard_mean:.2f} (mean Jaccard index){estimated}.",
        f"Of all prompt tokens {100 * overlap.first_seen_ratio:.1f} % are seen for the first time and "
        f"{100 * overlap.suffix_ratio:.1f} % are questions, so that no order can reuse more than "
        f"[bold]{100 * overlap.bound_ratio:.1f} %[/].",
        f"A cached prefix comes from one earlier prompt; with the nearest one they have "
        f"[bold]{about}{100 * overlap.one_prompt_ratio:.1f} %[/] in common: an order that foresaw all requests would "
        f"still not reuse more.",
    ]
