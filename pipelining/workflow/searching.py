"""Searches of workflows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias

from ragorder.pipelining.protocols import D
from ragorder.pipelining.retrieval import stages_of
from ragorder.pipelining.servers import call
from ragorder.pipelining.workflow.nodes import RefusedSearchError, UnusableValueError

if TYPE_CHECKING:
    from ragorder.pipelining.search import History
    from ragorder.pipelining.staged import Stage

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class WholeResult(Generic[D]):
    """A search function's documents, in the form of a final `Stage`."""

    documents: tuple[D, ...] = field(repr=False)
    number: int = 1
    stages: int = 1
    settled: int = 0
    distances: tuple[tuple[float, ...], ...] = ((),)
    ids: memoryview = field(default=memoryview(b""), repr=False)

    @property
    def final(self) -> bool:
        return True


Found: TypeAlias = "Stage | WholeResult[Any]"


class Handle(Protocol):
    """See `SearchHandle`."""

    @property
    def stage(self) -> Found | None: ...

    def promote(self) -> None: ...

    def cancel(self) -> bool: ...

    def stages_async(self) -> AsyncGenerator[Found, None]: ...


class Searcher(Generic[D]):
    """Embeds queries, searches, and fetches documents.

    - `search`: an object with `submit` (`ContinuousIVF`), a `StagedSearch`, or a function of a query and k that returns
      results, best first. Coroutine functions run on the event loop, others in a thread.
    - `embed`: None if the function takes the text.
    - `document`: of an id. None if the function returns documents.

    Raises ValueError for an index without `embed` or `document`.
    """

    def __init__(self, search: Any, embed: Callable[[str], Any] | None, document: Callable[[Any], D] | None) -> None:
        self._search = search
        self._embed = embed
        self._document = document
        self._shared = hasattr(search, "submit")
        self._staged = not self._shared and hasattr(search, "search")
        if self._shared or self._staged:
            for name, given in (("embed", embed), ("document", document)):
                if given is None:
                    raise ValueError(f"{name} is None: give it, since {type(search).__name__} takes vectors for ids")
        elif not callable(search):
            raise TypeError(f"search must be an index's search or a function, got {type(search).__name__}")
        self._checks = self._shared and _is_ours(search)

    async def vector(self, query: str) -> Any:
        return query if self._embed is None else await call(self._embed, query)

    def submit(
        self,
        vector: Any,
        k: int,
        *,
        history: History | None,
        due: bool = True,
        split: bool = True,
    ) -> Handle:
        if not self._shared:
            return _Whole(lambda: self._staged_search(vector, k) if self._staged else self._called(vector, k))
        options = {"history": history, "due": due} | ({} if split else {"whole": True})
        try:
            handle: Handle = self._search.submit(vector, k, **options)
        except (ValueError, RuntimeError) as error:
            if self._checks:
                raise RefusedSearchError(str(error)) from error
            raise
        return handle

    def begin(self, vector: Any, k: int, spawn: Spawn, **options: Any) -> Handle:
        """Begin a speculative search; one that is not shared runs in a task of `spawn`."""
        handle = self.submit(vector, k, due=False, **options)
        return _Begun(handle, spawn) if isinstance(handle, _Whole) else handle

    def history(self) -> History | None:
        if not self._shared:
            return None
        from ragorder.pipelining.search import History

        return History()

    def distance(self, one: Any, other: Any) -> float:
        if self._embed is None:
            return float(one != other)
        import numpy as np

        return float(np.linalg.norm(np.subtract(one, other)))

    def documents(self, stage: Found) -> tuple[D, ...]:
        if isinstance(stage, WholeResult):
            return stage.documents
        document = self._document
        # Stages come from an index, which requires `document`.
        return () if document is None else tuple(document(int(id)) for id in stage.ids[0] if id >= 0)

    async def _staged_search(self, vector: Any, k: int) -> AsyncGenerator[Found, None]:
        import numpy as np

        from ragorder.pipelining.staged import Stage

        async with aclosing(stages_of(self._search, np.reshape(vector, (1, -1)), k)) as stages:
            async for stage in stages:
                if not isinstance(stage, Stage):
                    name = type(self._search).__name__
                    raise UnusableValueError(
                        f"{name}.search gives no stages: search with ContinuousIVF(index), or a function"
                    )
                yield stage

    async def _called(self, vector: Any, k: int) -> AsyncGenerator[Found, None]:
        results = await call(self._search, vector, k)
        document = self._document
        if document is not None:
            results = [document(id) for id in _ids(results) if id != -1]
        elif isinstance(results, str | bytes) or not isinstance(results, Iterable):
            raise UnusableValueError(
                f"a search function without `document` returns documents, best first, got {type(results).__name__}"
            )
        yield WholeResult(tuple(results))


def _ids(results: Any) -> Sequence[Any]:
    if isinstance(results, list | tuple) and all(isinstance(id, str) for id in results):
        return results
    import numpy as np

    found = np.atleast_1d(results)
    if found.size and (found.dtype.kind not in "iu" or found.size != found.shape[-1]):
        raise UnusableValueError(
            f"a search function returns the ids of one query, best first, got {found.dtype} of shape {found.shape}"
        )
    ids: list[int] = found.reshape(-1).tolist()
    return ids


class _Whole:
    """Runs while it is read; each reading searches again."""

    stage: Found | None = None

    def __init__(self, search: Callable[[], AsyncGenerator[Found, None]]) -> None:
        self.stages_async = search

    def promote(self) -> None: ...

    def cancel(self) -> bool:
        return False


class _Begun:
    """Runs before it is read. If it has failed and was promoted, reading it searches again."""

    stage: Found | None = None

    def __init__(self, search: _Whole, spawn: Spawn) -> None:
        self._search = search
        self._due = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._task = spawn(self._run())
        self._task.add_done_callback(lambda _: self._notify())

    def promote(self) -> None:
        self._due = True

    def cancel(self) -> bool:
        return self._task.cancel()

    async def stages_async(self) -> AsyncGenerator[Found, None]:
        seen: Found | None = None
        while seen is None or not seen.final:
            changed, stage = self._changed, self.stage
            if stage is not None and stage is not seen:
                seen = stage
                yield stage
            elif self._task.done():
                break
            else:
                await changed.wait()
        else:
            return
        if not self._due:
            raise self._error or UnusableValueError("the search ended without a last stage")
        async with aclosing(self._search.stages_async()) as stages:
            async for stage in stages:
                yield stage

    async def _run(self) -> None:
        try:
            async with aclosing(self._search.stages_async()) as stages:
                async for stage in stages:
                    self.stage = stage
                    self._notify()
        except Exception as error:
            self._error = error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _is_ours(search: Any) -> bool:
    """Return whether its errors can be shown: ours name shapes, counts and settings, never a query."""
    from ragorder.pipelining.search import ContinuousIVF

    return isinstance(search, ContinuousIVF)
