"""The paper's own numbers, beside ours and in full."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.eval.report.words import THIN, cell_words, format_number, policy_words, signed
from ragorder.eval.running.cells import PaperLine
from ragorder.eval.running.record import Cell
from ragorder.eval.running.suite import Suite


def paper_heading(suite: Suite, cell: Cell | None) -> list[str]:
    """A column for each machine of the paper's."""
    return [f"paper: {_first(suite, hardware)[0]}{_on(hardware)}" for hardware in _machines(suite, cell)]


def paper_beside(suite: Suite, cell: Cell, policy: str | None, baseline: str) -> list[tuple[str, str]]:
    """For each column the figure and its change; without a policy all policies of the cell."""
    found = []
    for hardware in _machines(suite, cell if policy is not None else None):
        _, name = _first(suite, hardware)
        rows = [row for row in suite.paper_rows if row.hardware == hardware and row.matches(cell)]
        plain = next((number(row, name) for row in rows if row.policy == baseline), None)
        chosen = [row for row in rows if row.policy == policy or (policy is None and row.cell and row.policy != "none")]
        if not chosen:
            found.append(("–", ""))
        elif policy is not None:
            found.append((_shown(chosen[0], name), _change(chosen[0], name, plain, baseline)))
        else:
            labels = " → ".join(row.policy or row.label or "" for row in chosen)
            change = _change(chosen[-1], name, plain, baseline)
            found.append((" → ".join(_shown(row, name) for row in chosen), ", ".join(filter(None, (labels, change)))))
    return found


def paper_rows(suite: Suite) -> tuple[list[str], list[list[str]]]:
    paper = suite.paper_rows
    names = list(dict.fromkeys(name for row in paper for name in row.figures))
    several = len({row.hardware for row in paper}) > 1
    at = any(row.cell for row in paper)
    headings = [*["at"] * at, "policy", *["hardware"] * several, *(_heading(suite, name) for name in names)]
    decimals = {name: _decimals([n for row in paper if (n := number(row, name)) is not None]) for name in names}
    rows = []
    for row in paper:
        words = [*[cell_words(row.cell)] * at, row.label or policy_words(row.policy or ""), *[row.hardware] * several]
        rows.append([*words, *(_shown(row, name, decimals[name]) for name in names)])
    return headings, rows


def number(row: PaperLine, name: str) -> float | None:
    value = row.figures.get(name)
    return float(value) if isinstance(value, int | float) else None


def _machines(suite: Suite, cell: Cell | None) -> Sequence[str]:
    rows = [row for row in suite.paper_rows if (row.cell if cell is None else row.matches(cell))]
    return list(
        dict.fromkeys(row.hardware for row in rows if any(number(row, name) is not None for name in row.figures))
    )


def _first(suite: Suite, hardware: str) -> tuple[str, str]:
    rows = [row for row in suite.paper_rows if row.hardware == hardware]
    name = next(name for row in rows for name in row.figures if number(row, name) is not None)
    return _heading(suite, name), name


def _heading(suite: Suite, name: str) -> str:
    units = {row.unit for row in suite.paper_rows if name in row.figures and row.unit}
    known = ("_ms", "_us", "_percent", "_per_s", "_s")
    words = name.replace("_ms", ", ms").replace("_us", ", µs").replace("_percent", ", %").replace("_per_s", "/s")
    unit = f", {units.pop()}" if len(units) == 1 and not name.endswith(known) else ""
    return words.replace("_", " ") + unit


def _on(hardware: str) -> str:
    return f" ({hardware})" if hardware else ""


def _shown(row: PaperLine, name: str, decimals: int | None = None) -> str:
    value = row.figures.get(name)
    if value is None:
        return "–"
    return (
        value
        if isinstance(value, str)
        else format_number(value, decimals if decimals is not None else _decimals([value]))
    )


def _decimals(values: Sequence[float]) -> int:
    return max((len(f"{value:.3f}".rstrip("0").partition(".")[2]) for value in values), default=0)


def _change(row: PaperLine, name: str, plain: float | None, baseline: str) -> str:
    value = number(row, name)
    if row.policy == baseline:
        return "baseline"
    if value is None and (improved := number(row, "improvement_percent")) is not None:
        return f"improvement {format_number(improved)}{THIN}%"
    return f"{signed(100 * (value / plain - 1))}{THIN}%" if value is not None and plain else ""
