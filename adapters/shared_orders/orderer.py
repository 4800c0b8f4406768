"""An orderer whose orders other processes know."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, Unpack
from weakref import WeakMethod, finalize, ref

from ragorder._request import RequestReader, read_length
from ragorder.adapters.shared_orders.entry import SharedOrder, UnreadableError
from ragorder.adapters.shared_orders.log import OrderLog
from ragorder.batch import Batch
from ragorder.document import Estimate
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.settings import OrdererOptions, Settings
from ragorder.trie.histories import Question, Segment

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
    """An `Orderer` that shares its orders with those of other processes in front of the same engine.

        orderer = SharedOrderer("redis://127.0.0.1:6379/0", capacity_tokens=262_144)

    Orders go into a stream (`stream`: one for each engine) of a Valkey or Redis server, from where the other processes
    take them into their trees, those of the last 10,000 requests when they start. Ordering reads memory only. While the
    server is lost each process goes on with its own orders, as a `DegradedWarning` says once, and catches up later. In
    the stream are digests and lengths of documents, and scopes, no texts. With `at_once=False` an order is shared when
    it is given to `share`, as what may send another one does (`make_app(on_sent=orderer.share)`). Raises ValueError for
    a malformed URL, ImportError without ragorder[proxy].
    """

    _clones: tuple[ref[Orderer], ...] = ()

    def __init__(
        self,
        url: str,
        settings: Settings | None = None,
        *,
        stream: str = _STREAM,
        at_once: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(settings, **options)
        self._at_once = at_once
        self._share(url, stream)
        self._log.start()

    def order(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        prefix_tokens: int | None = None,
        behind: Iterable[Segment] | None = None,
        question: Question | None = None,
        permutation: Sequence[int] | None = None,
    ) -> Ordering[D]:
        """What stands behind a history is not shared: no other request has it in front of its documents."""
        given = list(documents)
        behind = None if behind is None else list(behind)
        ordering = super().order(
            given,
            waiting=waiting,
            scope=scope,
            suffix_tokens=suffix_tokens,
            prefix_tokens=prefix_tokens,
            behind=behind,
            question=question,
            permutation=permutation,
        )
        if self._at_once and not behind and not ordering.fallback:
            self.share(
                given, ordering.permutation, scope=scope, suffix_tokens=suffix_tokens, prefix_tokens=prefix_tokens
            )
        return ordering

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        max_wait: int | None = None,
    ) -> Batch[D]:
        given = [list(documents) for documents in requests]
        batch = super().order_batch(given, scope=scope, suffix_tokens=suffix_tokens, max_wait=max_wait)

        def start(place: int) -> Ordering[D]:
            ordering = batch[place]
            if self._at_once and not ordering.fallback:
                self.share(given[ordering.index], ordering.permutation, scope=scope, suffix_tokens=suffix_tokens)
            return ordering

        return Batch(batch.indices, start)

    def clone(self, **changes: Unpack[OrdererOptions]) -> Orderer:
        """Shares nothing, and takes over what other processes had served: a comparison must count that as well."""
        clone = super().clone(**changes)
        # Replaced, never changed: the thread of the log may be reading it.
        self._clones = (*(known for known in self._clones if known() is not None), ref(clone))
        return clone

    def share(
        self,
        documents: Sequence[Any],
        permutation: Sequence[int],
        *,
        scope: Hashable = None,
        suffix_tokens: int | None = None,
        prefix_tokens: int | None = None,
    ) -> None:
        """Tell the other processes that these documents are sent in the order of this permutation of their ranks."""
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
                    None if suffix_tokens is None else read_length(suffix_tokens),
                    None if prefix_tokens is None else read_length(prefix_tokens),
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
        """Share nothing more."""
        self._log.close()
        super().close()

    def after_fork(self) -> None:
        """The child is a process of its own, and connects with its first order."""
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
            lengths = order.suffix_tokens, order.prefix_tokens
            self._record(request, order.permutation, order.scope, *lengths)
            for known in self._clones:
                if (clone := known()) is not None:
                    # What moves no document would have served them as ranked.
                    permutation = None if clone.settings.max_displacement == 0 else order.permutation
                    clone._record(request, permutation, order.scope, *lengths)
        except Exception as error:
            # There is no caller in the thread of the log.
            self.degrade(f"orders of other processes cannot be applied ({type(error).__name__})")

    def _lose(self, reason: str) -> None:
        self.degrade(f"the server of shared orders is lost ({reason}): each process goes on with its own orders")


def _call(method: WeakMethod[Any], argument: object) -> None:
    if (call := method()) is not None:
        call(argument)
