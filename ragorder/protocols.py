"""Interfaces of orderers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from ragorder.ordering import Batch, Ordering
from ragorder.scope.request import USUAL, Lengths
from ragorder.settings import Settings
from ragorder.trie.histories import History

D = TypeVar("D")


class OrdersTurns(Protocol):
    """What a conversation's turns need of an orderer."""

    def order(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        history: History | None = None,
    ) -> Ordering[D]: ...

    def predict_cached_tokens(
        self,
        documents: Iterable[D],
        *,
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        history: History | None = None,
    ) -> tuple[int, int]: ...

    def has_lost(self, history: History, *, scope: Hashable = None) -> bool: ...


class OrdererLike(OrdersTurns, Protocol):
    """Interface of `Orderer` and its wrappers."""

    @property
    def settings(self) -> Settings: ...

    @property
    def degraded(self) -> tuple[str, ...]: ...

    def degrade(self, reason: str) -> None: ...

    def preview(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        history: History | None = None,
    ) -> list[D]: ...

    def holds_prefix(self, *, scope: Hashable = None) -> bool: ...

    def topic(self, documents: Iterable[Any], *, scope: Hashable = None) -> str | None: ...

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        max_wait: int | None = None,
    ) -> Batch[D]: ...

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]: ...
