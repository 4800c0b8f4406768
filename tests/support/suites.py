"""Suites: from the text of a file, run by the command, and told in a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ragorder.cli import main
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.suite import Suite, read_suite
from support.commands import run_command


def suite_of(text: str) -> Suite:
    return read_suite("mine", text, "mine.toml")


def assert_refused(text: str, old: str, new: str, said: str) -> None:
    """With this mistake, naming the file and the field."""
    assert old in text
    with pytest.raises(SuiteError) as refused:
        suite_of(text.replace(old, new, 1))
    assert str(refused.value).startswith("mine.toml: ") and said in str(refused.value)


def run_suites(folder: Path, *asked: Any, **cell: Any) -> str:
    """Return what `ragorder eval run` says of these suites and options, with `--set` for each parameter of a cell."""
    sets = [word for name, value in cell.items() for word in ("--set", f"{name}={value}")]
    done = run_command(main, "eval", "run", *asked, *sets, "-o", folder)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def page_of(folder: Path) -> str:
    """Return the report on a folder's results in Markdown."""
    done = run_command(main, "report", folder, "--markdown", "-")
    assert done.exit_code == 0, done.output
    return done.output


def write_corpus(
    folder: Path, texts: Iterable[str], questions: Iterable[Mapping[str, Any]], rankings: Iterable[Iterable[int]]
) -> Path:
    """Write documents d0, d1, …, questions q0, q1, … and what was retrieved for each; return the corpora's folder."""
    folder.mkdir(parents=True)
    files: dict[str, list[Mapping[str, Any]]] = {
        "documents": [{"id": f"d{number}", "title": f"d{number}", "text": text} for number, text in enumerate(texts)],
        "questions": [{"id": f"q{number}", **each} for number, each in enumerate(questions)],
        "run_top20": [
            {"id": f"q{number}", "chunks": [f"d{each}" for each in chunks]} for number, chunks in enumerate(rankings)
        ],
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records), "utf-8")
    return folder.parent
