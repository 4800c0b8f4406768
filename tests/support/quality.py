"""Answer quality: corpora of a few questions, and what was measured of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragorder.eval.running.load import Progress, silent
from ragorder.eval.suites.quality.asking import serve_quality
from ragorder.eval.suites.quality.compare import summarise
from ragorder.eval.suites.quality.questions import QuestionSet
from ragorder.eval.suites.quality.questions import load_questions as load
from ragorder.eval.suites.quality.specs import AnswererSpec, QualityBench, QuestionsSpec

JSON = dict[str, Any]


def load_questions(name: str, data: Path | None = None, **options: Any) -> QuestionSet:
    return load(QuestionsSpec(dataset=name, data=data, **options))


def make_bench(name: str, data: Path, **options: Any) -> QualityBench:
    """A benchmark of the fields of both specifications and its own."""
    questions, engine = (
        {field: options.pop(field) for field in list(options) if field in model.model_fields}
        for model in (QuestionsSpec, AnswererSpec)
    )
    return QualityBench(QuestionsSpec(dataset=name, data=data, **questions), AnswererSpec(**engine), **options)


def run_quality(bench: QualityBench, progress: Progress = silent) -> list[JSON]:
    """The lines of all orders, and their comparison."""
    lines = list(serve_quality(bench, progress))
    return lines + summarise(lines, progress)


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def paragraphs(number: int) -> list[tuple[str, list[str]]]:
    """Two of the four are in every question; every other question has them the other way round."""
    found = [
        ("Radio City", ["Radio City is a radio station.", " It started in 1999."]),
        (f"First for Women {number}", [f"First for Women {number} started in 1989."]),
        ("Arthur's Magazine", ["Arthur's Magazine was started in 1844.", " It ended in 1846."]),
        (f"Echosmith {number}", [f"Echosmith {number} is a band."]),
    ]
    return found[:: -1 if number % 2 else 1]


def hotpot_folder(
    folder: Path, numbers: Sequence[int] = range(6), answers: Mapping[int, str] | None = None, times: int = 1
) -> Path:
    """A corpus of these questions, the text of each paragraph so many times."""
    folder.mkdir()
    texts = {title: "".join(sentences * times) for number in numbers for title, sentences in paragraphs(number)}
    written(folder / "documents.jsonl", *({"id": id, "title": id, "text": text} for id, text in texts.items()))
    asked = [
        {
            "id": f"5a7a{number}",
            "question": f"Which magazine was started first, number {number}?",
            "answers": [(answers or {}).get(number, "Arthur's Magazine")],
            "supporting": ["Arthur's Magazine", f"First for Women {number}"],
        }
        for number in numbers
    ]
    written(folder / "questions.jsonl", *asked)
    run = ({"id": f"5a7a{number}", "chunks": [title for title, _ in paragraphs(number)]} for number in numbers)
    written(folder / "run_own.jsonl", *run)
    return folder


def corpus_folder(folder: Path, questions: int = 4, **fields: Any) -> Path:
    """A corpus as in docs/corpora.md, of which each question has one document, ranked third of three."""
    folder.mkdir()
    texts = [{"id": f"d{number}", "title": f"Lamp {number}", "text": f"It has {number} watts."} for number in range(8)]
    asked = [
        {"id": f"q{number}", "question": f"How many watts has lamp {number}?", "answers": [f"{number} watts"]}
        | {"supporting": [f"d{number}"]}
        | fields
        for number in range(questions)
    ]
    run = [{"id": f"q{number}", "chunks": ["d7", "d6", f"d{number}"]} for number in range(questions)]
    for name, lines in (("documents", texts), ("questions", asked), ("run_mine", run)):
        written(folder / f"{name}.jsonl", *lines)
    return folder


def by_order(lines: Sequence[JSON], **cell: Any) -> dict[str, JSON]:
    quality = [line for line in lines if line["type"] == "quality"]
    return {line["policy"]: line for line in quality if cell.items() <= line["cell"].items()}


def checks(lines: Sequence[JSON], name: str) -> list[JSON]:
    return [line for line in lines if line["type"] == "check" and line["name"] == name]
