"""Tables of answer quality by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ragorder.eval.report.canvas import Picture, draw, name_marks, style, titled
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import wilson
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, capital, cell_words, format_number, policy_words, signed
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import key_of
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.quality.compare import PLACE, SCORES, by_question, gold_places
from ragorder.eval.suites.quality.experiment import QualityRecord
from ragorder.eval.suites.quality.orders import normalised_scores

_Check = Mapping[str, Any]

_NOT_COMPARED = "The answers were not compared: run the same command again: it repeats no question, and compares."
_PAIRED = (
    "Differences in points to retrieval order, paired by question, over those that both answered. Answers that contain "
    "an accepted one and exact match by McNemar's exact test at 5 %, F1 by the 95 % interval in brackets. Nothing is "
    "corrected for comparing several orders."
)
_PLACES = "Over all orders; places from the front. A question counts once for each of its gold documents."
_DRAWN = (
    "Of the random order alone, in which the place says nothing about the question. Places from the front, with "
    "Wilson's 95 % interval. A question counts once for each of its gold documents."
)
_MOVED = "The best document at this place, from the front, the others as ranked. With Wilson's 95 % interval."
_WORDS = {"contains": "contains an\nanswer, %", "em": "exact\nmatch, %", "f1": "F1, %"}
_NOT_IN_TITLES = (
    *("data", "limit", "base_url", "model", "engine", "answers"),
    *("output_tokens", "block_size", "concurrency"),
)


def make_part(suite: Suite, results: Results) -> Part:
    tables, words = _quality_tables(suite, results)
    lines = results.of(QualityRecord, suite.name)
    policies = [line.policy for line in lines]
    baseline = suite.baseline if suite.baseline in policies else "".join(policies[:1])
    headline = _headline(suite, results) if lines else []
    return Part(tables, words, headline, baseline=baseline, pictures=lambda: _pictures(suite, results))


def _headline(suite: Suite, results: Results) -> list[str]:
    words = []
    for lines, checks, verdict in _cells(suite, results).values():
        compared = [check for check in checks if check["name"] == "quality-comparison"]
        if not compared or verdict is None or not verdict["measured"]:
            continue
        found = {check["policy"]: check for check in compared}
        best = max(compared, key=lambda check: check.get("contains", check["f1"]))["policy"]
        told = dict.fromkeys([*(policy for policy in ("earned", "free") if policy in found), best])
        changes = ", ".join(f"{policy_words(policy)} {_change_words(found[policy])}" for policy in told)
        score = "answers that contain the right one" if "contains" in compared[0] else "F1"
        words.append(f"{_title(lines[0], several=False) or suite.title}: {score}, to retrieval order: {changes}.")
    return words or ["Not decided: whether another order changes answers was not measured."]


def _change_words(check: _Check) -> str:
    if "contains" in check:
        undecided = " (no difference found)" * (check["contains_verdict"] == "no difference")
        return f"{signed(check['contains'] - check['contains_baseline'])} points{undecided}"
    low, high = check["f1_low"], check["f1_high"]
    undecided = " (not decided: the interval covers zero)" * (low <= 0 <= high)
    return f"{signed(check['f1_difference'])} points [{signed(low)}, {signed(high)}]{undecided}"


def _cells(suite: Suite, results: Results) -> dict[object, tuple[list[QualityRecord], list[_Check], _Check | None]]:
    """Lines and checks of each cell, and its verdict."""
    cells: dict[object, list[QualityRecord]] = {}
    for line in results.of(QualityRecord, suite.name):
        cells.setdefault(_key(line), []).append(line)
    found: dict[object, tuple[list[QualityRecord], list[_Check], _Check | None]] = {}
    for key, lines in cells.items():
        checks = [check for check in results.own_checks if _check_key(check) == key]
        verdict = next((check for check in checks if check["name"] == "quality-verdict"), None)
        found[key] = lines, checks, verdict
    return found


def _quality_tables(suite: Suite, results: Results) -> tuple[list[Table], list[str]]:
    cells = _cells(suite, results)
    if not cells:
        nothing = "Quality was not measured. Nothing was asked; a capable model is needed: its scores would stand here."
        return [], [nothing] * (suite.kind == "quality")
    tables: list[Table] = []
    said: dict[str, dict[str, None]] = {}
    firsts = [lines[0] for lines, _, _ in cells.values()]
    for lines, checks, verdict in cells.values():
        title = _title(lines[0], several=sum(line.cell == lines[0].cell for line in firsts) > 1)
        if verdict is None or any(line.policy not in verdict["reordered"] for line in lines):
            said.setdefault(_NOT_COMPARED, {})[title] = None
        for check in checks:
            if check["name"] == "quality-places" and verdict is not None and verdict["measured"]:
                said.setdefault(f"{capital(str(check['message']))}.", {})[title] = None
        if verdict is not None and not verdict["measured"]:
            message = str(verdict["message"])
            said.setdefault(f"{message[:1].upper()}{message[1:]}.", {})[title] = None
            continue
        if not lines[0].dry_run:
            tables += [_table(title, lines, checks, verdict), *_places(title, lines, checks)]
    return tables, [f"{', '.join(titles)}: {message}" for message, titles in said.items()]


def print_quality(lines: Sequence[Mapping[str, Any]], checks: Sequence[_Check]) -> None:
    """A table and the verdict for each (suite, cell, seed) of these results."""
    from rich.console import Console

    console, records = Console(), [QualityRecord.model_validate(line) for line in lines]
    for verdict in (check for check in checks if check["name"] == "quality-verdict"):
        key = _check_key(verdict)
        rows = {record.policy: record for record in records if _key(record) == key}
        said = {"accepted": ", given the accepted answer", "empty": ", given no answer"}
        title = _title(next(iter(rows.values())), several=False) + said.get(verdict["cell"].get("answers"), "")
        console.print(_table(title, list(rows.values()), [each for each in checks if _check_key(each) == key], verdict))
        console.print(verdict["message"], style="bold", markup=False)
        for check in checks:
            if check["name"] == "quality-places" and _check_key(check) == key:
                console.print(check["message"], style="bold", markup=False)


def _key(line: QualityRecord) -> object:
    return line.suite, key_of(line.cell), line.seed, line.dry_run


def _check_key(check: _Check) -> object:
    return check["suite"], key_of(check["cell"]), check["seed"], check["dry_run"]


def _title(line: QualityRecord, *, several: bool) -> str:
    said = {name: value for name, value in line.cell.items() if value is not None and name not in _NOT_IN_TITLES}
    if said.get("dataset") == "corpus":
        said["dataset"] = Path(line.cell["data"]).name if line.cell.get("data") else "the sample"
    if (order := said.pop("question_order", "data")) != "data":
        said["order"] = order
    return ", ".join(filter(None, (cell_words(said), line.model_name, f"seed {line.seed}" * several)))


def _table(title: str, lines: Sequence[QualityRecord], checks: Sequence[_Check], verdict: _Check | None) -> Table:
    compared = {check["policy"]: check for check in checks if check["name"] == "quality-comparison"}
    scores = [score for score in _WORDS if all(score in line.rows for line in lines)]
    headings = ["order of documents", *(_WORDS[score] for score in scores), "questions", "of these\nreordered, %"]
    normalised = normalised_scores({line.policy: _score(line, "f1") for line in lines})
    if normalised:
        headings.insert(1 + len(scores), "F1,\nnormalised, %")
    cached = {line.policy: _cached(line) for line in lines}
    if any(share is not None for share in cached.values()):
        headings.insert(-2, "cached, %")
    table = Table(f"Answers: {title}", headings)
    baselines = {each["baseline"] for each in compared.values()}
    for line in lines:
        row = [Entry(policy_words(line.policy))]
        check = compared.get(line.policy)
        for name in scores:
            value = format_number(_score(line, name))
            against = _change(check, name) if check and name in check else "baseline" * (line.policy in baselines)
            said = [_interval(line)] * (name == "contains") + [against] * bool(against)
            row.append(Entry(value, "; ".join(said), str(check[f"{name}_verdict"]) if check and name in check else ""))
        if normalised:
            row.append(Entry(format_number(normalised.get(line.policy))))
        if "cached, %" in headings:
            row.append(Entry(format_number(cached[line.policy])))
        share = None if verdict is None else verdict["reordered"].get(line.policy)
        reordered = format_number(None if share is None else 100 * share)
        table.rows.append([*row, Entry(f"{len(set(line.rows.get('id', ()))):,}"), Entry(reordered)])
    note = verdict and verdict["note"]
    table.note = " ".join(filter(None, (_PAIRED * bool(compared), f"Mind: {note}." if note else "")))
    return table


def _change(check: _Check, name: str) -> str:
    if name == "f1":
        low, high = signed(check["f1_low"]), signed(check["f1_high"])
        return f"{signed(check['f1_difference'])} [{low}, {high}]"
    lost, won, p = (check[f"{name}_{each}"] for each in ("lost", "won", "p"))
    words = [f"{won:,} won", f"{lost:,} lost", f"p {p:.2g}" if p >= 0.001 else "p < 0.001"]
    change = signed(check[name] - check[f"{name}_baseline"])
    return f"{change}: {', '.join(each.replace(' ', THIN) for each in words)}"


def _score(line: QualityRecord, name: str) -> float | None:
    """In percent; a question that was asked again counts once."""
    found = by_question(line.rows, name) if line.rows.get(name) else None
    return 100 * fmean(found.values()) if found else None


def _bounds(line: QualityRecord) -> tuple[float, float]:
    found = by_question(line.rows, "contains")
    low, high = wilson(fmean(found.values()), len(found))
    return 100 * low, 100 * high


def _interval(line: QualityRecord) -> str:
    low, high = map(format_number, _bounds(line))
    return f"[{low}, {high}]"


def _cached(line: QualityRecord) -> float | None:
    """In percent of the prompts' tokens, those of a question asked again included."""
    cached, tokens = line.rows.get("cached_tokens"), line.rows.get("prompt_tokens")
    return 100 * sum(cached) / sum(tokens) if cached and tokens else None


def _places(title: str, lines: Sequence[QualityRecord], checks: Sequence[_Check]) -> list[Table]:
    drawn, words = _by_place(lines)
    places: dict[int, list[Mapping[str, Any]]] = {}
    for found in drawn or [each for check in checks for each in check.get("places", ())]:
        places.setdefault(found["place"], []).append(found)
    scores = [score for score in _WORDS if all(score in each for several in places.values() for each in several)]
    headings = ["place", "gold documents there", *(_WORDS[score].replace("\n", " ") for score in scores)]
    table = Table(f"By the place of a gold document: {title}", headings, note=words or _PLACES)
    for place, several in sorted(places.items()):
        gold = sum(each["gold"] for each in several)
        row = [Entry(str(place + 1)), Entry(f"{gold:,}")]
        for name in scores:
            share = sum(each["gold"] * each[name] for each in several) / gold
            ends = wilson(share / 100, gold) if drawn and name != "f1" else ()
            row.append(
                Entry(format_number(share), f"[{', '.join(format_number(100 * end) for end in ends)}]" * bool(ends))
            )
        table.rows.append(row)
    return [table] * bool(places)


def _by_place(lines: Sequence[QualityRecord]) -> tuple[list[Mapping[str, Any]], str]:
    """Scores by the place of a gold document where that says nothing about the question, and how it was chosen."""
    placed = {int(line.policy.removeprefix(PLACE)) - 1: line.rows for line in lines if line.policy.startswith(PLACE)}
    if len(placed) > 1:
        means = {place: {name: by_question(rows, name) for name in SCORES} for place, rows in sorted(placed.items())}
        return [
            {"place": place, "gold": len(scores["em"])} | {name: 100 * fmean(scores[name].values()) for name in SCORES}
            for place, scores in means.items()
        ], _MOVED
    random = next((line for line in lines if line.policy == "random" and not line.dry_run), None)
    return (gold_places(random.model_dump())["places"], _DRAWN) if random else ([], "")


def _pictures(suite: Suite, results: Results) -> list[Picture]:
    pictures = []
    for lines, _, verdict in _cells(suite, results).values():
        shown = [line for line in lines if line.rows.get("contains") and _cached(line) is not None]
        if len(shown) > 1 and not lines[0].dry_run and (verdict is None or verdict["measured"]):
            title = _title(lines[0], several=False)
            pictures.append(_front(title, shown))
            if (drawn := _by_place(shown))[0]:
                pictures.append(_curve(title, *drawn))
    return pictures


def _front(title: str, lines: Sequence[QualityRecord]) -> Picture:
    points = {line.policy: (_cached(line) or 0.0, _score(line, "contains") or 0.0, _bounds(line)) for line in lines}

    def paint(axes: Any) -> None:
        for policy, (cached, right, (low, high)) in points.items():
            looks = style(policy)
            reach = [[right - low], [high - right]]
            axes.errorbar(
                [cached], [right], yerr=reach, fmt=looks.marker, markersize=5, color=looks.colour, elinewidth=0.8
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("cached, % of the prompts' tokens")
        axes.set_ylabel("answers with the right one, %")
        name_marks(axes, list(points))

    alt = "; ".join(
        f"{policy_words(policy)}: {format_number(right)} % right, {format_number(cached)} % cached"
        for policy, (cached, right, _) in points.items()
    )
    caption = "Up: more right answers, with Wilson's 95 % interval; to the right: fewer tokens computed."
    return draw(paint, title=titled("Right answers and cached tokens", title), alt=alt, caption=caption, height=4.0)


def _curve(title: str, places: Sequence[Mapping[str, Any]], words: str) -> Picture:
    shown = [(each["place"] + 1, each["contains"], each["gold"]) for each in places]

    def paint(axes: Any) -> None:
        looks = style("random")
        ends = [wilson(right / 100, count) for _, right, count in shown]
        reach = [
            [right - 100 * low for (_, right, _), (low, _) in zip(shown, ends, strict=True)],
            [100 * high - right for (_, right, _), (_, high) in zip(shown, ends, strict=True)],
        ]
        numbers, rights = [place for place, _, _ in shown], [right for _, right, _ in shown]
        axes.errorbar(numbers, rights, reach, fmt="-", marker="o", markersize=4, color=looks.colour, elinewidth=0.8)
        axes.set_xticks(numbers)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("place of the gold document")
        axes.set_ylabel("answers with the right one, %")

    alt = ", ".join(f"place {place}: {format_number(right)} %" for place, right, _ in shown)
    return draw(
        paint,
        title=titled("Right answers by the place of the gold document", title),
        alt=alt,
        caption=words,
    )
