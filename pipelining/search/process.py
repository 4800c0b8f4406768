"""Search in a separate process: the caller's side (HedraRAG section 5)."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ragorder.errors import RagorderError
from ragorder.pipelining.reordering import QueueFullError
from ragorder.pipelining.search.continuous import PieceOrder
from ragorder.pipelining.search.request import History, check_history, read_parameters
from ragorder.pipelining.search.shared import SearchHandle, SharedSearch, SubmitOptions
from ragorder.pipelining.search.tiers import IndexTiers, TierGains
from ragorder.pipelining.search.worker import Asked, pack, selector_of, serve
from ragorder.pipelining.staged import Stage
from ragorder.pipelining.staged._faiss import read_k, read_queries

__all__ = ["SearchProcess", "SearchProcessError"]

_START_S = 120.0
_END_S = 10.0


class SearchProcessError(RagorderError, RuntimeError): ...


class SearchProcess(SharedSearch["_Request"]):
    """`ContinuousIVF` in a separate process, on a mapped file of faiss.write_index.

        with SearchProcess("wiki.index", nprobe=64) as search:
            search.submit(vector, k=5, history=history).result().ids

    Scans then do not hold this process's interpreter lock. If the process dies, its searches fail with
    SearchProcessError and it is started again, `restarts` times in a row. More than `max_searches` in flight raise
    QueueFullError. A script needs `if __name__ == "__main__":`.

    - `tiers`: returns the index's tiers in that process: a function of a module, or functools.partial(IndexTiers, …)
    - Selectors are sent by their ids: faiss.IDSelectorArray, Range, Bitmap, All, and Not, And, Or, XOr of them.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        nprobe: int | None = None,
        cores: int | None = None,
        order: PieceOrder = "oldest",
        patience: int | None = None,
        tiers: Callable[[], IndexTiers] | None = None,
        max_searches: int = 1024,
        restarts: int = 3,
    ) -> None:
        if max_searches < 1 or restarts < 0:
            raise ValueError(f"give max_searches >= 1 and restarts >= 0, got {max_searches} and {restarts}")
        self._path = str(path)
        self._options = {
            "nprobe": nprobe,
            "cores": cores,
            "order": order,
            "patience": patience,
            "tiers": _picklable(tiers),
        }
        self._max_searches, self._restarts = max_searches, restarts
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, _RemoteHandle] = {}
        self._histories: WeakValueDictionary[int, History] = WeakValueDictionary()
        self._broken: BaseException | None = None
        self._ready = threading.Event()
        self._deaths = self._dimensions = self._vectors = 0
        self.similarity = False
        # Values until the process has measured some.
        self.tier_gains = None if tiers is None else TierGains(0.0, math.inf, math.inf)
        self._worker = _Worker(self._path, self._options, self._answer, self._died)
        # Otherwise the end of this program would end the process, which would be started again.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        if not self._ready.wait(_START_S) or self._broken is not None:
            error = self._broken or SearchProcessError(f"the search process was not ready within {_START_S:g} s")
            self.close()
            raise error

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    @property
    def pid(self) -> int | None:
        return self._worker.process.pid

    def close(self) -> None:
        self._at_exit.cancel()
        with self._lock:
            self._broken = self._broken or RuntimeError("this search is closed")
            pending = [*self._pending.values()]
        for handle in pending:
            handle.cancel()
        self._worker.close()

    def _read(self, queries: Any, k: int, params: Any, history: History | None = None) -> _Request:
        k, rows = read_k(k), read_queries(queries, self._dimensions)
        if k > self._vectors:
            raise ValueError(f"k={k}, but the index has {self._vectors} vectors: give a smaller k")
        nprobe, selector = read_parameters(params)
        check_history(selector, history)
        packed = None if selector is None else pack(selector_of(params))
        past, kept = (None, 1) if history is None else (history.past, history.kept)
        return _Request(Asked(rows, k, None if nprobe is None else (nprobe, packed), past, kept), history)

    def _join(self, request: _Request, options: SubmitOptions) -> SearchHandle:
        number, (asked, history) = next(self._numbers), request
        handle = _RemoteHandle(lambda what: self._send(what, number), due=options.due, whole=options.whole)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            # Messages about cancelled searches may still be unsent if the process hangs.
            if len(self._pending) >= self._max_searches or self._worker.unsent > 2 * self._max_searches:
                raise QueueFullError(f"{self._max_searches} searches are in flight: raise max_searches, or retry later")
            self._pending[number] = handle
            if history is not None:
                self._histories[number] = history
            worker = self._worker
        worker.send("search", number, (asked, options))
        return handle

    def _send(self, what: str, number: int) -> None:
        with self._lock:
            known = number in self._pending
            if what == "cancel":
                self._pending.pop(number, None)
            worker = self._worker
        if known:
            worker.send(what, number)

    def _answer(self, what: str, number: int, content: Any) -> None:
        if what == "ready":
            self._dimensions, self._vectors, self.similarity = content
            self._ready.set()
        elif what == "gains":
            self.tier_gains = content
        elif what == "failed":
            self._broken = content
        elif what == "past":
            if (history := self._histories.get(number)) is not None:
                history.add(content)
        elif what == "error":
            self._end(number, lambda handle: handle.fail(content))
        else:
            fields, final = content
            stage = Stage(*fields)
            if final:
                self._end(number, lambda handle: handle.publish(lambda: stage, final=True))
            elif (handle := self._pending.get(number)) is not None:
                handle.publish(lambda: stage, final=False)

    def _end(self, number: int, end: Callable[[_RemoteHandle], object]) -> None:
        with self._lock:
            handle = self._pending.pop(number, None)
            self._deaths = 0
            # The results for the history arrive before the end.
            self._histories.pop(number, None)
        if handle is not None:
            end(handle)

    def _died(self, code: int | None) -> None:
        error = SearchProcessError(f"the search process ended with code {code}: ask again")
        with self._lock:
            pending, self._pending = self._pending, {}
            self._deaths += 1
            if self._broken is None and (self._deaths > self._restarts or not self._ready.is_set()):
                self._broken = SearchProcessError(f"the search process ended {self._deaths} times, with code {code}")
            if self._broken is None:
                try:
                    self._worker = _Worker(self._path, self._options, self._answer, self._died)
                except Exception as failed:
                    # For example out of memory; callers would wait forever.
                    self._broken = SearchProcessError(f"the search process cannot be started again: {failed}")
        self._ready.set()
        for handle in pending.values():
            handle.fail(error)


class _Request(NamedTuple):
    asked: Asked
    history: History | None


class _RemoteHandle(SearchHandle):
    def __init__(self, send: Callable[[str], None], *, due: bool, whole: bool) -> None:
        super().__init__(None, due=due, whole=whole)
        self._send = send

    def promote(self) -> None:
        super().promote()
        self._send("promote")

    def cancel(self) -> bool:
        ended = super().cancel()
        if ended:
            self._send("cancel")
        return ended


def _picklable(tiers: Callable[[], IndexTiers] | None) -> Callable[[], IndexTiers] | None:
    try:
        ForkingPickler.dumps(tiers)
    except Exception as error:
        raise TypeError(
            f"tiers cannot be sent to the search's process ({type(error).__name__}): give a function of a module, or "
            "functools.partial(IndexTiers, …), which is called there"
        ) from None
    return tiers


class _Worker:
    """The search process, the thread that sends to it, and the thread that reads its answers."""

    def __init__(
        self,
        path: str,
        options: dict[str, Any],
        answer: Callable[[str, int, Any], None],
        died: Callable[[int | None], None],
    ) -> None:
        # A fork would copy locks of FAISS's threads.
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, path, options), name="ragorder-search", daemon=True)
        self.process.start()
        theirs.close()
        self._messages: SimpleQueue[memoryview | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="ragorder-questions", daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, args=(answer, died), name="ragorder-answers", daemon=True)
        self._reader.start()

    @property
    def unsent(self) -> int:
        return self._messages.qsize()

    def send(self, what: str, number: int, content: object = None) -> None:
        # A pipe has room for few searches, and an event loop must not wait while the process starts.
        self._messages.put(ForkingPickler.dumps((what, number, content)))

    def close(self) -> None:
        self.send("close", 0)
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
        self._reader.join(_END_S)

    def _write(self) -> None:
        # If the process has died, its searches fail when the reader notices.
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self, answer: Callable[[str, int, Any], None], died: Callable[[int | None], None]) -> None:
        with suppress(EOFError, OSError):
            while True:
                answer(*self._connection.recv())
        self._messages.put(None)
        self._writer.join(_END_S)
        self._connection.close()
        self.process.join(_END_S)
        died(self.process.exitcode)
