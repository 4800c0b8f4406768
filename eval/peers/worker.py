"""The process of a peer."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from ragorder.eval.peers.environment import PeerError

__all__ = ["Worker"]

_START_S = 120.0
_KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")


class Worker:
    """A process in a peer's environment, for several independent runs. Documents are numbers there; it has none of our
    environment variables.

    Raises PeerError if it does not start; a call without an answer within `timeout_s` kills it."""

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
            raise PeerError(f"the peer's process ended, or gave no answer within {timeout_s:.0f} s")
        return answer
