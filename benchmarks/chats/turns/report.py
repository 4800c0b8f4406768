"""Tables of turns: cached tokens by turn, and those predicted beside those reported."""

from __future__ import annotations

import numpy as np

from ragorder.benchmarks.chats.turns.experiment import TurnRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_NOTE = "Cached share of the prompt tokens (tokens computed for a turn), in the order of a conversation's turns."
_PREDICTED = "Turns whose cached tokens were predicted to within a block of those that the server reported."


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(TurnRecord, suite.name))
    by_turn = Table("By turn", ["", *suite.policies], note=_NOTE)
    headings = ["", "within a block, %", "documents named", "turns that compute more than appended", "laid out again"]
    predicted = Table("Predicted", headings, note=_PREDICTED)
    for group in groups:
        label = group.label or suite.title
        turns = sorted({int(turn) for policy in group.policies for turn in group.values(policy, "turn")})
        for turn in turns:
            row = [_share(group, policy, turn) for policy in suite.policies]
            by_turn.rows.append([Entry(f"{label}, turn {turn + 1}"), *row])
        for policy in ("turns", "rebased"):
            if policy in group.policies:
                predicted.rows.append(_predicted(group, policy, label))
    return Part([table for table in (by_turn, predicted) if table.rows])


def _share(group: RecordGroup[TurnRecord], policy: str, turn: int) -> Entry:
    if policy not in group.policies:
        return Entry("–")
    at = group.values(policy, "turn") == turn
    prompt, cached = (group.values(policy, name)[at] for name in ("prompt_tokens", "cached_tokens"))
    if not prompt.sum():
        return Entry("–")
    share = format_number(100 * cached.sum() / prompt.sum())
    return Entry(f"{share} ({format_number((prompt - cached).mean(), 0)})")


def _predicted(group: RecordGroup[TurnRecord], policy: str, label: str) -> list[Entry]:
    reported, guessed = (group.values(policy, name) for name in ("cached_tokens", "predicted_tokens"))
    within = 100 * float(np.mean(np.abs(reported - guessed) <= group.block_size))
    anew = format_number(group.values(policy, "rebased").sum(), 0) if policy == "rebased" else "–"
    named = format_number(group.values(policy, "repeated").sum(), 0)
    shown = [format_number(within), named, _more(group, policy), anew]
    return [Entry(f"{label}: {policy}"), *map(Entry, shown)]


def _more(group: RecordGroup[TurnRecord], policy: str) -> str:
    """Of how many turns, those that compute a block or more on top of what appending computes."""
    if "append" not in group.policies:
        return "–"
    ours, theirs = (
        group.values(each, "prompt_tokens") - group.values(each, "cached_tokens") for each in (policy, "append")
    )
    if len(ours) != len(theirs):
        return "–"
    return f"{int(np.sum(ours >= theirs + group.block_size)):,} of {len(ours):,}"
