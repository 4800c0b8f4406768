"""Tables of workflows on real parts."""

from __future__ import annotations

from statistics import fmean

from ragorder.benchmarks.hedra.workflows_live.record import LiveCell, LiveRecord
from ragorder.benchmarks.hedra.workflows_live.systems import SYSTEMS
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import compare_seeds
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number, interval_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_ENGINES = {"torch": "the embedded engine", "vllm": "vLLM"}

_WORDS = (
    "Real are FAISS, MiniLM, the engine and their times on this machine; the model's weights are random, and answers "
    "are scripted: nothing is said about answers. One core searches and one computes.",
)
_OURS = ("hedra", "hedra+order")


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(LiveRecord, suite.name))
    return Part([_table(group) for group in groups], words=_WORDS if groups else ())


def _table(group: RecordGroup[LiveRecord]) -> Table:
    cell = LiveCell.read(group.cell, "live")
    rate, search_ms = (fmean(float(run.facts[name]) for run in group.runs()) for name in ("rate", "search_ms"))
    title = f"{cell.workflow} on {_ENGINES[cell.engine]}, load {cell.load:g}: {rate:.2f} requests/s, "
    title += f"searches of {search_ms:.0f} ms"
    baseline = [run.facts["generation_ms"] for run in group.runs("stages") if "generation_ms" in run.facts]
    title += f", generations of {fmean(baseline):.0f} ms" if baseline else ""
    headings = ["", "mean, s", "p99, s", "cached, %", "later, %", "right, %"]
    table = Table(title, [*headings, *(f"÷ {policy}" for policy in _OURS)])
    for policy, system in SYSTEMS.items():
        runs = group.runs(policy)
        mean = _mean(group, policy)
        if mean is None:
            continue
        late = fmean(sorted(run.rows["latency_s"])[round(0.99 * (run.requests - 1))] for run in runs)
        table.add(
            f"{policy}: {system.words}",
            format_number(mean, 3),
            format_number(late, 3),
            _percent(runs, "cached_tokens", "prompt_tokens"),
            _percent(runs, "later_cached_tokens", "later_prompt_tokens"),
            _percent(runs, "right", "speculations"),
            *(_times(group, policy, our) for our in _OURS),
        )
    table.note = (
        "Cached: of all prompt tokens; later: of those after a request's first generation; right: of speculative "
        "generations; ÷: mean latency, times that of ours, and its 95 % interval (Student's, over the seeds). "
        "A generation: stage by stage, under this load."
    )
    return table


def _mean(group: RecordGroup[LiveRecord], policy: str) -> float | None:
    runs = group.runs(policy)
    return fmean(fmean(run.rows["latency_s"]) for run in runs) if runs else None


def _times(group: RecordGroup[LiveRecord], policy: str, our: str) -> str:
    """Seeds are drawn, not requests: those of one run wait for one another."""
    sides = group.policies.get(policy, {}), group.policies.get(our, {})
    common = sorted(sides[0].keys() & sides[1].keys())
    if not common:
        return format_number(None)
    theirs, ours = ([fmean(side[seed].rows["latency_s"]) for seed in common] for side in sides)
    found = compare_seeds(ours, theirs, relative=True)
    times = format_number(1 + found.difference, 2)
    return f"{times} {interval_words(found, 2, lambda change: 1 + change)}" if found.known and policy != our else times


def _percent(runs: list[LiveRecord], part: str, whole: str) -> str:
    total = sum(run.facts.get(whole, 0) for run in runs)
    return format_number(100 * sum(run.facts[part] for run in runs) / total) if total else "–"
