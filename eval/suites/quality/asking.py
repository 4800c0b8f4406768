"""Every question asked once in every order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from ragorder.document import Document
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.prompts import BuiltPrompts
from ragorder.eval.running.load import Progress, silent
from ragorder.eval.running.store import Store
from ragorder.eval.suites.quality.answering import (
    CAPACITY,
    Answerer,
    Builders,
    ModelAnswer,
    OnceAnswers,
    StubAnswers,
    corpus_tokens,
    serve_answers,
)
from ragorder.eval.suites.quality.metrics import Scorer, extract_answer
from ragorder.eval.suites.quality.orders import GradedQuestion, Order, QualityError
from ragorder.eval.suites.quality.questions import QuestionSet, load_questions
from ragorder.eval.suites.quality.specs import Done, Line, ModelFacts, QualityBench
from ragorder.ordering import Ordering
from ragorder.prompt import Prompt, PromptBuilder

_TOKENS = ("prompt_tokens", "cached_tokens", "fused_tokens", "recomputed_tokens")


def done_in(store: Store, bench: QualityBench) -> Done:
    key = {"suite": bench.suite, "seed": bench.questions.seed, "dry_run": bench.dry_run}
    return lambda cell, policy: store.has("quality", **key, cell=cell, policy=policy)


def serve_quality(
    bench: QualityBench, progress: Progress = silent, done: Done = lambda cell, policy: False
) -> Iterator[Line]:
    """A "quality" line for each order once all questions are answered in it, unless `done(cell, order)`. Raises
    QualityError or CorpusError for questions that cannot be asked, EngineError for an engine that does not answer,
    ImportError naming what to install."""
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


def dry_run(
    bench: QualityBench, data: QuestionSet, orders: list[Order], todo: Sequence[list[Order]], progress: Progress
) -> Iterator[Line]:
    """Each order of `todo` (a list for each cell). Raises QualityError unless accepted answers score 100 and none score
    0."""
    spec, tokenizer = bench.engine, None
    if spec.model is not None:
        from ragorder.adapters.openai.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(spec.model)
    builders, scorer = Builders(tokenizer), data.dataset.scorer
    capacity_tokens = (spec.capacity_tokens or CAPACITY).resolve(corpus_tokens(data, builders))
    _check_prompts(bench, data, orders, builders, capacity_tokens, progress)
    wordless = {question.id for question in data.questions if scorer.is_empty(question.answers)}
    for cell, wanted, expected in zip(bench.cells, todo, (1, 0), strict=True):
        say = (lambda question: question.answers[0]) if expected else (lambda question: "")
        stub = StubAnswers(say, spec.block_size, capacity_tokens)
        for line in ask_questions(bench, data, wanted, stub, builders, None, progress, cell):
            rows = line["rows"]
            wrong = [
                id
                for id, em, f1 in zip(rows["id"], rows["em"], rows["f1"], strict=True)
                if id not in wordless and (em, f1) != (expected, expected)
            ]
            if wrong:
                raise QualityError(
                    f"{data.dataset.name}: the {cell['answers']} answer to question {wrong[0]!r} ({len(wrong)} in all) "
                    f"does not score {100 * expected}: are its accepted answers as the official script wants them?"
                )
            yield {**line, "wordless_answers": len(wordless)}


def _check_prompts(
    bench: QualityBench,
    data: QuestionSet,
    orders: list[Order],
    builders: Builders,
    capacity_tokens: int | None,
    progress: Progress,
) -> None:
    """Raises QualityError unless all orders' prompts have the same characters."""
    stub = StubAnswers(lambda question: "", bench.engine.block_size, capacity_tokens)
    advance = progress(f"{data.dataset.name}: prompts", len(data.questions) * len(orders))
    for order in orders:
        builder = builders(state_ranking=order.state_ranking)
        policy = order.make(stub, BuiltPrompts(builder), bench.questions.seed)
        for question in data.questions:
            ordering = order.arrange(policy, question, None)
            ordering.confirm()
            as_retrieved = Ordering(list(question.documents), range(len(question.documents)))
            texts = [Counter(builder.build(question.text, each).text) for each in (ordering, as_retrieved)]
            if texts[0] != texts[1] or sorted(ordering.permutation) != list(as_retrieved.permutation):
                raise QualityError(f"order {order.name!r} loses or changes documents of question {question.id!r}")
            advance()
