"""Searches that many callers submit, wherever they are scanned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ragorder.pipelining.search.handle import SearchHandle
from ragorder.pipelining.search.history import History
from ragorder.pipelining.search.request import one_row
from ragorder.pipelining.staged import Stage

__all__ = ["SharedSearch", "SubmitOptions"]

S = TypeVar("S")


class SubmitOptions(NamedTuple):
    """See `SharedSearch.submit`."""

    due: bool = True
    whole: bool = False
    fast: bool = True
    prefetch: bool = False


class SharedSearch(ABC, Generic[S]):
    """A `StagedSearch` whose searches share their time. `S`: a search as it was asked for, its arguments checked."""

    @abstractmethod
    def _read(self, queries: Any, k: int, params: Any, history: History | None = None) -> S: ...

    @abstractmethod
    def _join(self, request: S, options: SubmitOptions) -> SearchHandle: ...

    @abstractmethod
    def close(self) -> None:
        """Cancel what is in flight; what is submitted afterwards raises RuntimeError."""

    def search(self, queries: Any, k: int, *, params: Any = None) -> Iterator[Stage]:
        """See `StagedSearch.search`. `params`: a faiss.SearchParametersIVF, nprobe and selector of this search. Also
        raises TypeError for other parameters, ValueError if k exceeds the vectors of the index, or `max_codes` or
        `parallel_mode` rule out parts, and RuntimeError after `close`."""
        request = self._read(queries, k, params)

        def stages() -> Iterator[Stage]:
            handle = self._join(request, SubmitOptions())
            try:
                yield from handle.stages()
            finally:
                handle.cancel()

        return stages()

    def search_async(self, queries: Any, k: int, *, params: Any = None) -> AsyncGenerator[Stage, None]:
        """`search` for an event loop: no thread waits for a stage."""
        request = self._read(queries, k, params)

        async def stages() -> AsyncGenerator[Stage, None]:
            handle = self._join(request, SubmitOptions())
            try:
                async for stage in handle.stages_async():
                    yield stage
            finally:
                handle.cancel()

        return stages()

    def submit(
        self,
        query: Any,
        k: int,
        *,
        history: History | None = None,
        due: bool = True,
        whole: bool = False,
        fast: bool = True,
        prefetch: bool = False,
        params: Any = None,
    ) -> SearchHandle:
        """A search for one query, of shape (dimensions,) or (1, dimensions). Raises what `search` raises.

        - `history`: the earlier searches of this request; its clusters are visited first, and this search joins it. Not
          with a selector.
        - `due=False`: ahead of need, in the time that due searches leave
        - `whole`: in one piece
        - `fast=False`: on the cores alone; `prefetch`: its clusters are loaded into the fast tier
        """
        return self._join(self._read(one_row(query), k, params, history), SubmitOptions(due, whole, fast, prefetch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
