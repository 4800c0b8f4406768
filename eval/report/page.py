"""The report as one HTML file, which needs no network."""

from __future__ import annotations

import csv
import io
import json
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from urllib.parse import quote

from ragorder.common.extras import needs
from ragorder.eval.report.canvas import COLOURS, need_matplotlib
from ragorder.eval.report.sections import Report
from ragorder.eval.report.tables import Table
from ragorder.eval.running.progress import Progress, silent

__all__ = ["csv_text", "csv_url", "file_name", "json_text", "json_url", "render_html"]

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


def render_html(report: Report, progress: Progress = silent) -> str:
    """Raises ImportError naming the extra."""
    need_matplotlib()
    with needs("eval", "the report"):
        import jinja2
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"csv_url": csv_url, "json_url": json_url, "file_name": file_name}
    template = environment.from_string(_own("page.html"))
    advance, pictures = progress("drawing", len(report.sections)), {}
    for section in report.sections:
        pictures[section.suite.name] = list(section.pictures)
        advance()
    charts, script = [chart.picture() for chart in report.headline.charts], _own("page.js")
    opening = None if charts else next((each for each in report.sections if pictures[each.suite.name]), None)
    if opening is not None:
        # A report without a headline begins with its first picture.
        charts = [pictures[opening.suite.name].pop(0)]
    page: str = template.render(
        report=report,
        charts=charts,
        opening=opening.suite if opening is not None else None,
        pictures=pictures,
        colours=COLOURS,
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )
    return page


def _own(name: str) -> str:
    return files("ragorder.eval.report").joinpath(name).read_text("utf-8")
