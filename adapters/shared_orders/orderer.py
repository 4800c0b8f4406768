"""Orders shared by a stream of Valkey or Redis."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event, Lock, Thread
from time import sleep
from typing import Any, NamedTuple, TypeVar, Unpack
from weakref import WeakMethod, finalize, ref

import msgspec

from ragorder.adapters.structs import readable_by_threads
from ragorder.common.counts import Estimate
from ragorder.common.extras import needs
from ragorder.common.lru_cache import LRUCache
from ragorder.errors import RagorderError
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.scope.request import USUAL, Lengths, RequestReader, read_length
from ragorder.settings import OrdererOptions, Settings
from ragorder.trie.histories import History

D = TypeVar("D")

# Limits on the data that a writer of the log can make a reader keep.
_MOST_DOCUMENTS = 4096
_MOST_TOKENS = 10_000_000
_LONGEST_NAME = 1024
_MOST_BYTES = 1 << 20
LENGTH = 10_000
"""Approximate number of orders kept for new processes."""
_FIELD = b"order"
# Number of an order in its process: identifies orders written or read twice.
_NUMBER = b"number"
_PROCESSES = 4096
_AT_ONCE = 256
_BLOCK_MS = 1000
# Each round trip and each waking of a thread costs as much as ten orders: orders of this time are sent together. An
# engine takes longer to compute a request.
_GATHERED_S = 0.01
# A server that does not answer in this time counts as lost; far more than a read blocks.
_TIMEOUTS = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0}
_RETRY_S = 1.0
_START = b"0-0"
_STREAM = "ragorder:orders"
_NOT_SHARED = (
    "orders are not shared whose keys or scope are neither strings nor bytes of at most 1,024 nor integers of 64 bits, "
    "nor those of more than 4,096 documents or 10,000,000 tokens"
)


class UnreadableError(RagorderError, ValueError):
    """Not an order of this version."""


@readable_by_threads
class SharedOrder(msgspec.Struct, frozen=True, array_like=True):
    """Keys and lengths of a request's documents by rank, and the rank at each position."""

    process: bytes
    scope: Any
    keys: list[Any]
    tokens: list[int]
    permutation: list[int]
    estimated: bool = False
    suffix_tokens: int | None = None
    prefix_tokens: int | None = None

    def encode(self) -> bytes:
        """Raises UnreadableError, OverflowError or UnicodeEncodeError."""
        _check(self)
        return _bounded(msgspec.msgpack.encode(self))


def read_order(content: bytes) -> SharedOrder:
    try:
        order = msgspec.msgpack.decode(_bounded(content), type=SharedOrder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UnreadableError("not an order") from None
    _check(order)
    return order


def is_shareable(key: Hashable) -> bool:
    if isinstance(key, str | bytes):
        return type(key) in (str, bytes) and len(key) <= _LONGEST_NAME
    return type(key) is int


def _bounded(content: bytes) -> bytes:
    if len(content) > _MOST_BYTES:
        raise UnreadableError(f"an order has at most {_MOST_BYTES:,} bytes")
    return content


def _check(order: SharedOrder) -> None:
    count = len(order.keys)
    numbers = [*order.tokens, order.suffix_tokens or 0, order.prefix_tokens or 0]
    fits = count == len(order.tokens) <= _MOST_DOCUMENTS and sorted(order.permutation) == list(range(count))
    if not fits or min(numbers) < 0 or sum(numbers) > _MOST_TOKENS or not all(map(is_shareable, order.keys)):
        raise UnreadableError("not an order of these documents")
    if not is_shareable(order.process) or not (order.scope is None or is_shareable(order.scope)):
        raise UnreadableError("not a writer and a scope")


class OrderLog:
    """Appends orders, and passes each one of another process once to `apply`, which must not raise.

    Nothing waits for the server: while it is lost, `LENGTH` orders are kept, and `lost` gets the error's type. Raises
    ValueError for a malformed URL, ImportError without ragorder[proxy].
    """

    def __init__(
        self, url: str, stream: str, apply: Callable[[SharedOrder], None], lost: Callable[[str], None]
    ) -> None:
        with needs("proxy", "sharing orders"):
            import redis
        self.process = secrets.token_bytes(8)
        self.appended = self.applied = self.unreadable = 0
        self._errors: Any = (redis.RedisError, OSError)
        self._connect: Callable[[], Any] = lambda: redis.Redis.from_url(url, protocol=2, **_TIMEOUTS)
        # Raises errors in the URL at once.
        with self._connect() as client:
            try:
                client.connection_pool.make_connection()
            except (TypeError, *self._errors):
                raise ValueError("the URL has an option unknown to redis-py: leave it out") from None
        self._stream = stream
        self._apply = apply
        self._lost = lost
        self._waiting: deque[bytes] = deque(maxlen=LENGTH)
        self._unsent: list[tuple[int, bytes]] = []
        self._numbers = count(1)
        self._known: LRUCache[int] = LRUCache(_PROCESSES)
        self._news = Event()
        self._stopped = False
        self._started = False
        self._starting = Lock()
        self.last = _START

    def start(self) -> None:
        with self._starting:
            if self._started or self._stopped:
                return
            self._started = True
            for name, work in (("ragorder-log-writer", self._write), ("ragorder-log-reader", self._read)):
                Thread(target=self._again, args=(work,), name=name, daemon=True).start()

    def append(self, order: SharedOrder) -> None:
        """Above `LENGTH` the oldest order is dropped."""
        self._waiting.append(order.encode())
        self._news.set()
        if not self._started:
            self.start()

    def close(self) -> None:
        """End the threads after their next wait. Takes no lock: a finaliser calls it."""
        self._stopped = True

    def _again(self, work: Callable[[Any], None]) -> None:
        while not self._stopped:
            client = self._connect()
            try:
                work(client)
            except Exception as error:
                # The thread continues after any error, whose message may quote an address with a password.
                self._lost(type(error).__name__)
                sleep(_RETRY_S)
            finally:
                with suppress(*self._errors):
                    client.close()

    def _write(self, client: Any) -> None:
        while not self._stopped:
            self._news.wait(_RETRY_S)
            self._news.clear()
            while self._fill():
                with client.pipeline(transaction=False) as pipeline:
                    for number, entry in self._unsent:
                        fields = {_FIELD: entry, _NUMBER: number}
                        pipeline.xadd(self._stream, fields, maxlen=LENGTH, approximate=True)
                    pipeline.execute()
                self.appended += len(self._unsent)
                self._unsent = []
            sleep(_GATHERED_S)

    def _fill(self) -> bool:
        while self._waiting and len(self._unsent) < _AT_ONCE:
            self._unsent.append((next(self._numbers), self._waiting.popleft()))
        return bool(self._unsent)

    def _read(self, client: Any) -> None:
        # Another server may have answered at this address since, with orders between those that were read.
        self.last = _START
        while not self._stopped:
            read = client.xread({self._stream: self.last}, count=_AT_ONCE, block=_BLOCK_MS)
            for _, entries in read or ():
                for entry in entries:
                    self._take(*entry)
                if len(entries) < _AT_ONCE:
                    sleep(_GATHERED_S)
            if not read and self._ends_before(client):
                self.last = _START

    def _ends_before(self, client: Any) -> bool:
        """Return True if the stream has started over and ends before the last entry read."""
        newest = client.xrevrange(self._stream, count=1)
        return _place(newest[0][0] if newest else _START) < _place(self.last)

    def _take(self, id: bytes, fields: Any) -> None:
        self.last = id
        try:
            order, number = read_order(fields[_FIELD]), int(fields[_NUMBER])
        except (UnreadableError, KeyError, TypeError, ValueError):
            self.unreadable += 1
            return
        if order.process == self.process or self._is_known(order.process, number):
            return
        self._apply(order)
        self.applied += 1

    def _is_known(self, process: bytes, number: int) -> bool:
        if number <= (self._known.get(process) or 0):
            return True
        self._known.put(process, number)
        return False


def _place(id: bytes) -> tuple[int, int]:
    milliseconds, _, number = id.partition(b"-")
    return int(milliseconds), int(number)


class _Document(NamedTuple):
    key: Hashable
    token_count: int


class SharedOrderer(Orderer):
    """An `Orderer` that shares its orders with other processes of the same engine.

        orderer = SharedOrderer("redis://127.0.0.1:6379/0", capacity_tokens=262_144)

    Orders, without texts, go through a `stream` for each engine on a Valkey or Redis server into the other processes'
    trees; a new process reads the last 10,000. Ordering never waits for the server: without it each process continues
    alone, with one `DegradedWarning`, and catches up later. With `at_once=False` only `share` shares an order
    (`make_app(on_sent=orderer.share)`). Raises as `OrderLog`.
    """

    _clones: tuple[ref[Orderer], ...] = ()

    def __init__(
        self, url: str, settings: Settings | None = None, *, stream: str = _STREAM, at_once: bool = True, **options: Any
    ) -> None:
        super().__init__(settings, **options)
        self._at_once = at_once
        self._share(url, stream)
        self.log.start()

    def _ordered(
        self, documents: list[D], ordering: Ordering[D], scope: Hashable, lengths: Lengths, history: History | None
    ) -> None:
        # No other request has the documents after the same history.
        if self._at_once and not (history is not None and history.segments):
            self.share(documents, ordering.permutation, scope=scope, lengths=lengths)

    def clone(self, **changes: Unpack[OrdererOptions]) -> Orderer:
        """Return a clone that shares nothing but knows other processes' orders: for a fair comparison."""
        clone = super().clone(**changes)
        # Replaced, never changed: the thread of the log may be reading it.
        self._clones = (*(known for known in self._clones if known() is not None), ref(clone))
        return clone

    def share(
        self, documents: Sequence[Any], permutation: Sequence[int], *, scope: Hashable = None, lengths: Lengths = USUAL
    ) -> None:
        given: list[Any] = list(documents)
        if not given:
            return
        try:
            # As given: repeated documents are numbered by each reader.
            keys = self._reader.read_keys(given)
            request = self._reader.read(given)
            self.log.append(
                SharedOrder(
                    self.log.process,
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

    def close(self) -> None:
        self.log.close()
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
        self.log = OrderLog(url, stream, partial(_call, apply), partial(_call, lose))
        # The threads of an orderer that nothing refers to would go on.
        finalize(self, self.log.close)
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
