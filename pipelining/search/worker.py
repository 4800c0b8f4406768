"""Search in a separate process: the process's side."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.continuous import ContinuousIVF
from ragorder.pipelining.search.request import History, PastSearch
from ragorder.pipelining.search.shared import SearchHandle, SubmitOptions
from ragorder.pipelining.staged._faiss import load_faiss

__all__ = ["Asked", "pack", "selector_of", "serve", "unpack"]

_PackedSelector = tuple[str, tuple[Any, ...]]
"""Name of a FAISS class and the arguments of its constructor: numbers, arrays, and packed selectors."""

_OF_OTHERS = ("IDSelectorNot", "IDSelectorAnd", "IDSelectorOr", "IDSelectorXOr")


def selector_of(params: Any) -> Any:
    """Return the selector of a faiss.SearchParametersIVF; its attribute would return one of a base class."""
    return getattr(params, "_sp_field_refs", {}).get("sel", params.sel)


def pack(selector: Any) -> _PackedSelector:
    name = type(selector).__name__
    if name == "IDSelectorAll":
        return name, ()
    if name == "IDSelectorRange":
        return name, (selector.imin, selector.imax, selector.assume_sorted)
    if name == "IDSelectorArray":
        # A set is faster than a search in an array.
        return "IDSelectorBatch", (_copied(selector.ids, selector.n, np.int64),)
    if name == "IDSelectorBitmap":
        return name, (_copied(selector.bitmap, selector.n, np.uint8),)
    if name in _OF_OTHERS and hasattr(selector, "referenced_objects"):
        # FAISS keeps the arguments of a constructor in a list, or in a tuple in a list.
        kept = selector.referenced_objects
        return name, tuple(map(pack, kept[0] if isinstance(kept[0], tuple) else kept))
    raise ValueError(
        f"{name} does not give back its ids, so it cannot be sent to another process: use faiss.IDSelectorArray(ids), "
        "which is a batch there, IDSelectorRange, IDSelectorBitmap, or Not, And, Or, XOr of these"
    )


def unpack(packed: _PackedSelector) -> Any:
    faiss = load_faiss()
    name, arguments = packed
    return getattr(faiss, name)(*(unpack(each) if isinstance(each, tuple) else each for each in arguments))


def _copied(pointer: Any, count: int, kind: Any) -> Any:
    return load_faiss().rev_swig_ptr(pointer, count).copy() if count else np.empty(0, kind)


class Asked(NamedTuple):
    """A search as it is sent. `params`: nprobe and selector; `past`: searches of its history, or None."""

    queries: NDArray[np.float32]
    k: int
    params: tuple[int, _PackedSelector | None] | None
    past: Sequence[PastSearch] | None
    kept: int


def serve(connection: Connection, path: str, options: dict[str, Any]) -> None:
    # An interrupt is for the calling process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faiss = load_faiss()
    try:
        # Processes share the file's pages, which are read when they are scanned.
        index = faiss.read_index(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        make_tiers = options.pop("tiers")
        search = ContinuousIVF(index, **options, tiers=None if make_tiers is None else make_tiers())
    except Exception as error:
        connection.send(("failed", 0, _sendable(error)))
        return
    with search:
        connection.send(("ready", 0, (index.d, index.ntotal, search.similarity)))
        _Answers(connection, search).run()


class _Answers:
    def __init__(self, connection: Connection, search: ContinuousIVF) -> None:
        self._connection = connection
        self._search = search
        self._handles: dict[int, SearchHandle] = {}
        self._changed: dict[int, SearchHandle] = {}
        self._news = threading.Condition()
        self._ended = False
        self._sending = threading.Lock()

    def run(self) -> None:
        sender = threading.Thread(target=self._send_news, name="ragorder-answers")
        sender.start()
        try:
            while True:
                what, number, content = self._connection.recv()
                if what == "search":
                    self._begin(number, *content)
                elif what == "close":
                    return
                elif (handle := self._handles.get(number)) is not None:
                    getattr(handle, what)()
        except (EOFError, OSError):
            return
        finally:
            with self._news:
                self._ended = True
                self._news.notify()
            sender.join()

    def _begin(self, number: int, asked: Asked, options: SubmitOptions) -> None:
        history = None
        if asked.past is not None:
            history = _SentHistory(asked, lambda past: self._send("past", number, past))
        try:
            params = None if asked.params is None else _parameters(*asked.params)
            request = self._search._read(asked.queries, asked.k, params, history)
            handle = self._search._join(request, options)
        except Exception as error:
            self._send("error", number, _sendable(error))
            return
        self._handles[number] = handle
        handle.subscribe(lambda: self._notice(number, handle))

    def _notice(self, number: int, handle: SearchHandle) -> None:
        with self._news:
            self._changed[number] = handle
            self._news.notify()

    def _send_news(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._changed or self._ended)
                changed, self._changed = self._changed, {}
                if self._ended:
                    return
            for number, handle in changed.items():
                self._send_stage(number, handle)

    def _send_stage(self, number: int, handle: SearchHandle) -> None:
        done = handle.done
        try:
            stage = handle.result() if done else handle.stage
        except BaseException as error:
            self._handles.pop(number, None)
            if not handle.cancelled:
                self._send("error", number, _sendable(error))
            return
        if done:
            self._handles.pop(number, None)
        if done and self._search.tiers is not None:
            self._send("gains", number, self._search.tier_gains)
        if stage is not None:
            fields = (stage.number, stage.stages, stage.ids, stage.distances, stage.settled)
            self._send("stage", number, (fields, done))

    def _send(self, what: str, number: int, content: object) -> None:
        with self._sending:
            self._connection.send((what, number, content))


def _parameters(nprobe: int, selector: _PackedSelector | None) -> Any:
    selected = {} if selector is None else {"sel": unpack(selector)}
    return load_faiss().SearchParametersIVF(nprobe=nprobe, **selected)


class _SentHistory(History):
    """A history that also sends its new searches back."""

    def __init__(self, asked: Asked, send: Callable[[PastSearch], None]) -> None:
        super().__init__(asked.kept, max(1, len(asked.past or ()) + 1))
        for past in asked.past or ():
            super().add(past)
        self._send = send

    def add(self, past: PastSearch) -> None:
        super().add(past)
        self._send(past)


def _sendable(error: BaseException) -> BaseException:
    if type(error) in (ValueError, TypeError, RuntimeError, MemoryError, ImportError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
