"""Shared and plain searches of workflows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ragorder.pipelining.servers import call
from ragorder.pipelining.workflow.nodes import RefusedSearchError, UnusableValueError

if TYPE_CHECKING:
    from ragorder.pipelining.search import History
    from ragorder.pipelining.staged import Stage

__all__ = ["Handle", "Searcher"]

D = TypeVar("D")


class Handle(Protocol):
    """See `SearchHandle`."""

    @property
    def stage(self) -> Stage | None: ...

    def promote(self) -> None: ...

    def cancel(self) -> bool: ...

    def stages_async(self) -> AsyncGenerator[Stage, None]: ...


class Searcher(Generic[D]):
    """Embeds queries, searches, and fetches documents.

    `search`: an object with the `submit` of `ContinuousIVF`, a `StagedSearch`, or a function of a vector and k that
    returns ids, best first. Plain functions run in a thread.
    """

    def __init__(self, search: Any, embed: Callable[[str], Any], document: Callable[[int], D]) -> None:
        self._search = search
        self._embed = embed
        self._document = document
        self._shared = hasattr(search, "submit")
        self._tiered = getattr(search, "tier_gains", None) is not None
        self._checks = self._shared and _is_ours(search)

    async def vector(self, query: str) -> Any:
        return await call(self._embed, query)

    def submit(
        self,
        vector: Any,
        k: int,
        *,
        history: History | None,
        due: bool = True,
        split: bool = True,
        fast: bool = True,
        prefetch: bool = False,
    ) -> Handle:
        if not self._shared:
            return _WholeSearch(self._search, vector, k)
        options = {"history": history, "due": due} | ({} if split else {"whole": True})
        if self._tiered:
            options |= {"fast": fast, "prefetch": prefetch}
        try:
            handle: Handle = self._search.submit(vector, k, **options)
        except (ValueError, RuntimeError) as error:
            if self._checks:
                raise RefusedSearchError(str(error)) from error
            raise
        return handle

    def history(self) -> History | None:
        if not self._shared:
            return None
        from ragorder.pipelining.search import History

        return History()

    def distance(self, one: Any, other: Any) -> float:
        import numpy as np

        return float(np.linalg.norm(np.subtract(one, other)))

    def documents(self, stage: Stage) -> tuple[D, ...]:
        return tuple(self._document(int(id)) for id in stage.ids[0] if id >= 0)


class _WholeSearch:
    stage: Stage | None = None

    def __init__(self, search: Any, vector: Any, k: int) -> None:
        self._search = search
        self._vector = vector
        self._k = k

    def promote(self) -> None: ...

    def cancel(self) -> bool:
        return False

    async def stages_async(self) -> AsyncGenerator[Stage, None]:
        search = self._search
        yield await (asyncio.to_thread(self._last_stage) if hasattr(search, "search") else self._called())

    def _last_stage(self) -> Stage:
        import numpy as np

        from ragorder.pipelining.staged import Stage

        *_, stage = self._search.search(np.reshape(self._vector, (1, -1)), self._k)
        if not isinstance(stage, Stage):
            name = type(self._search).__name__
            raise UnusableValueError(f"{name}.search gives no stages: search with ContinuousIVF(index), or a function")
        return stage

    async def _called(self) -> Stage:
        import numpy as np

        from ragorder.pipelining.staged import Stage

        ids: Sequence[int] = await call(self._search, self._vector, self._k)
        found = np.atleast_1d(ids)
        if found.size and (found.dtype.kind not in "iu" or found.size != found.shape[-1]):
            raise UnusableValueError(
                f"a search function returns the ids of one query, best first, got {found.dtype} of shape {found.shape}"
            )
        found = found.astype(np.int64).reshape(1, -1)
        return Stage(1, 1, found, np.zeros(found.shape, np.float32))


def _is_ours(search: Any) -> bool:
    """Messages of our searches name shapes, counts and settings, never a query."""
    from ragorder.pipelining.search.shared import SharedSearch

    return isinstance(search, SharedSearch)
