"""The interface of an orderer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from ragorder.batch import Batch
from ragorder.ordering import Ordering
from ragorder.settings import Settings

__all__ = ["OrdererLike"]

D = TypeVar("D")


class OrdererLike(Protocol):
    """What adapters need of an orderer: `Orderer`, or a wrapper around it. Its methods are described there."""

    @property
    def settings(self) -> Settings: ...

    @property
    def degraded(self) -> tuple[str, ...]: ...

    def degrade(self, reason: str) -> None: ...

    def order(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        prefix_tokens: int | None = None,
    ) -> Ordering[D]: ...

    def preview(
        self, documents: Iterable[D], *, waiting: Sequence[Iterable[D]] = (), scope: Hashable = None
    ) -> list[D]: ...

    def predict_cached_tokens(
        self, documents: Iterable[D], *, scope: Hashable = None, prefix_tokens: int | None = None
    ) -> tuple[int, int]: ...

    def holds_prefix(self, *, scope: Hashable = None) -> bool: ...

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        max_wait: int | None = None,
    ) -> Batch[D]: ...

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]: ...
