"""Tables of costs at clouds."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from ragorder.benchmarks.chats.clouds.record import WINDOW, CloudsCell, CloudsRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_OURS = "ragorder"
_APPENDS = "automatic"
_MOST = 103.0

_CHAT_WORDS: Mapping[str, str] = {
    "automatic": "appended as retrieved, the provider's automatic mark",
    "system prompt": "appended, a mark behind the system prompt (ContextPilot's adapters)",
    "sorted by id, four": "appended sorted by id, four marks",
    _OURS: "ragorder's turns for the cloud",
}

_WORDS: Mapping[str, str] = {
    "automatic": "as retrieved, the provider's automatic mark",
    "system prompt": "any order, a mark behind the system prompt (ContextPilot's adapters)",
    "end": "as retrieved, marks behind system prompt and documents",
    "sorted by id, four": "sorted by id, four marks",
    "engine order, end": "ordered as for an engine, marks behind system prompt and documents",
    "engine order, four": "ordered as for an engine, four marks",
    _OURS: "ragorder for the cloud",
}


def make_part(suite: Suite, results: Results) -> Part:
    return Part([_table(group) for group in group_runs(results.of(CloudsRecord, suite.name))])


def _table(group: RecordGroup[CloudsRecord]) -> Table:
    headings = ["order and marks", "cost, %", f"worst {WINDOW:,} requests, %", "read, %", "written, %", "predicted, %"]
    converses = CloudsCell.model_validate(dict(group.cell)).converses
    words = _CHAT_WORDS if converses else _WORDS
    if converses:
        headings.insert(2, "of what appending costs without a cache, %")
    table = Table(_title(group), headings)
    requests = 0
    for policy in group.policies:
        runs = group.runs(policy)
        requests = max(requests, *(len(run.rows["prompt_tokens"]) for run in runs))
        worst = max(100 * run.worst for run in runs)
        tone: Tone = ("good" if worst <= _MOST else "bad") if policy == _OURS else ""
        exact = [run.exact for run in runs if run.exact is not None]
        cost = Entry(
            format_number(100 * fmean(run.cost for run in runs)),
            note=range_words((100 * run.cost for run in runs), 1),
        )
        table.add(
            words.get(policy, policy),
            cost,
            *([_bill(group, policy)] if converses else []),
            Entry(format_number(worst), tone=tone),
            format_number(100 * fmean(run.share("cached_tokens") for run in runs)),
            format_number(100 * fmean(run.share("written_tokens") for run in runs)),
            format_number(100 * fmean(exact)) if exact else "–",
        )
    table.note = (
        f"Of what the prompts cost without a cache. Mean of {len(group.seeds)} seeds (in brackets their range), "
        f"{requests:,} requests each. Predicted: requests of which the cached tokens were predicted exactly"
        f"{' (to a token a turn)' if converses else ''}."
    )
    return table


def _bill(group: RecordGroup[CloudsRecord], policy: str) -> Entry:
    """Named documents make prompts shorter."""
    pairs = [
        (run, group.policies[_APPENDS][seed])
        for seed, run in group.policies[policy].items()
        if seed in group.policies.get(_APPENDS, {})
    ]
    return Entry(format_number(100 * fmean(run.cost_of(other) for run, other in pairs)) if pairs else "–")


def _title(group: RecordGroup[CloudsRecord]) -> str:
    cell = CloudsCell.model_validate(dict(group.cell))
    ttl = f" ({cell.ttl})" if cell.ttl is not None else ""
    shown = f"{cell.workload}: {cell.model}{ttl}, a request every {cell.gap_s:g} s"
    return f"{shown}, {cell.turns} turns {cell.pause_s:g} s apart" if cell.converses else shown
