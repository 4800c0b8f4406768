"""Every question once in every order, on one engine: does the order of the documents change the answers?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ragorder.eval.data.retrieval import make_retriever
from ragorder.eval.experiments.quality.asking import ask_all
from ragorder.eval.experiments.quality.base import QualityError
from ragorder.eval.experiments.quality.compare import summarise
from ragorder.eval.experiments.quality.dry_run import rehearse
from ragorder.eval.experiments.quality.orders import Order
from ragorder.eval.experiments.quality.serving import answering
from ragorder.eval.experiments.quality.sources import load_questions
from ragorder.eval.experiments.quality.specs import Done, Line, QualityBench
from ragorder.eval.running.progress import Progress, silent

__all__ = ["run_quality", "serve_quality"]

_ENGINES = ("vllm", "torch", "openai")


def _never(cell: Mapping[str, Any], policy: str) -> bool:
    return False


def run_quality(bench: QualityBench, progress: Progress = silent) -> list[Line]:
    """The lines of `serve_quality`, then what they say together (`summarise`)."""
    lines = list(serve_quality(bench, progress))
    return lines + summarise(lines, progress)


def serve_quality(bench: QualityBench, progress: Progress = silent, done: Done = _never) -> Iterator[Line]:
    """One line of type "quality" for each order, as soon as all questions were asked in it. Those for which
    `done(cell, order)` are passed over.

    Raises QualityError or CorpusError for what cannot be asked, EngineError for an engine that does not answer,
    ImportError naming what to install.
    """
    _check(bench)
    orders = [Order.parse(name) for name in bench.orders]
    if all(done(cell, order.name) for cell in bench.cells() for order in orders):
        return
    data = load_questions(
        bench.dataset,
        bench.data,
        config=bench.config,
        split=bench.split,
        evidence=bench.evidence,
        aliases=bench.aliases,
        limit=bench.limit,
        order=bench.question_order,
        seed=bench.seed,
        top_k=bench.top_k,
        document_words=bench.document_words,
        retriever=make_retriever(bench.retriever) if isinstance(bench.retriever, str) else bench.retriever,
        progress=progress,
    )
    if bench.dry_run:
        yield from rehearse(bench, data, orders, progress, done)
        return
    cell = bench.cell()
    orders = [order for order in orders if not done(cell, order.name)]
    if orders:
        with answering(bench, data, progress) as (engine, builders, model):
            yield from ask_all(bench, data, orders, engine, builders, model, progress, cell)


def _check(bench: QualityBench) -> None:
    if not bench.orders:
        raise QualityError("no order to ask in: name one at least")
    if len(set(bench.orders)) < len(bench.orders):
        raise QualityError("the same order twice: name each order once")
    if bench.engine not in _ENGINES:
        raise QualityError(f"unknown engine {bench.engine!r}: choose from {', '.join(_ENGINES)}")
    if bench.output_tokens < 1 or bench.concurrency < 1:
        raise QualityError("--output-tokens and --concurrency must be at least 1")
    if bench.dry_run:
        return
    if bench.engine == "openai" and not bench.base_url:
        raise QualityError("--engine openai needs --base-url, the address of the server")
    if bench.engine != "openai" and (bench.base_url or bench.served_model):
        raise QualityError("--base-url and --served-model go with --engine openai")
    if bench.engine != "openai" and bench.concurrency > 1:
        raise QualityError(
            f"--engine {bench.engine} answers one question at a time: --concurrency goes with --engine openai"
        )
