"""Several serving processes on one port."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from ragorder.adapters.http_server.server import listen
from ragorder.errors import RagorderError

_logger = logging.getLogger("ragorder")

_POLL_S = 0.2
_DEATHS = 5
_WITHIN_S = 60.0
# Time after the requests in flight: to cancel them, and to close open connections.
_ENDING_S = 5.0


Serve = Callable[[socket.socket, Callable[[], None], Callable[[], bool]], None]
"""Serves a socket until SIGTERM or until orphaned, which it polls; says when it has started."""


class WorkerError(RagorderError):
    """The workers cannot serve."""


class Supervisor:
    """Runs a serving process for each socket, and replaces one that dies.

    SIGTERM and SIGINT end all: requests in flight have `grace_s` seconds. `on_ended` gets each ended process's id.
    Workers are forked, to share data loaded before."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        serve: Serve,
        *,
        grace_s: float,
        on_ended: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._sockets = sockets
        self._serve = serve
        self._grace_s = grace_s
        self._on_ended = on_ended
        self._workers: dict[int, BaseProcess] = {}
        self._deaths: deque[float] = deque(maxlen=_DEATHS)
        self._stopped = False

    def run(self, *, on_started: Callable[[], None] = lambda: None) -> None:
        """Raises WorkerError if a worker ends before it serves, or five die within a minute."""
        before = {each: signal.signal(each, self._stop) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            # The first worker shows whether any can serve.
            if all(self._start(number) for number in range(len(self._sockets))):
                on_started()
            while not self._stopped:
                self._replace_dead()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, signum: int, frame: object) -> None:
        self._stopped = True

    def _start(self, number: int) -> bool:
        """Return False if stopped meanwhile. Raises WorkerError."""
        started, tell = multiprocessing.Pipe(duplex=False)
        fork = multiprocessing.get_context("fork")
        worker = fork.Process(target=self._work, args=(number, os.getpid(), lambda: tell.send_bytes(b"1")), daemon=True)
        worker.start()
        tell.close()
        self._workers[number] = worker
        with started:
            while not self._stopped:
                if started.poll(_POLL_S):
                    with suppress(EOFError):
                        started.recv_bytes()
                        return True
                    worker.join()
                    raise WorkerError("a worker ended before it served: see its error above")
        return False

    def _work(self, number: int, supervisor: int, on_started: Callable[[], None]) -> None:
        # Ctrl-C is for the supervisor, which lets the workers end their requests.
        os.setpgid(0, 0)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        for other, listening in enumerate(self._sockets):
            if other != number:
                listening.close()
        self._serve(self._sockets[number], on_started, lambda: os.getppid() != supervisor)

    def _replace_dead(self) -> None:
        wait([worker.sentinel for worker in self._workers.values()], timeout=_POLL_S)
        for number, worker in list(self._workers.items()):
            if self._stopped or worker.is_alive():
                continue
            self._deaths.append(time.monotonic())
            self._bury(number)
            cause = _cause(worker.exitcode)
            if len(self._deaths) == _DEATHS and self._deaths[-1] - self._deaths[0] < _WITHIN_S:
                raise WorkerError(f"{_DEATHS} workers have died within {_WITHIN_S:g} s, the last one by {cause}")
            _logger.warning("a worker has died by %s: another one takes its place", cause)
            self._start(number)

    def _bury(self, number: int) -> None:
        worker = self._workers.pop(number)
        worker.join()
        if worker.pid is not None:
            self._on_ended(worker.pid)

    def _end(self) -> None:
        # Otherwise the system would accept connections that no worker takes.
        for listening in self._sockets:
            listening.close()
        for worker in self._workers.values():
            worker.terminate()
        until = time.monotonic() + self._grace_s + _ENDING_S
        for worker in self._workers.values():
            worker.join(max(0.0, until - time.monotonic()))
            worker.kill()
        for number in list(self._workers):
            self._bury(number)


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Open sockets on one port, among which the system spreads connections. Raises OSError."""
    # A port shared by other sockets counts as taken as well.
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    return [listen(host, port, shared=True) for _ in range(count)]


def _cause(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit status {exitcode}"
    return signal.Signals(-exitcode).name
