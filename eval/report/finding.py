"""Findings on the paper's own trace, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.eval.report.groups import Group
from ragorder.eval.report.metrics import CACHED, TTFT_P50
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, change_words, format_number, policy_words
from ragorder.eval.running.record import key_of

__all__ = ["finding"]

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
