"""Tables of a page as files to download: data URLs, so that the page needs no network and no script for them."""

from __future__ import annotations

import csv
import io
import json
import re
from urllib.parse import quote

from ragorder.eval.report.tables import Table

__all__ = ["csv_text", "csv_url", "file_name", "json_text", "json_url"]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


def csv_text(table: Table) -> str:
    """With columns of their own for notes and verdicts, where there are any."""
    file = io.StringIO()
    columns, rows = _cells(table)
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()


def json_text(table: Table) -> str:
    """A list of objects, their members named as the columns of the CSV."""
    columns, rows = _cells(table)
    return json.dumps([dict(zip(columns, row, strict=True)) for row in rows], ensure_ascii=False)


def csv_url(table: Table) -> str:
    return f"data:text/csv;charset=utf-8,{quote(csv_text(table))}"


def json_url(table: Table) -> str:
    return f"data:application/json;charset=utf-8,{quote(json_text(table))}"


def file_name(table: Table) -> str:
    return re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")[:60] or "figures"


def _cells(table: Table) -> tuple[list[str], list[list[str | float | int]]]:
    columns: list[str] = []
    parts: list[tuple[int, str]] = []
    for place, heading in enumerate(table.headings):
        used = [
            name
            for name in ("text", "note", "verdict")
            if name == "text" or any(getattr(r[place], name) for r in table.rows)
        ]
        for name in used:
            column = " ".join(heading.split()) + ("" if name == "text" else f" ({name})")
            taken = columns.count(column) + 1
            columns.append(column if taken == 1 else f"{column} {taken}")
            parts.append((place, name))
    return columns, [[_plain(getattr(row[place], name)) for place, name in parts] for row in table.rows]


def _plain(text: str) -> str | float | int:
    """A number without what only the eye needs; anything else as it stands."""
    shown = " ".join(text.replace("−", "-").split())
    if not _NUMBER.fullmatch(shown):
        return "" if shown == "–" else shown
    digits = shown.replace(",", "")
    return float(digits) if "." in digits else int(digits)
