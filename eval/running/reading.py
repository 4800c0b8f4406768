"""Results in a folder: results.jsonl or results.jsonl.xz, of any number of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ragorder.common.jsonl import JSONLines
from ragorder.errors import RagorderError
from ragorder.eval.running.record import (
    RESULTS,
    SCHEMA,
    CheckRecord,
    Record,
    RunRecord,
    SessionRecord,
    UnavailableRecord,
    key_of,
)
from ragorder.eval.running.suite import Kind, kinds

Line = SessionRecord | UnavailableRecord | CheckRecord | Record
R = TypeVar("R", bound=Record)


class ResultsError(RagorderError, ValueError):
    """There is nothing to report on. The message says what to change."""


@dataclass(slots=True)
class Results:
    """Everything measured, in the order written; `notes` tell what could not be read."""

    folder: Path
    sessions: list[SessionRecord] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    unavailable: list[UnavailableRecord] = field(default_factory=list)
    checks: list[Mapping[str, Any]] = field(default_factory=list)
    own_checks: list[Mapping[str, Any]] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def folder_of(self, session: SessionRecord) -> Path:
        found = self.folders.get(session.id, self.folder)
        return found.parent if found.is_file() else found

    @property
    def suites(self) -> list[str]:
        names = [line.suite for line in self.records] + [line.suite for line in self.unavailable]
        return list(dict.fromkeys(names))

    @property
    def runs(self) -> list[RunRecord]:
        return self.of(RunRecord)

    def of(self, record: type[R], suite: str | None = None) -> list[R]:
        return [each for each in self.records if isinstance(each, record) and suite in (None, each.suite)]


def read_results(folder: Path, *more: Path) -> Results:
    """Return the results in folders or files results.jsonl(.xz), together. Raises ResultsError."""
    results = Results(folder)
    torn: list[object] = []
    skipped = {"an incomplete line (an interrupted run) was skipped": torn}
    seen, known = set[object](), kinds()
    models = _models(known)
    for each in (folder, *more):
        file, before = _file(each), len(results.sessions)
        for number, entry in JSONLines(file, error=ResultsError, max_line_bytes=None).objects(torn.append):
            if problem := _take(entry, results, seen, models, known):
                skipped.setdefault(problem, []).append(f"{file}:{number}")
        results.folders |= {session.id: each for session in results.sessions[before:]}
    results.notes += [f"{len(places)} × {problem} ({places[0]})" for problem, places in skipped.items() if places]
    if not results.suites and not results.checks:
        where = folder if folder.is_file() else folder / RESULTS
        raise ResultsError(f"{where} holds no measurement: run 'ragorder eval run SUITE -o DIR' to its end")
    return results


def results_of(lines: Iterable[Mapping[str, Any]], known: Mapping[str, type[Kind]]) -> Results:
    """Return the results in these lines of known kinds, which no file may have."""
    results, models = Results(Path()), _models(known)
    for line in lines:
        _put(models[line["type"]].model_validate(line), results, set(), known)
    return results


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    found = next((file for file in (path / RESULTS, path / f"{RESULTS}.xz") if file.is_file()), None)
    if found is None:
        where = "is no folder" if not path.is_dir() else f"has no {RESULTS}"
        raise ResultsError(f"{path} {where}: give the folder that 'ragorder eval run SUITE -o DIR' wrote to")
    return found


def _take(
    entry: dict[str, Any],
    results: Results,
    seen: set[object],
    models: Mapping[str, type[Line]],
    known: Mapping[str, type[Kind]],
) -> str:
    kind = entry.get("type")
    if not isinstance(kind, str) or kind not in models:
        return f"a line of unknown type {kind!r}"
    try:
        return _put(models[kind].model_validate(entry), results, seen, known)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return f"a line of type {kind!r} with missing fields was skipped"


def _models(known: Mapping[str, type[Kind]]) -> dict[str, type[Line]]:
    measured = {each.record.model_fields["type"].default: each.record for each in known.values()}
    return {"session": SessionRecord, "unavailable": UnavailableRecord, "check": CheckRecord, **measured}


def _put(line: Line, results: Results, seen: set[object], known: Mapping[str, type[Kind]]) -> str:
    if isinstance(line, SessionRecord):
        if line.schema_version != SCHEMA:
            results.notes.append(f"session {line.id} is of schema {line.schema_version}: this program knows {SCHEMA}")
        results.sessions.append(line)
    elif isinstance(line, CheckRecord):
        _put_check(line, results, known)
    elif isinstance(line, UnavailableRecord):
        if not _again(seen, "unavailable", line.suite, key_of(line.cell), line.policy, line.reason):
            results.unavailable.append(line)
    elif isinstance(line, Record):
        if _again(seen, *line.identity):
            return f"{line.called} that is there already was skipped (the first one counts)"
        results.records.append(line)
    return ""


def _put_check(line: CheckRecord, results: Results, known: Mapping[str, type[Kind]]) -> None:
    check = {"name": line.name} | {name: value for name, value in line.line().items() if name not in ("type", "name")}
    own = {name: fields for each in known.values() for name, fields in each.checks.items()}
    if line.name not in own:
        results.checks.append(check)
        return
    missing = next((each for each in (*_OF_A_CELL, *own[line.name]) if each not in check), None)
    if missing:
        raise KeyError(missing)
    kept = results.own_checks
    same = (*_OF_A_CELL, "name", "policy")
    kept[:] = [each for each in kept if any(each.get(part) != check.get(part) for part in same)]
    kept.append(check)


_OF_A_CELL = ("suite", "cell", "seed", "dry_run")


def _again(seen: set[object], *key: object) -> bool:
    known = key in seen
    seen.add(key)
    return known
