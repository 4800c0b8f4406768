"""Comparison of answers between orders."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ragorder.common.jsonl import JSONLines
from ragorder.eval.report.statistics import bootstrap, need_scipy

if TYPE_CHECKING:
    from ragorder.eval.running.load import Progress

CAPABLE_PARAMETERS = 3_000_000_000
"""A smaller model without a right answer in any order cannot tell the orders apart."""

PLACE = "place="
"""The beginning of the name of an order with the best document at a place."""
SCORES = ("em", "f1", "contains")
"""Columns of the rows."""

Line = dict[str, Any]

_BASELINE = "retrieval"
_LEVEL = 0.05
_RESAMPLES = 9_999
_KEY = ("session", "suite", "cell", "seed", "dry_run")


def mcnemar_exact(baseline: Sequence[float], other: Sequence[float]) -> tuple[int, int, float]:
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

    return bootstrap(differences, numpy.mean, resamples=_RESAMPLES, confidence=confidence, seed=seed)


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
            summary += recommend_place(orders)
            summary += [gold_places(line) for line in orders]
        summary.append(judge(orders))
        if advance:
            advance()
    return summary


def judge_previous(
    path: Path, suite: str, session: str | None, progress: Progress | None = None
) -> tuple[list[Line], list[Line]]:
    """The "quality" lines of cells without a verdict on all of them, and the checks of `summarise` as lines of
    `session`. Raises OSError; ImportError without scipy."""
    cells: dict[str, list[Line]] = {}
    unjudged: dict[str, None] = {}
    # Most lines are of other types, and long.
    for _, line in JSONLines(path, max_line_bytes=None).objects(containing=b'"quality'):
        cell = json.dumps([line.get(field) for field in ("cell", "seed", "dry_run")], sort_keys=True)
        if line.get("suite") != suite:
            continue
        if line.get("type") == "quality":
            cells.setdefault(cell, []).append(line)
            unjudged[cell] = None
        elif line.get("name") == "quality-verdict":
            unjudged.pop(cell, None)
    lines = [line for cell in unjudged for line in cells[cell]]
    checks = summarise(lines, progress) if lines else []
    return lines, [{**check, "session": session} for check in checks]


def compare_orders(lines: Sequence[Mapping[str, Any]], baseline: str = _BASELINE) -> list[Line]:
    """Each order against the baseline over the questions that both answered; EM, F1 and answers that contain an
    accepted one in percent. A question that was asked again counts once, with its mean. EM differs by McNemar's exact
    test at 5 % (`em_lost`, `em_won`: questions answered only by the baseline, only by this order; asked again, more
    often by it), as does `contains`; F1 if the paired 95 % interval excludes zero. Several orders are not corrected
    for. `reordered` is the share of questions whose documents moved."""
    by_policy = {line["policy"]: line for line in lines}
    if baseline not in by_policy:
        return []
    compared = []
    before = by_policy.pop(baseline)["rows"]
    for policy, line in by_policy.items():
        after = line["rows"]
        em, f1 = (_pairs(before, after, score) for score in ("em", "f1"))
        if not em[0]:
            continue
        difference, low, high = bootstrap_difference(*f1, seed=line["seed"])
        found = {
            **_check(line, "quality-comparison"),
            "policy": policy,
            "baseline": baseline,
            "questions": len(em[0]),
            "reordered": _reordered(line),
            **_won("em", *em),
            "f1_baseline": _percent(f1[0]),
            "f1": _percent(f1[1]),
            "f1_difference": round(100 * difference, 4),
            "f1_low": round(100 * low, 4),
            "f1_high": round(100 * high, 4),
            "f1_verdict": _verdict(0 if low <= 0 <= high else difference),
        }
        if "contains" in before and "contains" in after:
            found |= _won("contains", *_pairs(before, after, "contains"))
        compared.append(found)
    return compared


def _won(name: str, before: Sequence[float], after: Sequence[float]) -> Line:
    lost, won, p = mcnemar_exact(before, after)
    return {
        f"{name}_baseline": _percent(before),
        name: _percent(after),
        f"{name}_lost": lost,
        f"{name}_won": won,
        f"{name}_p": p,
        f"{name}_verdict": _verdict(won - lost if p < _LEVEL else 0),
    }


def recommend_place(lines: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Orders that differ in the place of the best document alone, each against the first place, and the setting that
    follows: the end with more right answers, if first and last differ at 5 %, Bonferroni's correction for all
    comparisons made. Nothing without both ends."""
    placed = sorted(
        (line for line in lines if line["policy"].startswith(PLACE)),
        key=lambda line: int(line["policy"].removeprefix(PLACE)),
    )
    if len(placed) < 2:
        return []
    first, last = placed[0], placed[-1]
    lost, won, p = mcnemar_exact(*(pairs := _pairs(first["rows"], last["rows"], "contains")))
    corrected = min(1.0, p * (len(placed) - 1))
    differ = corrected < _LEVEL
    best = "any" if not differ else "last" if won > lost else "first"
    shares = [_percent(scores) for scores in pairs]
    chance = f"p {corrected:.2g}" if corrected >= 0.001 else "p < 0.001"
    advice = f'Settings(best="{best}")' if differ else 'leave Settings(best="any"), the default'
    return [
        *compare_orders(placed, first["policy"]),
        {
            **_check(first, "quality-places"),
            "first": shares[0],
            "last": shares[1],
            "questions": len(pairs[0]),
            "comparisons": len(placed) - 1,
            "p": corrected,
            "best": best,
            "message": f"{'' if differ else 'no difference found: '}{shares[0]:.1f} % of {len(pairs[0]):,} answers are "
            f"right with the best document first, {shares[1]:.1f} % with it last ({chance}): {advice}",
        },
    ]


def gold_places(line: Mapping[str, Any]) -> Line:
    """By place (from 0) the number of questions with a gold document there, and their EM, F1 and answers that contain
    an accepted one in percent. A question that was asked again with one there counts once, with its mean."""
    rows = line["rows"]
    by_place: dict[int, list[int]] = defaultdict(list)
    for number, places in enumerate(rows["gold_places"]):
        for place in places:
            by_place[place].append(number)
    found = []
    for place, numbers in sorted(by_place.items()):
        there = {name: [rows[name][number] for number in numbers] for name in ("id", *SCORES) if name in rows}
        means = {score: list(by_question(there, score).values()) for score in SCORES if score in there}
        found.append(
            {"place": place, "gold": len(means["em"])} | {score: _percent(each) for score, each in means.items()}
        )
    without = sum(not places for places in rows["gold_places"])
    return {**_check(line, "quality-positions"), "policy": line["policy"], "without_gold": without, "places": found}


def judge(lines: Sequence[Mapping[str, Any]]) -> Line:
    """Whether quality was `measured` in these orders of one cell, the `reason` if not, and a `note` on its limits."""
    first = lines[0]
    reason, note = None, None
    model: Mapping[str, Any] = first["model"] or {}
    size: int | None = model.get("parameters")
    nothing_right = not any(any(line["rows"].get(score) or ()) for line in lines for score in ("em", "contains"))
    reordered = {line["policy"]: _reordered(line) for line in lines}
    if first["dry_run"]:
        reason = "this was a dry run, in which a stub answered"
    elif model.get("random_weights"):
        reason = "the model has random weights: its answers are noise"
    elif nothing_right and size is None:
        reason = "no answer is right in any order, and nothing says how large the model is: take a capable one"
    elif nothing_right and size is not None and size < CAPABLE_PARAMETERS:
        reason = (
            f"the model has {size / 1e9:.2g} billion parameters (fewer than {CAPABLE_PARAMETERS / 1e9:g}) and no "
            "answer is right in any order: it cannot tell the orders apart"
        )
    elif nothing_right:
        note = "no answer is right in any order: only F1 can tell them apart"
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


def by_question(rows: Mapping[str, Any], score: str) -> dict[str, float]:
    """The mean score of each question in these rows, whose answers may be several."""
    scores: dict[str, list[float]] = defaultdict(list)
    for id, value in zip(rows["id"], rows[score], strict=True):
        scores[id].append(value)
    return {id: fmean(values) for id, values in scores.items()}


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any], score: str) -> tuple[list[float], list[float]]:
    first, second = by_question(before, score), by_question(after, score)
    both = [id for id in first if id in second]
    return [first[id] for id in both], [second[id] for id in both]


def _reordered(line: Mapping[str, Any]) -> float:
    displacement: Sequence[float] = line["rows"]["displacement"]
    return round(sum(moved > 0 for moved in displacement) / len(displacement), 4)


def _verdict(sign: float) -> str:
    return "better" if sign > 0 else "worse" if sign < 0 else "no difference"


def _percent(values: Sequence[float]) -> float:
    return round(100 * sum(values) / len(values), 4)
