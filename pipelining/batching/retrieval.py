"""Retrieval for batches of questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ragorder.pipelining.protocols import D, Q, Q_contra
from ragorder.pipelining.retrieval import Retrieval
from ragorder.pipelining.servers import end_all, in_thread, outcome_of

if TYPE_CHECKING:
    from ragorder.pipelining.batching.partitioned import PartitionedPass, PartitionedSearch
    from ragorder.pipelining.batching.pass_rows import PassRows

Q_co = TypeVar("Q_co", covariant=True)
D_co = TypeVar("D_co", covariant=True)


class SearchTask(Protocol[Q_co]):
    """A question of a batch.

    `checkpoint`: results from before a failure, a new object whenever there are more. `abandoned`: no result is needed;
    then `cancel_search` is called.
    """

    checkpoint: Any
    cancel_search: Callable[[], object] | None

    @property
    def question(self) -> Q_co: ...

    @property
    def abandoned(self) -> bool: ...


class BatchRetrieval(Protocol[Q_contra, D_co]):
    def search_batch(
        self, tasks: Sequence[SearchTask[Q_contra]], /
    ) -> AsyncGenerator[tuple[int, Sequence[D_co] | Exception], None]:
        """Yield (position of the task, documents in rank order or error) as soon as each is final.

        A raised error is that of all tasks without a result.
        """


class JoinableRetrieval(BatchRetrieval[Q_contra, D_co], Protocol[Q_contra, D_co]):
    """Lets requests join a running batch."""

    def search_joined(
        self, tasks: Sequence[SearchTask[Q_contra]], more: Callable[[], Sequence[SearchTask[Q_contra]]], /
    ) -> AsyncGenerator[tuple[int, Sequence[D_co] | Exception], None]:
        """Search as `search_batch`. `more` is called on the event loop whenever requests may join, and returns them;
        their positions follow all earlier ones."""


class ConcurrentRetrieval(Generic[Q, D]):
    """A batch of parallel searches: for `ContinuousIVF` and services."""

    def __init__(self, retrieval: Retrieval[Q, D]) -> None:
        self._retrieval = retrieval

    async def search_batch(
        self, tasks: Sequence[SearchTask[Q]], /
    ) -> AsyncGenerator[tuple[int, Sequence[D] | Exception], None]:
        positions = {}
        for position, task in enumerate(tasks):
            search = asyncio.create_task(self._search(task.question))
            positions[search], task.cancel_search = position, search.cancel
        left = set(positions)
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for search in sorted(done, key=positions.__getitem__):
                    yield positions[search], outcome_of(search, "search")
        finally:
            await end_all(left)

    async def _search(self, question: Q) -> Sequence[D]:
        async with aclosing(self._retrieval(question)) as stages:
            async for stage in stages:
                if stage.final:
                    return stage.documents
        raise RuntimeError("the retrieval ended without a final stage")


class PartitionedRetrieval(Generic[Q, D]):
    """A batch of questions that passes over the partitions of an index once (RAGDoll 4.2).

    `embed` returns vectors of shape (questions, dimensions), `document` takes an index id; both and each stage run in a
    thread. Other questions join at the next partition. After an error each continues, in any later batch, with the
    partitions that it still needs.
    """

    def __init__(
        self,
        search: PartitionedSearch,
        embed: Callable[[Sequence[Q]], Any],
        document: Callable[[int], D],
        *,
        top_k: int,
    ) -> None:
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        self.index = search
        self._embed = embed
        self._document = document
        self._top_k = top_k

    @property
    def partitions(self) -> int:
        return len(self.index.held)

    @property
    def resident(self) -> int:
        """See `PartitionedSearch`."""
        return self.index.resident

    def resize(self, partitions: int) -> None:
        """See `PartitionedSearch.resize`."""
        self.index.resize(partitions)

    def relieve(self) -> bool:
        return self.index.relieve()

    def search_batch(
        self, tasks: Sequence[SearchTask[Q]], /
    ) -> AsyncGenerator[tuple[int, Sequence[D] | Exception], None]:
        return self.search_joined(tasks, tuple)

    async def search_joined(
        self, tasks: Sequence[SearchTask[Q]], more: Callable[[], Sequence[SearchTask[Q]]], /
    ) -> AsyncGenerator[tuple[int, Sequence[D] | Exception], None]:
        entries = sorted((_Entry(position, task) for position, task in enumerate(tasks)), key=_Entry.is_new)
        passing = self.index.resume(await in_thread(self._begin, entries))
        count = len(tasks)
        try:
            while entries:
                wanted = [not entry.task.abandoned for entry in entries]
                found, left = await in_thread(self._advance, passing, wanted)
                for entry in entries:
                    entry.stages += 1
                for row, documents in found:
                    yield entries[row].position, documents
                entries = [entries[row] for row in left]
                if not entries or not passing.joinable or not (joining := more()):
                    continue
                joined = [_Entry(count + number, task) for number, task in enumerate(joining)]
                count += len(joined)
                begun, failed = await in_thread(self._join, passing, joined)
                entries += begun
                for entry, error in failed:
                    yield entry.position, error
        except Exception:
            for row, entry in enumerate(entries):
                # A new object means that there are more results.
                if entry.stages or entry.is_new():
                    entry.task.checkpoint = passing.rows.part([row])
            raise
        finally:
            passing.close()

    def _begin(self, entries: Sequence[_Entry[Q]]) -> list[PassRows]:
        parts = [entry.begun for entry in entries if entry.begun is not None]
        if new := [entry.task.question for entry in entries if entry.is_new()]:
            vectors = self._embed(new)
            if len(vectors) != len(new):
                raise ValueError(f"embed returned {len(vectors)} vectors for {len(new)} questions")
            parts.append(self.index.search(vectors, self._top_k).rows)
        return parts

    def _join(
        self, passing: PartitionedPass, entries: Sequence[_Entry[Q]]
    ) -> tuple[Sequence[_Entry[Q]], list[tuple[_Entry[Q], Exception]]]:
        begun = sorted(entries, key=_Entry.is_new)
        failed: list[tuple[_Entry[Q], Exception]] = []
        try:
            parts = self._begin(begun)
        except Exception:
            # One of them may have caused the error.
            parts, ordered, begun = [], begun, []
            for entry in ordered:
                try:
                    parts += self._begin([entry])
                    begun.append(entry)
                except Exception as error:
                    failed.append((entry, error))
        if parts:
            passing.join(parts)
        return begun, failed

    def _advance(
        self, passing: PartitionedPass, wanted: Sequence[bool]
    ) -> tuple[list[tuple[int, Sequence[D] | Exception]], list[int]]:
        stage = next(passing)
        ended = passing.rows.ended.tolist()
        found = [(row, self._documents(stage.ids[row])) for row, end in enumerate(ended) if end and wanted[row]]
        left = [row for row, end in enumerate(ended) if not end and wanted[row]]
        if left and len(left) < len(ended):
            passing.keep(left)
        return found, left

    def _documents(self, ids: Any) -> Sequence[D] | Exception:
        try:
            return [self._document(id) for id in ids.tolist() if id >= 0]
        except Exception as error:
            return error


class _Entry(Generic[Q]):
    """`begun`: results of earlier passes; `stages`: of this pass."""

    __slots__ = ("begun", "position", "stages", "task")

    def __init__(self, position: int, task: SearchTask[Q]) -> None:
        self.position = position
        self.task = task
        self.stages = 0
        # Read once: a request that is cancelled meanwhile loses its checkpoint.
        self.begun: PassRows | None = task.checkpoint

    def is_new(self) -> bool:
        return self.begun is None
