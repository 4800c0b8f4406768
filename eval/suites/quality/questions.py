"""Questions asked in an order of their documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from statistics import fmean
from typing import Any

from ragorder.document import Document
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.prompts import BuiltPrompts
from ragorder.eval.running.progress import Progress
from ragorder.eval.suites.quality.answering import Answerer, ModelAnswer
from ragorder.eval.suites.quality.base import GradedQuestion
from ragorder.eval.suites.quality.datasets import QuestionSet
from ragorder.eval.suites.quality.metrics import Scorer, extract_answer
from ragorder.eval.suites.quality.models import ModelFacts
from ragorder.eval.suites.quality.orders import Order
from ragorder.eval.suites.quality.specs import Line, QualityBench
from ragorder.ordering import Ordering
from ragorder.prompt import Prompt, PromptBuilder

__all__ = ["SYSTEM", "Builders", "ask_questions", "corpus_tokens"]

SYSTEM = (
    "Answer the question from the documents below. Give the answer itself and nothing else, as short as possible: "
    "a name, a number, a date, yes or no."
)
"""The system prompt of every question."""


_TOKENS = ("prompt_tokens", "cached_tokens", "fused_tokens", "recomputed_tokens")


class Builders:
    """Prompt builders without and with a note of the ranking."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._make = cache(
            lambda state_ranking: PromptBuilder(SYSTEM, tokenizer=tokenizer, state_ranking=state_ranking)
        )

    def __call__(self, *, state_ranking: bool) -> PromptBuilder:
        builder: PromptBuilder = self._make(state_ranking)
        return builder


def ask_questions(
    bench: QualityBench,
    data: QuestionSet,
    orders: Sequence[Order],
    engine: Answerer,
    builders: Builders,
    model: ModelFacts | None,
    progress: Progress,
    cell: Line,
) -> Iterator[Line]:
    """One order after another, each with an empty cache. Raises EngineError for an order without any answer."""
    advance = progress(f"{data.dataset.name}: asking", len(data.questions) * len(orders))
    for order in orders:
        scores = _ask(bench, data, order, engine, builders(state_ranking=order.state_ranking), advance)
        em, f1 = scores.columns["em"], scores.columns["f1"]
        if not em:
            raise EngineError(f"not one of {len(data.questions)} questions was answered: {scores.failure}")
        yield {
            "type": "quality",
            "session": bench.session,
            "suite": bench.suite,
            "cell": cell,
            "seed": bench.questions.seed,
            "policy": order.name,
            "engine": {
                "name": engine.name,
                "model": model and model.name,
                "block_size": engine.block_size,
                "capacity_tokens": engine.capacity_tokens,
            },
            "model": model and model.as_json(),
            "dry_run": bench.dry_run,
            "failures": scores.failures,
            "passed_over": dict(data.passed_over),
            "em": round(100 * fmean(em), 4),
            "f1": round(100 * fmean(f1), 4),
            "contains": round(100 * fmean(scores.columns["contains"]), 4),
            "rows": scores.rows,
        }


class _Scores:
    def __init__(self, scorer: Scorer) -> None:
        names = ("id", "answer", "em", "f1", "contains", *_TOKENS, "displacement", "moved_share", "gold_places")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.failures = 0
        self.failure = ""
        self._scorer = scorer

    @property
    def rows(self) -> dict[str, list[Any] | None]:
        # A column with a gap is not kept.
        return {name: None if None in column else column for name, column in self.columns.items()}

    def finish(self, question: GradedQuestion, ordering: Ordering[Document], answered: Future[ModelAnswer]) -> None:
        try:
            answer = answered.result()
        except RequestError as error:
            ordering.discard()
            self.failures += 1
            self.failure = self.failure or str(error)
            return
        ordering.confirm(answer.cached_tokens)
        text, permutation = extract_answer(answer.text), ordering.permutation
        moved = sum(place != rank for place, rank in enumerate(permutation))
        row = {
            "id": question.id,
            "answer": text,
            "em": (same := self._scorer.exact_match(text, question.answers)),
            "f1": round(self._scorer.f1(text, question.answers), 6),
            "contains": int(same or self._scorer.occurs(question.answers, text)),
            **{name: getattr(answer, name) for name in _TOKENS},
            "displacement": round(ordering.moves.places, 4),
            "moved_share": round(moved / max(1, len(permutation)), 4),
            "gold_places": [place for place, each in enumerate(ordering.documents) if each.id in question.gold],
        }
        for name, value in row.items():
            self.columns[name].append(value)


def _ask(
    bench: QualityBench,
    data: QuestionSet,
    order: Order,
    engine: Answerer,
    builder: PromptBuilder,
    advance: Callable[[], None],
) -> _Scores:
    engine.reset(reuse=order.reuses, fused=order.fused)
    policy = order.make(engine, BuiltPrompts(builder), bench.questions.seed)
    scores, concurrency = _Scores(data.dataset.scorer), bench.engine.concurrency
    in_flight: deque[tuple[GradedQuestion, Ordering[Document], Future[ModelAnswer]]] = deque()

    def finish_oldest() -> None:
        scores.finish(*in_flight.popleft())
        advance()

    with _submitter(engine, concurrency) as submit:
        for question in data.questions:
            # The oldest, so that no order depends on the speed of the answers.
            if len(in_flight) == concurrency:
                finish_oldest()
            suffix_tokens = builder.suffix_tokens(question.text) + engine.kept_output_tokens
            ordering = order.arrange(policy, question, suffix_tokens)
            in_flight.append((question, ordering, submit(question, builder.build(question.text, ordering))))
        while in_flight:
            finish_oldest()
    return scores


@contextmanager
def _submitter(engine: Answerer, concurrency: int) -> Iterator[Callable[[GradedQuestion, Prompt], Future[ModelAnswer]]]:
    if concurrency > 1:
        with ThreadPoolExecutor(concurrency) as pool:
            yield lambda question, prompt: pool.submit(engine.answer, question, prompt)
        return

    def ask(question: GradedQuestion, prompt: Prompt) -> Future[ModelAnswer]:
        answered: Future[ModelAnswer] = Future()
        try:
            answered.set_result(engine.answer(question, prompt))
        except RequestError as error:
            answered.set_exception(error)
        return answered

    yield ask


def corpus_tokens(data: QuestionSet, builders: Builders) -> int:
    builder = builders(state_ranking=False)
    documents = {document.id: document for question in data.questions for document in question.documents}
    return sum(builder.document_tokens(document) for document in documents.values())
