"""The record of a replay, its tables, and its part of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import TypeAdapter, model_validator

from ragorder.common.extras import install_hint
from ragorder.eval.replay.report import CapacityInfo, ReplayReport, Verdict
from ragorder.eval.replay.runs import RETRIEVAL
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Compared
from ragorder.eval.report.lines import draw_lines, from_zero
from ragorder.eval.report.metrics import CACHED
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference, compare_seeds
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import policy_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Kind, Suite

_TONES: Mapping[Verdict, Tone] = {"helps": "good", "helps a little": "good", "not worth it": "doubtful", "costs": "bad"}


class ReplayRecord(Record):
    """One log under all policies and at all capacities; `facts` are those of `ReplayReport.as_json`."""

    called: ClassVar[str] = "a replay"
    identified_by: ClassVar[tuple[str, ...]] = ("suite", "session")
    is_run: ClassVar[bool] = False

    type: Literal["replay"] = "replay"
    policy: str = ""
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _readable(self) -> Self:
        self.report  # noqa: B018
        return self

    @cached_property
    def report(self) -> ReplayReport:
        facts, engine, speed = self.facts, self.engine, self.facts.get("speed") or {}
        fields = {name: facts[name] for name in ("log", "overlap", "capacities", "left_out")}
        fields |= {name: engine[name] for name in ("block_size", "timed", "prefill_tokens_per_s")}
        fields |= {name: speed[name] for name in ("processes", "seconds") if name in speed}
        return TypeAdapter(ReplayReport).validate_python(fields | {"figures": facts["runs"]})


def replay_line(report: ReplayReport, session: str) -> Mapping[str, Any]:
    """Return the line of results.jsonl on this replay."""
    facts = report.as_json()
    suite = "replay-" + (re.sub(r"[^a-z0-9]+", "-", report.log.name.lower()).strip("-") or "log")
    line = {"type": "replay", "session": session, "suite": suite, "cell": {}, "seed": 0, "rows": {}}
    return line | {"engine": facts.pop("engine"), "facts": facts}


class Replay(Kind):
    kind = "replay"
    record = ReplayRecord


def make_part(suite: Suite, results: Results) -> Part:
    """Return what each replay cached and saves, why, and the answer."""
    reports = [line.report for line in results.of(ReplayRecord, suite.name)]
    part = Part(
        [table for report in reports for table in _tables(report)],
        [words for report in reports for words in _words(report)],
        [f"{report.log.name}: would it help? {report.answer}" for report in reports],
        setting="; ".join(_served(report) for report in reports),
        pictures=lambda: [_by_capacity(report) for report in reports],
        title=f"Replay of {reports[0].log.name}" if reports else "",
    )
    try:
        part.compared = [_compared(report) for report in reports if report.compared_policy is not None]
    except ImportError:
        part.words = [*part.words, f"Intervals need scipy: {install_hint('eval')}."]
    return part


def _tables(report: ReplayReport) -> list[Table]:
    return [_cached(report), *([_moves(report), _savings(report)] if report.savings else [])]


def _words(report: ReplayReport) -> list[str]:
    doubtful = [saving.says for saving in report.savings if saving.verdict != "helps"]
    said = [f"{says[0].upper()}{says[1:]}." for says in doubtful]
    return [*said, *_why(report), *(f"Note: {note}." for note in report.notes)]


def _compared(report: ReplayReport) -> Compared:
    policy = str(report.compared_policy)
    cells = [(f"cache {capacity.name}", _gain(report, policy, capacity)) for capacity in report.capacities]
    return Compared(CACHED, policy_words(policy), policy_words(RETRIEVAL), cells, policy)


def _gain(report: ReplayReport, policy: str, capacity: CapacityInfo) -> PairedDifference:
    plain, ordered = report.at(RETRIEVAL, capacity), report.at(policy, capacity)
    found = compare_seeds(*([100 * ratio for ratio in each.tenths] for each in (plain, ordered)))
    baseline, value = 100 * plain.cached_ratio, 100 * ordered.cached_ratio
    return replace(found, baseline=baseline, value=value, difference=value - baseline)


def _by_capacity(report: ReplayReport) -> Picture:
    lines = {
        policy: [100 * report.at(policy, capacity).cached_ratio for capacity in report.capacities]
        for policy in report.policies
    }

    names = [capacity.name.replace("unlimited", "no\nlimit") for capacity in report.capacities]

    said = "; ".join(f"{policy}: {', '.join(f'{ratio:.1f}' for ratio in line)}" for policy, line in lines.items())
    points = {policy: list(enumerate(line)) for policy, line in lines.items()}
    shown: dict[str, Any] = {"alt": said, "looks": {}, "ticks": names, "adjust": from_zero}
    return draw_lines("Cached tokens by cache", points, "cache", "cached, % of prompt tokens", **shown)


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
        f"{100 * overlap.sharing_two_ratio:.1f} % of the requests share two documents or more with an earlier one; "
        f"the two sets are alike by {overlap.jaccard_mean:.2f} (mean Jaccard index){estimated}.",
        f"Of all prompt tokens {100 * overlap.first_seen_ratio:.1f} % are seen for the first time and "
        f"{100 * overlap.suffix_ratio:.1f} % are questions, so that no order can reuse more than "
        f"{100 * overlap.bound_ratio:.1f} %.",
        "A cached prefix comes from one earlier prompt; with the nearest one they have "
        f"{about}{100 * overlap.one_prompt_ratio:.1f} % in common: an order that foresaw all requests would still not "
        "reuse more.",
    ]
