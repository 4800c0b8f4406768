"""A trace at a simulated cloud, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from ragorder import Document, Ordering
from ragorder.benchmarks.chats.clouds.policies import POLICIES
from ragorder.benchmarks.chats.clouds.prompts import make_builder, make_document, make_question
from ragorder.benchmarks.chats.clouds.record import CloudsCell
from ragorder.clouds import CacheRules
from ragorder.eval.engines.cloud import CloudAnswer, SimulatedCloud

__all__ = ["serve"]


def serve(
    rankings: Sequence[Sequence[int]],
    cell: CloudsCell,
    rules: CacheRules,
    policy: str,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Rows of a `CloudsRecord`. Requests overlap: what one writes can be read from its first token on."""
    now = 0.0
    builder = make_builder(cell)
    documents = {number: make_document(number, cell.document_tokens) for ranking in rankings for number in ranking}
    asked = POLICIES[policy](rules, builder, lambda: now, cell.question_tokens)
    cloud = SimulatedCloud(rules)
    rng = random.Random(f"arrivals {seed}")
    events: list[tuple[float, int, Callable[[], None]]] = []
    numbers = count()
    rows: dict[str, list[int]] = {
        "prompt_tokens": [],
        "cached_tokens": [],
        "written_tokens": [],
        "predicted_tokens": [],
    }
    at_s = 0.0
    for number, ranking in enumerate(rankings):
        at_s += rng.expovariate(1 / cell.gap_s)
        while events and events[0][0] <= at_s:
            now, _, happen = heappop(events)
            happen()
        now = at_s
        ordering = asked.ordering([documents[each] for each in ranking])
        predicted = asked.predicted(ordering)
        answer = cloud.begin(asked.body(make_question(number, cell.question_tokens), ordering), now)

        first: Callable[[], None] = partial(_first_token, cloud, answer, ordering)
        last: Callable[[], None] = partial(asked.confirm, ordering, cloud.usage(answer))
        heappush(events, (now + cell.first_token_s, next(numbers), first))
        heappush(events, (now + max(cell.first_token_s, cell.answer_s), next(numbers), last))
        for name, tokens in zip(
            rows, (answer.prompt_tokens, answer.cached_tokens, answer.written_tokens, predicted), strict=True
        ):
            rows[name].append(tokens)
        advance()
    return rows


def _first_token(cloud: SimulatedCloud, answer: CloudAnswer, ordering: Ordering[Document]) -> None:
    cloud.first_token(answer)
    ordering.readable()
