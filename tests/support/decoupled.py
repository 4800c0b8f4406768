"""Servers of decoupled batches on the small index, or whose questions find a document of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragorder.pipelining import PartitionedSearch, plain_retrieval
from ragorder.pipelining.batching import DecoupledServer, PartitionedRetrieval
from ragorder.pipelining.workflow import NodeQuestion
from support.workflow_server import SlowEngine, answer_of, document, embed, question
from support.workflows import PlainPrompts


def retrieval_of(search: PartitionedSearch, embed: Any = embed) -> PartitionedRetrieval[NodeQuestion, str]:
    return PartitionedRetrieval(search, embed, document, top_k=3)


def picky(questions: Sequence[NodeQuestion]) -> Any:
    """An embedding model that takes no question of number 13."""
    if any("13" in each.text for each in questions):
        raise ValueError("not a number")
    return embed(questions)


def expected(index: Any, *numbers: int) -> list[str]:
    return [answer_of(index, question(number))[1] for number in numbers]


async def separate(asked: NodeQuestion) -> list[str]:
    return [f"about {asked.text}"]


def server_on(retrieval: Any, engine: Any = None, **options: Any) -> DecoupledServer[Any, Any, Any]:
    found = retrieval_of(retrieval) if isinstance(retrieval, PartitionedSearch) else retrieval
    return DecoupledServer(found, PlainPrompts(), engine or SlowEngine(), **options)


def plain_server(engine: Any = None, **options: Any) -> DecoupledServer[Any, Any, Any]:
    return server_on(plain_retrieval(separate), engine, **options)
