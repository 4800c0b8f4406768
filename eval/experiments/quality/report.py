"""Tables of answer quality by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragorder.eval.experiments.quality.fused import normalised_scores
from ragorder.eval.experiments.quality.record import QualityRecord
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import summary
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, cell_words, format_number, policy_words, signed
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record, key_of
from ragorder.eval.running.suite import Suite

__all__ = ["make_part", "print_quality", "quality_not_measured"]

_Check = Mapping[str, Any]

_NOT_COMPARED = "The answers were not compared: run the same command again: it repeats no question, and compares."
_PAIRED = (
    "Differences in points to retrieval order, paired by question, over those that both answered. Exact match by "
    "McNemar's exact test at 5 %, F1 by the 95 % interval in brackets. Nothing is corrected for comparing several "
    "orders."
)
_PLACES = "Over all orders; places from the front. A question counts once for each of its gold documents."
_NOT_IN_TITLES = ("data", "base_url", "model", "engine", "answers")


def make_part(suite: Suite, results: Results) -> Part:
    tables, words = _quality_tables(suite, results)
    lines = results.of(QualityRecord, suite.name)
    policies = [line.policy for line in lines]
    baseline = suite.baseline if suite.baseline in policies else "".join(policies[:1])
    return Part(tables, words, headline=_headline(suite, results) if lines else [], baseline=baseline)


def _headline(suite: Suite, results: Results) -> list[str]:
    checks = [check for check in results.own_checks if check["suite"] == suite.name and not check["dry_run"]]
    measured = [_check_key(check) for check in checks if check["name"] == "quality-verdict" and check["measured"]]
    words = []
    for check in checks:
        if check["name"] == "quality-comparison" and check["policy"] == "free" and _check_key(check) in measured:
            low, high = check["f1_low"], check["f1_high"]
            change = f"{signed(check['f1_difference'])} points [{signed(low)}, {signed(high)}]"
            undecided = " (not decided: the interval covers zero)" * (low <= 0 <= high)
            words.append(
                f"{cell_words(check['cell']) or suite.title}: {policy_words('free')} changes F1 by {change}{undecided}."
            )
    return words or ["Not decided: whether another order changes answers was not measured."]


def _quality_tables(suite: Suite, results: Results) -> tuple[list[Table], list[str]]:
    cells: dict[object, list[QualityRecord]] = {}
    for line in results.of(QualityRecord, suite.name):
        cells.setdefault(_key(line), []).append(line)
    if not cells:
        nothing = "Quality was not measured. Nothing was asked; a capable model is needed: its scores would stand here."
        return [], [nothing] * (suite.kind == "quality")
    tables: list[Table] = []
    said: dict[str, dict[str, None]] = {}
    for key, lines in cells.items():
        checks = [check for check in results.own_checks if _check_key(check) == key]
        verdict = next((check for check in checks if check["name"] == "quality-verdict"), None)
        title = _title(lines[0], several=sum(line.cell == lines[0].cell for line in _firsts(cells)) > 1)
        if verdict is None or any(line.policy not in verdict["reordered"] for line in lines):
            said.setdefault(_NOT_COMPARED, {})[title] = None
        if verdict is not None and not verdict["measured"]:
            message = str(verdict["message"])
            said.setdefault(f"{message[:1].upper()}{message[1:]}.", {})[title] = None
            continue
        if not lines[0].dry_run:
            tables += [_table(title, lines, checks, verdict), *_places(title, checks)]
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


def quality_not_measured(records: Sequence[Record], checks: Sequence[_Check]) -> str | None:
    """The reason why nothing is known about quality, if there is one."""
    verdicts = [check for check in checks if check["name"] == "quality-verdict"]
    if any(verdict["measured"] for verdict in verdicts):
        return None
    asked = [each for each in records if isinstance(each, QualityRecord)]
    if not asked:
        return None
    if all(line.dry_run for line in asked):
        return "only a dry run, whose answers are made up"
    reasons = dict.fromkeys(str(verdict["reason"]) for verdict in verdicts if not verdict["dry_run"])
    return "; ".join(reasons) or "the answers have not been compared yet"


def _key(line: QualityRecord) -> object:
    return line.suite, key_of(line.cell), line.seed, line.dry_run


def _check_key(check: _Check) -> object:
    return check["suite"], key_of(check["cell"]), check["seed"], check["dry_run"]


def _firsts(cells: Mapping[object, Sequence[QualityRecord]]) -> list[QualityRecord]:
    return [lines[0] for lines in cells.values()]


def _title(line: QualityRecord, *, several: bool) -> str:
    said = {name: value for name, value in line.cell.items() if value is not None and name not in _NOT_IN_TITLES}
    return ", ".join(filter(None, (cell_words(said), line.model_name, f"seed {line.seed}" * several)))


def _table(title: str, lines: Sequence[QualityRecord], checks: Sequence[_Check], verdict: _Check | None) -> Table:
    compared = {check["policy"]: check for check in checks if check["name"] == "quality-comparison"}
    headings = ["order of documents", "exact\nmatch, %", "F1, %", "questions", "of these\nreordered, %"]
    normalised = normalised_scores({line.policy: _score(line, "f1") for line in lines})
    if normalised:
        headings.insert(3, "F1,\nnormalised, %")
    table = Table(f"Answers: {title}", headings)
    for line in lines:
        row = [Entry(policy_words(line.policy))]
        check = compared.get(line.policy)
        for name in ("em", "f1"):
            value = format_number(_score(line, name))
            if check is None:
                baseline = line.policy in {each["baseline"] for each in compared.values()}
                row.append(Entry(value, "baseline" * baseline))
            else:
                row.append(Entry(value, _change(check, name), str(check[f"{name}_verdict"])))
        if normalised:
            row.append(Entry(format_number(normalised.get(line.policy))))
        share = None if verdict is None else verdict["reordered"].get(line.policy)
        reordered = format_number(None if share is None else 100 * share)
        table.rows.append([*row, Entry(f"{len(line.rows.get('em', ())):,}"), Entry(reordered)])
    note = verdict and verdict["note"]
    table.note = " ".join(filter(None, (_PAIRED * bool(compared), f"Mind: {note}." if note else "")))
    return table


def _change(check: _Check, name: str) -> str:
    if name == "em":
        lost, won, p = check["em_lost"], check["em_won"], check["em_p"]
        words = [f"{won:,} won", f"{lost:,} lost", f"p {p:.2g}" if p >= 0.001 else "p < 0.001"]
        return f"{signed(check['em'] - check['em_baseline'])}: {', '.join(each.replace(' ', THIN) for each in words)}"
    low, high = signed(check["f1_low"]), signed(check["f1_high"])
    return f"{signed(check['f1_difference'])} [{low}, {high}]"


def _score(line: QualityRecord, name: str) -> float | None:
    found = summary([100 * float(value) for value in line.rows.get(name, ())])
    return found.mean if found else None


def _places(title: str, checks: Sequence[_Check]) -> list[Table]:
    places: dict[int, list[Mapping[str, Any]]] = {}
    for check in checks:
        for found in check["places"] if check["name"] == "quality-positions" else ():
            places.setdefault(found["place"], []).append(found)
    headings = ["place", "gold documents there", "exact match, %", "F1, %"]
    table = Table(f"By the place of a gold document: {title}", headings, note=_PLACES)
    for place, several in sorted(places.items()):
        gold = sum(each["gold"] for each in several)
        scores = [sum(each["gold"] * each[name] for each in several) / gold for name in ("em", "f1")]
        table.rows.append(
            [Entry(str(place + 1)), Entry(f"{gold:,}"), *(Entry(format_number(score)) for score in scores)]
        )
    return [table] * bool(places)
