"""Orderer that shares its orders with other processes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, Unpack
from weakref import WeakMethod, finalize, ref

from ragorder.adapters.shared_orders.log import OrderLog, SharedOrder, UnreadableError
from ragorder.document import Estimate
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.scope.request import USUAL, Lengths, RequestReader, read_length
from ragorder.settings import OrdererOptions, Settings
from ragorder.trie.histories import History

__all__ = ["SharedOrderer"]

D = TypeVar("D")

_STREAM = "ragorder:orders"
_NOT_SHARED = (
    "orders are not shared whose keys or scope are neither strings nor bytes of at most 1,024 nor integers of 64 bits, "
    "nor those of more than 4,096 documents or 10,000,000 tokens"
)


class _Document(NamedTuple):
    key: Hashable
    token_count: int


class SharedOrderer(Orderer):
    """An `Orderer` that shares its orders with other processes of the same engine.

        orderer = SharedOrderer("redis://127.0.0.1:6379/0", capacity_tokens=262_144)

    Orders go into a stream (`stream`: one for each engine) of a Valkey or Redis server, without texts. The other
    processes add them to their trees; a new process reads those of the last 10,000 requests. Ordering reads memory
    only. Without the server each process continues alone, with one `DegradedWarning`, and catches up later. With
    `at_once=False` only `share` shares an order (`make_app(on_sent=orderer.share)`). Raises ValueError for a malformed
    URL, ImportError without ragorder[proxy].
    """

    _clones: tuple[ref[Orderer], ...] = ()

    def __init__(
        self, url: str, settings: Settings | None = None, *, stream: str = _STREAM, at_once: bool = True, **options: Any
    ) -> None:
        super().__init__(settings, **options)
        self._at_once = at_once
        self._share(url, stream)
        self._log.start()

    def _ordered(
        self, documents: list[D], ordering: Ordering[D], scope: Hashable, lengths: Lengths, history: History | None
    ) -> None:
        # No other request has the documents after the same history.
        if self._at_once and not (history is not None and history.segments):
            self.share(documents, ordering.permutation, scope=scope, lengths=lengths)

    def clone(self, **changes: Unpack[OrdererOptions]) -> Orderer:
        """Return an orderer that shares nothing, and applies the orders of other processes for a fair comparison."""
        clone = super().clone(**changes)
        # Replaced, never changed: the thread of the log may be reading it.
        self._clones = (*(known for known in self._clones if known() is not None), ref(clone))
        return clone

    def share(
        self, documents: Sequence[Any], permutation: Sequence[int], *, scope: Hashable = None, lengths: Lengths = USUAL
    ) -> None:
        """Share that these documents are sent in this order of their ranks."""
        given: list[Any] = list(documents)
        if not given:
            return
        try:
            # As given: repeated documents are numbered by each reader.
            keys = self._reader.read_keys(given)
            request = self._reader.read(given)
            self._log.append(
                SharedOrder(
                    self._log.process,
                    scope,
                    keys,
                    list(map(int, request.tokens)),
                    list(permutation),
                    request.estimated,
                    None if lengths.suffix is None else read_length(lengths.suffix),
                    None if lengths.prefix is None else read_length(lengths.prefix),
                )
            )
        except (OverflowError, UnicodeEncodeError, UnreadableError):
            self.degrade(_NOT_SHARED)
        except Exception as error:
            self._report(error)

    @property
    def log(self) -> OrderLog:
        return self._log

    def close(self) -> None:
        self._log.close()
        super().close()

    def after_fork(self) -> None:
        super().after_fork()
        self._share(*self._shared)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "shared": self._shared, "at_once": self._at_once}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared, at_once = state.pop("shared"), state.pop("at_once")
        super().__setstate__(state)
        self._at_once = at_once
        self._share(*shared)

    def _share(self, url: str, stream: str) -> None:
        self._shared = url, stream
        apply, lose = WeakMethod(self._apply), WeakMethod(self._lose)
        self._log = OrderLog(url, stream, partial(_call, apply), partial(_call, lose))
        # The threads of an orderer that nothing refers to would go on.
        finalize(self, self._log.close)
        self._reads_shared = RequestReader(None, None, None, None, by_group=False)

    def _apply(self, order: SharedOrder) -> None:
        tokens = map(Estimate, order.tokens) if order.estimated else order.tokens
        try:
            request = self._reads_shared.read(list(map(_Document, order.keys, tokens)))
            lengths = Lengths(order.prefix_tokens, order.suffix_tokens)
            self._record(request, order.permutation, order.scope, lengths)
            for known in self._clones:
                if (clone := known()) is not None:
                    # What moves no document would have served them as ranked.
                    permutation = None if clone.settings.max_displacement == 0 else order.permutation
                    clone._record(request, permutation, order.scope, lengths)
        except Exception as error:
            # There is no caller in the thread of the log.
            self.degrade(f"orders of other processes cannot be applied ({type(error).__name__})")

    def _lose(self, reason: str) -> None:
        self.degrade(f"the server of shared orders is lost ({reason}): each process goes on with its own orders")


def _call(method: WeakMethod[Any], argument: object) -> None:
    if (call := method()) is not None:
        call(argument)
