"""The table of what preprocessing removes of the second layer's KV deviation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragorder.benchmarks.fusion.fusion.arms import ARMS, BASELINE, REUSE
from ragorder.benchmarks.fusion.fusion.results import Group, curve, removed_at_the_end, removed_deviation
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number

__all__ = ["compares_copies", "copies_table"]

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
                # The same whatever the number of neighbours.
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
