"""Reports on results: console, HTML page and Markdown."""

from ragorder.eval.report.page import print_report, print_summary, render_html, render_markdown
from ragorder.eval.report.sections import Report, make_report
from ragorder.eval.running.reading import Results, ResultsError, read_results

__all__ = [
    "Report",
    "Results",
    "ResultsError",
    "make_report",
    "print_report",
    "print_summary",
    "read_results",
    "render_html",
    "render_markdown",
]
