"""Console tables of answer quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_quality"]

Line = Mapping[str, Any]


def print_quality(lines: Sequence[Line], checks: Sequence[Line]) -> None:
    """A table and the verdict for each (suite, cell, seed)."""
    console = Console()
    for verdict in (check for check in checks if check["name"] == "quality-verdict"):
        rows = {line["policy"]: line for line in lines if _same(line, verdict)}
        compared = {
            check["policy"]: check
            for check in checks
            if check["name"] == "quality-comparison" and _same(check, verdict)
        }
        console.print(_table(verdict, list(rows.values()), compared))
        console.print(verdict["message"], style="bold", markup=False)


def _same(line: Line, other: Line) -> bool:
    return all(line[field] == other[field] for field in ("suite", "cell", "seed"))


def _table(verdict: Line, rows: Sequence[Line], compared: Mapping[str, Line]) -> Table:
    cell, first = verdict["cell"], rows[0]
    said = {"accepted": ", told the accepted answer", "empty": ", told nothing"}.get(cell.get("answers"), "")
    model = (first["model"] or {}).get("name") or "no model"
    table = Table(
        title=f"{cell.get('dataset', verdict['suite'])}, {model}{said}: {len(first['rows']['id']):,} questions"
    )
    table.add_column("order", style="bold", no_wrap=True)
    headings = ["reordered", "EM %", "F1 %"] + ["EM lost, won", "p", "F1 difference (95 %)"] * bool(compared)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{100 * verdict['reordered'][row['policy']]:.0f} %", f"{row['em']:.1f}", f"{row['f1']:.1f}"]
        check = compared.get(row["policy"])
        if check is not None:
            interval = f"{check['f1_difference']:+.1f} ({check['f1_low']:+.1f} to {check['f1_high']:+.1f})"
            cells += [f"{check['em_lost']}, {check['em_won']}", f"{check['em_p']:.2g}", interval]
        table.add_row(row["policy"], *cells)
    return table
