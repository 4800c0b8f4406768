"""Comparison of answers between orders."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragorder.eval.report.statistics import need_scipy

if TYPE_CHECKING:
    from ragorder.eval.running.progress import Progress

__all__ = ["bootstrap_difference", "compare_orders", "gold_places", "judge", "mcnemar_exact", "summarise"]

CAPABLE_PARAMETERS = 3_000_000_000
"""A smaller model with an exact match of 0 in every order cannot tell the orders apart."""

Line = dict[str, Any]

_BASELINE = "retrieval"
_LEVEL = 0.05
_RESAMPLES = 9_999
_KEY = ("session", "suite", "cell", "seed", "dry_run")


def mcnemar_exact(baseline: Sequence[int], other: Sequence[int]) -> tuple[int, int, float]:
    """Questions answered only by the baseline, those only by the other, and the two-sided p-value. Raises ValueError
    for different lengths, ImportError without scipy."""
    pairs = list(zip(baseline, other, strict=True))
    lost = sum(before > after for before, after in pairs)
    won = sum(before < after for before, after in pairs)
    if not lost + won:
        return 0, 0, 1.0
    return lost, won, float(need_scipy().binomtest(won, lost + won, 0.5).pvalue)


def bootstrap_difference(
    baseline: Sequence[float], other: Sequence[float], *, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float, float]:
    """The mean of other - baseline, and its percentile bootstrap interval. Raises like `mcnemar_exact`."""
    differences = [after - before for before, after in zip(baseline, other, strict=True)]
    if not differences:
        raise ValueError("there are no questions to compare")
    import numpy

    stats = need_scipy()
    mean = float(numpy.mean(differences))
    if min(differences) == max(differences):
        # Every resample is the same, for which scipy has no interval.
        return mean, mean, mean
    interval = stats.bootstrap(
        (numpy.asarray(differences),),
        numpy.mean,
        n_resamples=_RESAMPLES,
        batch=max(1, 2_000_000 // len(differences)),
        confidence_level=confidence,
        method="percentile",
        random_state=numpy.random.default_rng(seed),
    ).confidence_interval
    return mean, float(interval.low), float(interval.high)


def summarise(lines: Iterable[Mapping[str, Any]], progress: Progress | None = None) -> list[Line]:
    """ "check" lines for each (suite, cell, seed, dry_run): comparison and positions of each order, then the verdict
    (alone for a dry run). The last line of an order counts."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for line in lines:
        if line.get("type") == "quality":
            key = json.dumps([line[field] for field in _KEY if field != "session"], sort_keys=True)
            groups[key][line["policy"]] = line
    summary: list[Line] = []
    advance = progress("comparing", len(groups)) if progress else None
    for group in groups.values():
        orders = list(group.values())
        if not orders[0]["dry_run"]:
            summary += compare_orders(orders)
            summary += [gold_places(line) for line in orders]
        summary.append(judge(orders))
        if advance:
            advance()
    return summary


def compare_orders(lines: Sequence[Mapping[str, Any]], baseline: str = _BASELINE) -> list[Line]:
    """Each order against the baseline over the questions that both answered; EM and F1 in percent.

    EM differs by McNemar's exact test at 5 % (`em_lost`, `em_won`: questions answered only by the baseline, only by
    this order), F1 if the paired 95 % interval excludes zero; several orders are not corrected for. `reordered` is the
    share of questions whose documents moved.
    """
    by_policy = {line["policy"]: line for line in lines}
    if baseline not in by_policy:
        return []
    compared = []
    before = _scores(by_policy.pop(baseline)["rows"])
    for policy, line in by_policy.items():
        after = _scores(line["rows"])
        both = [id for id in before if id in after]
        if not both:
            continue
        em = [[scores[id][0] for id in both] for scores in (before, after)]
        f1 = [[scores[id][1] for id in both] for scores in (before, after)]
        lost, won, p = mcnemar_exact(*em)
        difference, low, high = bootstrap_difference(*f1, seed=line["seed"])
        compared.append(
            {
                **_check(line, "quality-comparison"),
                "policy": policy,
                "baseline": baseline,
                "questions": len(both),
                "reordered": _reordered(line),
                "em_baseline": _percent(em[0]),
                "em": _percent(em[1]),
                "em_lost": lost,
                "em_won": won,
                "em_p": p,
                "em_verdict": _verdict(won - lost if p < _LEVEL else 0),
                "f1_baseline": _percent(f1[0]),
                "f1": _percent(f1[1]),
                "f1_difference": round(100 * difference, 4),
                "f1_low": round(100 * low, 4),
                "f1_high": round(100 * high, 4),
                "f1_verdict": _verdict(0 if low <= 0 <= high else difference),
            }
        )
    return compared


def gold_places(line: Mapping[str, Any]) -> Line:
    """By place (from 0) the number of gold documents there, and their questions' EM and F1 in percent."""
    rows = line["rows"]
    by_place: dict[int, list[tuple[int, float]]] = defaultdict(list)
    without = 0
    for places, em, f1 in zip(rows["gold_places"], rows["em"], rows["f1"], strict=True):
        without += not places
        for place in places:
            by_place[place].append((em, f1))
    return {
        **_check(line, "quality-positions"),
        "policy": line["policy"],
        "without_gold": without,
        "places": [
            {
                "place": place,
                "gold": len(scores),
                "em": _percent([em for em, _ in scores]),
                "f1": _percent([f1 for _, f1 in scores]),
            }
            for place, scores in sorted(by_place.items())
        ],
    }


def judge(lines: Sequence[Mapping[str, Any]]) -> Line:
    """Whether quality was `measured` in these orders of one cell, the `reason` if not, and a `note` on its limits."""
    first = lines[0]
    reason, note = None, None
    model: Mapping[str, Any] = first["model"] or {}
    size: int | None = model.get("parameters")
    nothing_right = not any(em for line in lines for em in line["rows"]["em"])
    reordered = {line["policy"]: _reordered(line) for line in lines}
    if first["dry_run"]:
        reason = "this was a dry run, in which a stub answered"
    elif model.get("random_weights"):
        reason = "the model has random weights: its answers are noise"
    elif nothing_right and size is None:
        reason = "exact match is 0 in every order, and nothing says how large the model is: take a capable one"
    elif nothing_right and size is not None and size < CAPABLE_PARAMETERS:
        reason = (
            f"the model has {size / 1e9:.2g} billion parameters (fewer than {CAPABLE_PARAMETERS / 1e9:g}) and exact "
            "match is 0 in every order: it cannot tell the orders apart"
        )
    elif nothing_right:
        note = "exact match is 0 in every order: only F1 can tell them apart"
    if note is None and not any(reordered.values()):
        note = "no order moved a document, so that the prompts are the same: with --retriever questions share documents"
    message = f"quality was NOT measured: {reason}" if reason else "quality was measured"
    return {
        **_check(first, "quality-verdict"),
        "measured": reason is None,
        "reason": reason,
        "note": note,
        "reordered": reordered,
        "message": f"{message}; {note}" if note else message,
    }


def _check(line: Mapping[str, Any], name: str) -> Line:
    return {"type": "check", "name": name, **{field: line[field] for field in _KEY}}


def _scores(rows: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    return {id: (em, f1) for id, em, f1 in zip(rows["id"], rows["em"], rows["f1"], strict=True)}


def _reordered(line: Mapping[str, Any]) -> float:
    displacement: Sequence[float] = line["rows"]["displacement"]
    return round(sum(moved > 0 for moved in displacement) / len(displacement), 4)


def _verdict(sign: float) -> str:
    return "better" if sign > 0 else "worse" if sign < 0 else "no difference"


def _percent(values: Sequence[float]) -> float:
    return round(100 * sum(values) / len(values), 4)
