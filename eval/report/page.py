"""The report as one HTML file, which needs no network."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

from ragorder.common.extras import needs
from ragorder.eval.report.canvas import COLOURS, need_matplotlib
from ragorder.eval.report.downloads import csv_url, file_name, json_url
from ragorder.eval.report.sections import Report
from ragorder.eval.running.progress import Progress, silent

__all__ = ["need_jinja", "render_html"]


def need_jinja() -> Any:
    """Raises ImportError naming the extra."""
    with needs("eval", "the report"):
        import jinja2
    return jinja2


def render_html(report: Report, progress: Progress = silent) -> str:
    """Raises ImportError naming the extra."""
    need_matplotlib()
    jinja2 = need_jinja()
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
