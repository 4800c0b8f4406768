"""A peer as a policy."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from ragorder.document import Document
from ragorder.eval.peers.environment import PeerError, prepare_peer
from ragorder.ordering import Ordering
from ragorder.scope.request import USUAL, Lengths

_START_S = 120.0
_KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")


class Worker:
    """A process in a peer's environment, for several independent runs. Documents are numbers there; it has none of our
    environment variables. Raises PeerError if it does not start; a call without an answer within `timeout_s` kills
    it."""

    def __init__(self, python: Path, script: Path, *, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._runs = 0
        self._ended: deque[int] = deque()
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # So that sets have the same order in every process.
        environment |= {"PYTHONHASHSEED": "0", "PYTHONNOUSERSITE": "1"}
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise PeerError(f"the peer does not start: {error}") from None
        ready = self._exchange(None, _START_S)
        if "error" in ready:
            self.close()
            raise PeerError(f"the peer does not start: {ready['error']}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def new_run(self) -> int:
        """A run with its own index."""
        with self._lock:
            self._runs += 1
            return self._runs

    def order(self, run: int, requests: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        """The `orders`, the request `indices`, and the CPU time `ns`; or `error`. Raises PeerError once dead."""
        with self._lock:
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
            call = {"run": run, "requests": requests, "ended": ended}
            return self._exchange(call, self._timeout_s)

    def end(self, run: int) -> None:
        """Forget a run at the next call. Takes no lock: a finalizer may call it at any time."""
        self._ended.append(run)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue

    def _send(self, call: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed:
            raise BrokenPipeError
        stdin.write(json.dumps(call) + "\n")
        stdin.flush()

    def _exchange(self, call: Mapping[str, Any] | None, timeout_s: float) -> Mapping[str, Any]:
        """Killing a process that hangs ends the wait in either direction."""
        stdout = self._process.stdout
        assert stdout is not None
        watchdog = Timer(timeout_s, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if call is not None:
                self._send(call)
            line = stdout.readline()
            answer = json.loads(line) if line else None
        except (OSError, ValueError):
            answer = None
        finally:
            watchdog.cancel()
        if not isinstance(answer, dict):
            self.close()
            raise PeerError(f"the peer's process ended, or gave no answer within {timeout_s:g} s")
        return answer


_workers: dict[str, Worker] = {}


@atexit.register
def _close() -> None:
    for worker in _workers.values():
        worker.close()


def make_peer(name: str) -> PeerPolicy:
    """A policy for one run. One process serves all. Raises PeerError if the peer cannot be installed or started."""
    worker = _workers.get(name)
    if worker is None or not worker.alive:
        script = Path(__file__).with_name(f"{name}_worker.py")
        worker = _workers[name] = Worker(prepare_peer(name), script)
    return PeerPolicy(worker)


class PeerPolicy:
    """Orders as the peer does; retrieval order if it raises or returns other documents: `fallbacks` counts both,
    `first_error` is the first message. `clock_ns` is the peer's own CPU time. Raises PeerError if its process is
    dead."""

    def __init__(self, worker: Worker) -> None:
        self.fallbacks = 0
        self.first_error: str | None = None
        self._worker = worker
        self._run = worker.new_run()
        self._numbers: dict[str, int] = {}
        self._spent_ns = 0
        weakref.finalize(self, worker.end, self._run)

    def clock_ns(self) -> int:
        return self._spent_ns

    def order(
        self, documents: list[Document], *, waiting: Sequence[list[Document]] = (), lengths: Lengths = USUAL
    ) -> Ordering[Document]:
        """Without the waiting requests."""
        return next(self.order_batch([documents]))

    def order_batch(
        self, requests: Sequence[list[Document]], *, lengths: Lengths = USUAL, max_wait: int | None = None
    ) -> Iterator[Ordering[Document]]:
        """All requests, in the peer's order of serving, without a bound on waiting."""
        numbered = [[self._number(document) for document in documents] for documents in requests]
        answer = self._worker.order(self._run, numbered)
        self._spent_ns += int(answer.get("ns", 0))
        indices, orders = answer.get("indices", []), answer.get("orders", [])
        if sorted(indices) != list(range(len(requests))) or len(orders) != len(requests):
            reason = str(answer.get("error", "answered for other requests than it was given"))
            indices, orders = range(len(requests)), [None] * len(requests)
        else:
            reason = "answered with other documents than it was given"
        for index, order in zip(indices, orders, strict=True):
            permutation = _permutation(numbered[index], order)
            if permutation is None:
                self._fall_back(reason)
                permutation = list(range(len(requests[index])))
            ordering = Ordering([requests[index][rank] for rank in permutation], permutation)
            ordering.index = index
            yield ordering

    def _number(self, document: Document) -> int:
        return self._numbers.setdefault(document.key, len(self._numbers))

    def _fall_back(self, reason: str) -> None:
        self.fallbacks += 1
        self.first_error = self.first_error or reason


def _permutation(given: Sequence[int], order: Sequence[int] | None) -> list[int] | None:
    if order is None or sorted(order) != sorted(given):
        return None
    ranks: dict[int, list[int]] = {}
    for rank in range(len(given) - 1, -1, -1):
        ranks.setdefault(given[rank], []).append(rank)
    return [ranks[number].pop() for number in order]
