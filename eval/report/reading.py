"""Results as the harness wrote them: DIR/results.jsonl (or .jsonl.xz), of any number of sessions, read as far as it can
be."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.eval.experiments.pipelining.lines import Pipelined
from ragorder.eval.experiments.replacement.lines import Replaced
from ragorder.eval.experiments.tiering.lines import Tiered
from ragorder.eval.report.statistics import need_scipy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "RESULTS",
    "Cell",
    "Key",
    "Quality",
    "ReportError",
    "Results",
    "Run",
    "Session",
    "Unavailable",
    "read_results",
]

# Columns of schema 1 that had another name.
_RENAMED = {"foretold_tokens": "predicted_tokens"}

RESULTS = "results.jsonl"
_SCHEMA = 1

Cell = Mapping[str, Any]
Key = tuple[tuple[str, str], ...]
"""A cell as something that can be compared: its parameters by name, as JSON."""


class ReportError(ValueError):
    """There is nothing to report on. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Session:
    """One invocation of `ragorder eval run`."""

    id: str
    started: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one engine over one trace, request by request."""

    session: str
    suite: str
    cell: Cell
    seed: int
    policy: str
    engine: Mapping[str, Any]
    warmup: int
    failures: int
    rows: Mapping[str, Any]
    throughput: Mapping[str, float] | None
    timeline: Any
    fallbacks: int = 0
    load_average: float | None = None

    def column(self, name: str) -> Floats | None:
        """The figures of all requests after the warm-up, NaN where there is none; None if none has any."""
        import numpy as np

        values = self.rows.get(name)
        if values is None:
            return None
        column = np.array([np.nan if value is None else value for value in values], dtype=float)[self.warmup :]
        return column if np.isfinite(column).any() else None

    @property
    def requests(self) -> int:
        """How many were served after the warm-up."""
        import numpy as np

        column = self.column("prompt_tokens")
        return 0 if column is None else int(np.isfinite(column).sum())


@dataclass(frozen=True, slots=True)
class Quality:
    """The answers' scores in one order, question by question."""

    session: str
    suite: str
    cell: Cell
    seed: int
    policy: str
    rows: Mapping[str, Any]
    dry_run: bool
    model: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A policy that could not be run, and why."""

    suite: str
    cell: Cell
    policy: str
    reason: str


@dataclass(slots=True)
class Results:
    """All that was measured, in the order in which it was written. `notes` say what could not be read.

    `quality_checks` are the checks on quality: of several on the same the last one, which knows most.
    """

    folder: Path
    sessions: list[Session] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    quality: list[Quality] = field(default_factory=list)
    pipelining: list[Pipelined] = field(default_factory=list)
    replacement: list[Replaced] = field(default_factory=list)
    tiering: list[Tiered] = field(default_factory=list)
    unavailable: list[Unavailable] = field(default_factory=list)
    checks: list[Mapping[str, Any]] = field(default_factory=list)
    quality_checks: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def suites(self) -> list[str]:
        """The names of all suites of which there is anything."""
        lines: list[Run | Quality | Pipelined | Replaced | Tiered | Unavailable] = [*self.runs, *self.quality]
        lines += [*self.pipelining, *self.replacement, *self.tiering, *self.unavailable]
        return list(dict.fromkeys(line.suite for line in lines))


def read_results(folder: Path) -> Results:
    """Raises ReportError if there are no results in the folder, OSError, ImportError naming the extra to install."""
    text = _text(folder)
    need_scipy()
    results = Results(folder)
    passed_over: Counter[str] = Counter()
    seen: set[object] = set()
    for line in text.splitlines():
        if line.strip():
            passed_over[_take(line, results, seen)] += 1
    del passed_over[""]
    results.notes += [f"{count} × {what}" for what, count in passed_over.items()]
    if not results.suites and not results.checks:
        raise ReportError(
            f"{folder / RESULTS} holds no measurement: run 'ragorder eval run SUITE -o {folder}' to its end"
        )
    return results


def _text(folder: Path) -> str:
    plain, packed = folder / RESULTS, folder / f"{RESULTS}.xz"
    if plain.is_file():
        return plain.read_text("utf-8", errors="replace")
    if packed.is_file():
        try:
            return lzma.decompress(packed.read_bytes()).decode("utf-8", errors="replace")
        except lzma.LZMAError as error:
            raise ReportError(f"{packed}: cannot be unpacked ({error})") from None
    where = "is no folder" if not folder.is_dir() else f"has no {RESULTS}"
    raise ReportError(f"{folder} {where}: give the folder that 'ragorder eval run SUITE -o DIR' wrote to")


def _take(line: str, results: Results, seen: set[object]) -> str:
    """Put a line where it belongs. Returns why it was passed over, or nothing."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return "a torn line (an interrupted run) was passed over"
    if not isinstance(entry, dict):
        return "a line that is no JSON object was passed over"
    kind = entry.get("type")
    try:
        return _READERS[kind](entry, results, seen) if kind in _READERS else f"a line of unknown type {kind!r}"
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return f"a line of type {kind!r} without all it must say was passed over"


def _session(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    if entry.get("schema", _SCHEMA) != _SCHEMA:
        results.notes.append(f"session {entry['session']} is of schema {entry['schema']}: this program knows {_SCHEMA}")
    results.sessions.append(
        Session(
            str(entry["session"]),
            str(entry.get("started", "")),
            dict(entry.get("arguments") or {}),
            dict(entry.get("environment") or {}),
        )
    )
    return ""


def _run(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    run = Run(
        session=str(entry.get("session", "")),
        suite=str(entry["suite"]),
        cell=dict(entry.get("cell") or {}),
        seed=int(entry.get("seed", 0)),
        policy=str(entry["policy"]),
        engine=dict(entry.get("engine") or {}),
        warmup=int(entry.get("warmup", 0)),
        failures=int(entry.get("failures", 0)),
        rows={
            _RENAMED.get(name, name): values
            for name, values in entry["rows"].items()
            if values is None or isinstance(values, list)
        },
        throughput=entry.get("throughput"),
        timeline=entry.get("timeline"),
        fallbacks=int(entry.get("fallbacks") or 0),
        load_average=entry.get("load_average"),
    )
    for name in run.rows:
        run.column(name)  # raises for what is no number
    if _again(seen, "run", run.suite, key_of(run.cell), key_of(run.engine), run.seed, run.policy):
        return "a run that is there already was passed over (the first one counts)"
    results.runs.append(run)
    return ""


def _quality(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    rows = entry.get("rows") or {}
    cell, dry_run = dict(entry.get("cell") or {}), bool(entry.get("dry_run", False))
    quality = Quality(
        str(entry.get("session", "")),
        str(entry["suite"]),
        cell,
        int(entry.get("seed", 0)),
        str(entry["policy"]),
        {name: values for name, values in rows.items() if isinstance(values, list)},
        dry_run,
        str((entry.get("model") or {}).get("name") or ""),
    )
    if _again(seen, "quality", quality.suite, key_of(cell), quality.seed, quality.policy, dry_run):
        return "a quality run that is there already was passed over (the first one counts)"
    results.quality.append(quality)
    return ""


def _pipelining(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    line = Pipelined.read(entry)
    if _again(seen, "pipelining", line.suite, key_of(line.cell), key_of(line.engine), line.seed, line.policy):
        return "a measurement of a pipeline that is there already was passed over (the first one counts)"
    results.pipelining.append(line)
    return ""


def _replacement(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    line = Replaced.read(entry)
    if _again(seen, "replacement", line.suite, key_of(line.cell), line.seed, line.policy):
        return "a simulation of tiers that is there already was passed over (the first one counts)"
    results.replacement.append(line)
    return ""


def _tiering(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    line = Tiered.read(entry)
    if _again(seen, "tiering", line.suite, key_of(line.cell), key_of(line.engine), line.seed, line.policy):
        return "a measurement of tiers that is there already was passed over (the first one counts)"
    results.tiering.append(line)
    return ""


def _unavailable(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    cell = dict(entry.get("cell") or {})
    missing = Unavailable(str(entry["suite"]), cell, str(entry["policy"]), str(entry.get("reason", "no reason given")))
    if not _again(seen, "unavailable", missing.suite, key_of(cell), missing.policy, missing.reason):
        results.unavailable.append(missing)
    return ""


def _check(entry: dict[str, Any], results: Results, seen: set[object]) -> str:
    name = str(entry["name"])
    check = {"name": name} | {k: v for k, v in entry.items() if k not in ("type", "name")}
    if name not in _ON_QUALITY:
        results.checks.append(check)
        return ""
    missing = next((each for each in (*_OF_A_CELL, *_ON_QUALITY[name]) if each not in check), None)
    if missing:
        raise KeyError(missing)
    known = results.quality_checks
    same = (*_OF_A_CELL, "name", "policy")
    known[:] = [each for each in known if any(each.get(part) != check.get(part) for part in same)]
    known.append(check)
    return ""


_OF_A_CELL = ("suite", "cell", "seed", "dry_run")
_ON_QUALITY = {
    "quality-verdict": ("measured", "reason", "note", "reordered", "message"),
    "quality-positions": ("policy", "places"),
    "quality-comparison": (
        "policy",
        "baseline",
        *("em", "em_baseline", "em_lost", "em_won", "em_p", "em_verdict"),
        *("f1_difference", "f1_low", "f1_high", "f1_verdict"),
    ),
}
"""What the report needs of each check on quality."""


def _again(seen: set[object], *key: object) -> bool:
    known = key in seen
    seen.add(key)
    return known


def key_of(cell: Cell) -> Key:
    return tuple(sorted((name, json.dumps(value, sort_keys=True)) for name, value in cell.items()))


_READERS = {
    "session": _session,
    "run": _run,
    "quality": _quality,
    "pipelining": _pipelining,
    "replacement": _replacement,
    "tiering": _tiering,
    "unavailable": _unavailable,
    "check": _check,
}
