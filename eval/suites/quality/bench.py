"""The benchmark of answers: every question once in every order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ragorder.eval.running.progress import Progress, silent
from ragorder.eval.running.store import Store
from ragorder.eval.suites.quality.answering import OnceAnswers
from ragorder.eval.suites.quality.base import QualityError
from ragorder.eval.suites.quality.compare import summarise
from ragorder.eval.suites.quality.datasets import load_questions
from ragorder.eval.suites.quality.dry_run import dry_run
from ragorder.eval.suites.quality.orders import Order
from ragorder.eval.suites.quality.questions import ask_questions
from ragorder.eval.suites.quality.serving import serve_answers
from ragorder.eval.suites.quality.specs import Done, Line, QualityBench

__all__ = ["done_in", "run_quality", "serve_quality"]


def _never(cell: Mapping[str, Any], policy: str) -> bool:
    return False


def run_quality(bench: QualityBench, progress: Progress = silent) -> list[Line]:
    """The lines of `serve_quality`, and their comparison (`summarise`)."""
    lines = list(serve_quality(bench, progress))
    return lines + summarise(lines, progress)


def done_in(store: Store, bench: QualityBench) -> Done:
    key = {"suite": bench.suite, "seed": bench.questions.seed, "dry_run": bench.dry_run}
    return lambda cell, policy: store.has("quality", **key, cell=cell, policy=policy)


def serve_quality(bench: QualityBench, progress: Progress = silent, done: Done = _never) -> Iterator[Line]:
    """A "quality" line for each order once all questions are answered in it, unless `done(cell, order)`.

    Raises QualityError or CorpusError for questions that cannot be asked, EngineError for an engine that does not
    answer, ImportError naming what to install.
    """
    orders = [Order.parse(name) for name in bench.orders]
    todo = [[order for order in orders if not done(cell, order.name)] for cell in bench.cells]
    if not any(todo):
        return
    if bench.fuses and bench.engine.engine != "torch" and not bench.dry_run:
        raise QualityError("only the embedded engine takes documents over: give --engine torch")
    data = load_questions(bench.questions, progress)
    if any(order.place for order in orders):
        data = data.with_gold()
    if bench.dry_run:
        yield from dry_run(bench, data, orders, todo, progress)
        return
    with serve_answers(bench, data, progress) as (engine, builders, model):
        if isinstance(engine, OnceAnswers):
            for _ in ask_questions(bench, data, todo[0], engine, builders, model, silent, bench.cells[0]):
                pass
            engine.answer_missing(progress)
        yield from ask_questions(bench, data, todo[0], engine, builders, model, progress, bench.cells[0])
