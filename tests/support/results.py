"""Results of the harness, and the reports of docs/results, which `python -m support.results` renders."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def result_lines(folder: Path, type: str | None = None) -> list[dict[str, Any]]:
    """The lines of `results.jsonl`, of one type or all of them."""
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]
    return [line for line in found if type is None or line["type"] == type]


def titles() -> Mapping[str, str]:
    """The title of each report by its folder: that of its link on the page of all reports."""
    links = re.findall(r"\[([^]]+)\]\(([\w-]+)/report\.md\)", (RESULTS / "README.md").read_text("utf-8"))
    return {name: " ".join(title.split()) for title, name in links}


def render(folder: Path, title: str) -> str:
    """Return the report of a folder in Markdown. Its commands write to DIR, and find the corpora beside the clone."""
    from ragorder.eval.report import make_report, read_results, render_markdown
    from ragorder.eval.running.suite import load_suites

    text = render_markdown(make_report(read_results(folder), load_suites(), title=title))
    return re.sub(r"/\S+/(?=shared/data)", "../", text.replace(f"-o {folder}", "-o DIR"))


def main(names: Sequence[str]) -> None:
    """Write report.md into these folders of docs/results, or into all."""
    for name, title in titles().items():
        if not names or name in names:
            (RESULTS / name / "report.md").write_text(render(RESULTS / name, title), "utf-8")
            click.echo(name)


if __name__ == "__main__":
    main(sys.argv[1:])
