"""The report as one HTML file without network and script."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from ragorder.eval.report.canvas import COLOURS, need_matplotlib
from ragorder.eval.report.sections import Report
from ragorder.eval.running.progress import Progress, silent
from ragorder.extras import needs

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
    template = environment.from_string(files("ragorder.eval.report").joinpath("page.html").read_text("utf-8"))
    advance, pictures = progress("drawing", len(report.sections)), {}
    for section in report.sections:
        pictures[section.suite.name] = section.pictures
        advance()
    charts = [chart.picture() for chart in report.headline.charts]
    page: str = template.render(report=report, charts=charts, pictures=pictures, colours=COLOURS)
    return page
