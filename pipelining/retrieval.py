"""Retrieval in stages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from ragorder.pipelining.protocols import D, Q
from ragorder.pipelining.servers import call, in_thread

if TYPE_CHECKING:
    from ragorder.pipelining.staged import Stage, StagedSearch


@dataclass(frozen=True, slots=True)
class Provisional(Generic[D]):
    """The best documents after a stage, in rank order."""

    documents: Sequence[D]
    final: bool = False


Retrieval = Callable[[Q], AsyncGenerator[Provisional[D], None]]
"""Yields a question's documents after each stage; the last stage is final."""


def plain_retrieval(retrieve: Callable[[Q], Sequence[D] | Awaitable[Sequence[D]]]) -> Retrieval[Q, D]:
    async def search(question: Q) -> AsyncGenerator[Provisional[D], None]:
        yield Provisional(await call(retrieve, question), final=True)

    return search


def staged_retrieval(
    search: StagedSearch, embed: Callable[[Q], Any], document: Callable[[int], D], *, top_k: int
) -> Retrieval[Q, D]:
    """Return a vector search in stages. `embed` returns a question's vector (or one row); it and each stage of an
    unshared search run in a thread. `document` takes an index's id."""

    async def stages(question: Q) -> AsyncGenerator[Provisional[D], None]:
        vector = await in_thread(embed, question)
        # Searches expect rows of vectors.
        vector = vector[None] if getattr(vector, "ndim", 2) == 1 else vector
        shared = getattr(search, "search_async", None)
        async with aclosing(stages_of(search, vector, top_k) if shared is None else shared(vector, top_k)) as found:
            async for stage in found:
                ids = stage.ids[0]
                yield Provisional([document(int(id)) for id in ids if id >= 0], stage.final)

    return stages


async def stages_of(search: StagedSearch, vector: Any, top_k: int) -> AsyncGenerator[Stage, None]:
    found = iter(await in_thread(search.search, vector, top_k))
    while (stage := await in_thread(next, found, None)) is not None:
        yield stage
