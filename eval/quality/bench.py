"""Every question once in every order, on one engine: does the order of the documents change the answers?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragorder.eval.bench import Progress
from ragorder.eval.capacity import Capacity
from ragorder.eval.quality.asking import Line, ask_all
from ragorder.eval.quality.base import QualityError
from ragorder.eval.quality.compare import summarise
from ragorder.eval.quality.dry_run import rehearse
from ragorder.eval.quality.models import RANDOM_WEIGHTS
from ragorder.eval.quality.orders import DEFAULT_ORDERS, Order
from ragorder.eval.quality.serving import answering
from ragorder.eval.quality.sources import load_questions
from ragorder.eval.retrieval import Retriever, make_retriever

__all__ = ["QualityBench", "run_quality", "serve_quality"]

_ENGINES = ("vllm", "torch", "openai")

Done = Callable[[Mapping[str, Any], str], bool]


@dataclass(frozen=True, slots=True)
class QualityBench:
    """What to ask whom. `data` to `retriever` are those of `load_questions`, `question_order` its order; a
    retriever may be given by its name.

    `orders` are policies with guards: "retrieval", "auto+keep_first=2", "auto+state_ranking" (see `Order`). Engine
    "vllm" or "torch" serves `model` in this process (None: random weights), "openai" asks `served_model` (None: the
    first one listed) of the server at `base_url`, with `concurrency` questions in flight; `model` is then the folder or
    the name on the Hub whose tokenizer counts tokens exactly, where there is one. The longest answer has
    `output_tokens`.

    `suite`, `suite_cell` (None: made of the rest) and `session` are written into the results as they are.

    A `dry_run` asks nobody: a stub says the accepted answer, and then nothing.
    """

    dataset: str
    data: Path | None = None
    config: str | None = None
    split: str | None = None
    evidence: Path | None = None
    aliases: Path | None = None
    limit: int | None = None
    question_order: str = "data"
    seed: int = 0
    top_k: int | None = None
    document_words: int | None = None
    retriever: Retriever | str | None = None
    orders: tuple[str, ...] = DEFAULT_ORDERS
    engine: str = "vllm"
    model: str | Path | None = None
    base_url: str | None = None
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    capacity: Capacity | None = None
    block_size: int | None = None
    output_tokens: int = 32
    concurrency: int = 1
    dry_run: bool = False
    suite: str = "quality"
    suite_cell: Mapping[str, Any] | None = None
    session: str | None = None

    def cell(self) -> Line:
        """What the results belong to, apart from seed and order."""
        if self.suite_cell is not None:
            return dict(self.suite_cell)
        capacity = self.capacity
        model = str(self.model) if self.model else None if self.engine == "openai" else RANDOM_WEIGHTS
        return {
            "dataset": self.dataset,
            "data": str(self.data) if self.data else None,
            "config": self.config,
            "split": self.split,
            "limit": self.limit,
            "question_order": self.question_order,
            "top_k": self.top_k,
            "document_words": self.document_words,
            "retriever": self.retriever if isinstance(self.retriever, str) else self.retriever and self.retriever.name,
            "engine": "stub" if self.dry_run else self.engine,
            "model": None if self.dry_run else self.served_model or model,
            "base_url": None if self.dry_run else self.base_url,
            "capacity_tokens": capacity and (f"{capacity.percent}%" if capacity.percent else capacity.tokens),
            "block_size": self.block_size,
            "output_tokens": self.output_tokens,
            "concurrency": self.concurrency,
        }

    def cells(self) -> list[Line]:
        """That of `cell`; in a dry run the one with the accepted answers, and the one with none."""
        said = [{"answers": "accepted"}, {"answers": "empty"}] if self.dry_run else [{}]
        return [self.cell() | each for each in said]


def _silent(description: str, steps: int) -> Callable[[], None]:
    return lambda: None


def _never(cell: Mapping[str, Any], policy: str) -> bool:
    return False


def run_quality(bench: QualityBench, progress: Progress = _silent) -> list[Line]:
    """The lines of `serve_quality`, then what they say together (`summarise`)."""
    lines = list(serve_quality(bench, progress))
    return lines + summarise(lines, progress)


def serve_quality(bench: QualityBench, progress: Progress = _silent, done: Done = _never) -> Iterator[Line]:
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
