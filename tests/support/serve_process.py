"""`ragorder serve` in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["SERVE", "ServeProcess", "launching"]

_RESET = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
SERVE = (sys.executable, "-c", f"{_RESET}; from ragorder.cli.main import main; main()", "serve")
"""The command `ragorder serve`, which a closed terminal ends although the tests may run under `nohup`."""


@dataclass
class ServeProcess:
    popen: subprocess.Popen[str]
    url: str

    def stop(self, signum: int = signal.SIGTERM) -> str:
        """What it said on standard error, when it has ended."""
        self.popen.send_signal(signum)
        return self.popen.communicate(timeout=60)[1]

    def statuses_and_growth(self, path: str, body: bytes, clients: int = 8, **headers: str) -> tuple[set[int], int]:
        """The answers to this body from so many clients at once, and the MB by which the process grew meanwhile."""
        import httpx2

        own = Path("/proc") / str(self.popen.pid)
        # The peak starts over.
        (own / "clear_refs").write_text("5")
        before = self._kb(own, "VmRSS")

        def post(_: int) -> int:
            sent = {"Content-Type": "application/json", **headers}
            return client.post(f"{self.url}{path}", content=body, headers=sent, timeout=120).status_code

        with httpx2.Client(verify=False) as client, ThreadPoolExecutor(clients) as pool:
            statuses = set(pool.map(post, range(clients)))
        return statuses, (self._kb(own, "VmHWM") - before) // 1000

    def _kb(self, own: Path, name: str) -> int:
        lines = (own / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


P = TypeVar("P", bound=ServeProcess)


@contextmanager
def launching(
    kind: Callable[[subprocess.Popen[str], str], P], *command: str, **environment: str
) -> Iterator[Callable[..., P]]:
    """Starts this command, with more options and variables, and returns a process once it serves. All are killed at the
    end of the block."""
    started: list[subprocess.Popen[str]] = []

    def launch(*options: str, **variables: str) -> P:
        found = {**os.environ, **environment, **variables}
        popen = subprocess.Popen([*command, *options], text=True, stderr=subprocess.PIPE, env=found)
        started.append(popen)
        assert popen.stderr is not None
        lines = []
        for line in popen.stderr:
            if served := re.search(r"Serving on (https?://\S+)/v1", line):
                return kind(popen, served[1])
            lines.append(line)
        raise AssertionError("".join(lines))

    yield launch
    for popen in started:
        popen.kill()
        popen.communicate()
