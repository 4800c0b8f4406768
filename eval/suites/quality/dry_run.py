"""The benchmark without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.prompts import BuiltPrompts
from ragorder.eval.running.progress import Progress
from ragorder.eval.suites.quality.answering import StubAnswers
from ragorder.eval.suites.quality.base import QualityError
from ragorder.eval.suites.quality.datasets import QuestionSet
from ragorder.eval.suites.quality.orders import Order
from ragorder.eval.suites.quality.questions import Builders, ask_questions, corpus_tokens
from ragorder.eval.suites.quality.specs import Line, QualityBench
from ragorder.ordering import Ordering

__all__ = ["dry_run"]

_CAPACITY = Capacity(tokens=100_000)


def dry_run(
    bench: QualityBench, data: QuestionSet, orders: list[Order], todo: Sequence[list[Order]], progress: Progress
) -> Iterator[Line]:
    """Each order of `todo` (a list for each cell). Raises QualityError unless accepted answers score 100 and none score
    0."""
    spec, tokenizer = bench.engine, None
    if spec.model is not None:
        from ragorder.eval.engines.models import load_tokenizer

        tokenizer = load_tokenizer(spec.model)
    builders, scorer = Builders(tokenizer), data.dataset.scorer
    capacity_tokens = (spec.capacity_tokens or _CAPACITY).resolve(corpus_tokens(data, builders))
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
