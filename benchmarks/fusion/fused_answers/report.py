"""Tables of a real model's answers from reused KV."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragorder.benchmarks.fusion.fused_answers.record import AnswersRecord, column
from ragorder.benchmarks.fusion.fused_answers.ways import FULL, PLAIN, REUSE, WAYS
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, signed
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.quality.compare import bootstrap_difference

__all__ = ["make_part"]

_Group = RecordGroup[AnswersRecord]

_GONE = (
    "Measured, and then deleted, since none of it is nearer to full attention at the same share than what is kept: {}."
)
_KL = "KL divergence of the first token's distribution from full attention's, nats"
_SHOWN = {"kl": _KL, "contains": "Answers that contain an accepted one, %", "em": "EM", "f1": "F1"}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(AnswersRecord, suite.name))
    models = dict.fromkeys(f"{group.engine['model']}, {group.engine['dtype']}" for group in groups)
    gone = dict.fromkeys(way for group in groups for way in group.policies if way not in WAYS)
    return Part(
        [table for group in groups for table in _tables(group)],
        words=[_GONE.format(", ".join(gone))] if gone else [],
        engine=f"the embedded engine's model: {', '.join(models)}" if models else "",
    )


def _tables(group: _Group) -> list[Table]:
    first = group.runs()[0]
    cell = first.setting
    setting = f"{cell.corpus}, {cell.documents} documents"
    shown = {name: f"{title}: {setting}" for name, title in _SHOWN.items() if name == "kl" or cell.output_tokens > 1}
    found = [_figures(group, figure, title) for figure, title in shown.items()]
    runs = [run for run in group.runs() if run.policy != FULL]
    prompt, reused = (fmean(tokens for run in runs for tokens in run.rows[name]) for name in ("prompt", "reused"))
    found[0].note = (
        f"{_questions(group)}. Prompts have {prompt:.0f} tokens, of which "
        f"{reused:.0f} are reused; the others, of the system prompt and the first document, are an exact prefix."
    )
    if "FusionRAG" in group.policies:
        found[0].note += (
            f" FusionRAG's documents were computed after {cell.neighbours} similar ones, those of the other ways after "
            "the system prompt alone."
        )
    if PLAIN not in group.policies:
        return found
    found += [_compared(group, figure, title) for figure, title in list(shown.items())[:2]]
    return found + [_by_coverage(group, way, setting) for way in group.policies if _covers(group, way)]


def _figures(group: _Group, figure: str, title: str) -> Table:
    shares = (0.0, *group.runs()[0].setting.shares, 1.0)
    table = Table(title, ["recomputed", *map(_percent, shares)])
    for way in group.policies:
        if not _covers(group, way):
            known = group.runs(way)[0].shares
            means = {each: _mean(_values(group, way, figure, each), figure) for each in known}
            table.add(way, *(means.get(each, "") for each in shares))
    return table


def _compared(group: _Group, figure: str, title: str) -> Table:
    shares = group.runs()[0].setting.shares
    table = Table(f"Less {PLAIN}, at the same share. {title}", ["recomputed", *map(_percent, shares)])
    for way in group.policies:
        if way not in (FULL, REUSE, PLAIN) and not _covers(group, way):
            seeds = _seeds(group, way, PLAIN)
            pairs = [[_values(group, each, figure, share, seeds) for each in (PLAIN, way)] for share in shares]
            table.add(way, *(_difference(plain, ours, figure) for plain, ours in pairs))
    table.note = "Paired by question, with 95 % intervals."
    return table


def _covers(group: _Group, way: str) -> bool:
    """Whether its shares are of the question's attention: a budget that the engine no longer has."""
    shares = group.runs(way)[0].shares
    return way not in (FULL, REUSE) and not {*shares} <= {0.0, *group.runs()[0].setting.shares}


def _by_coverage(group: _Group, way: str, setting: str) -> Table:
    scored = [figure for figure in ("kl", "contains") if figure == "kl" or group.runs()[0].setting.output_tokens > 1]
    headings = [each for figure in scored for each in (figure, f"less {PLAIN}")]
    table = Table(f"{way}: {setting}", ["share of the attention", "tokens recomputed, %", *headings])
    seeds = _seeds(group, way, PLAIN, REUSE, FULL)
    for share in group.runs(way)[0].shares:
        counts, reused = (_column(group, way, name, seeds) for name in (column("recomputed", share), "reused"))
        computed = sum(counts) / sum(reused)
        entries: list[str | Entry] = [_percent(share), format_number(100 * computed)]
        for figure in scored:
            ours = _values(group, way, figure, share, seeds)
            entries += [_mean(ours, figure), _difference(_between(group, figure, computed, seeds), ours, figure)]
        table.add(*entries)
    table.note = (
        f"{PLAIN} with as many tokens of all requests together, each with the same share: interpolated question by "
        "question between the two nearest shares measured."
    )
    return table


def _questions(group: _Group) -> str:
    counts = {way: sum(run.requests for run in group.runs(way)) for way in group.policies}
    most = max(counts.values())
    fewer = [f"{way} {count}" for way, count in counts.items() if count < most]
    return f"{most} questions" + (f" ({', '.join(fewer)})" if fewer else "")


def _seeds(group: _Group, *ways: str) -> list[int]:
    """Those of all of these ways."""
    return [seed for seed in group.seeds if all(seed in group.policies.get(way, {}) for way in ways)]


def _values(group: _Group, way: str, figure: str, share: float, seeds: Sequence[int] | None = None) -> list[float]:
    return _column(group, way, column(figure, share), seeds)


def _column(group: _Group, way: str, name: str, seeds: Sequence[int] | None = None) -> list[float]:
    """Of each question."""
    runs = group.policies[way]
    return [value for seed in (sorted(runs) if seeds is None else seeds) for value in runs[seed].rows[name]]


def _between(group: _Group, figure: str, share: float, seeds: Sequence[int]) -> list[float]:
    """A figure of the plain selection at a share that was not measured."""
    known = {0.0: REUSE, **dict.fromkeys(group.runs()[0].setting.shares, PLAIN), 1.0: FULL}
    low = max(each for each in known if each <= share)
    high = min((each for each in known if each > share), default=low)
    part = (share - low) / (high - low) if high > low else 0.0
    ends = (_values(group, known[each], figure, each, seeds) for each in (low, high))
    return [before + part * (after - before) for before, after in zip(*ends, strict=True)]


def _mean(values: Sequence[float], figure: str) -> str:
    return format_number(fmean(values), 4) if figure == "kl" else format_number(100 * fmean(values))


def _difference(plain: Sequence[float], ours: Sequence[float], figure: str) -> Entry:
    by, decimals, better = (1, 4, -1) if figure == "kl" else (100, 1, 1)
    difference, low, high = (by * each for each in bootstrap_difference(plain, ours))
    verdict = "no difference" if low <= 0 <= high else "better" if better * difference > 0 else "worse"
    interval = f"[{format_number(low, decimals)}, {format_number(high, decimals)}]"
    return Entry(signed(difference, decimals), interval, verdict)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
