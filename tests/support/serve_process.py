"""`ragorder serve`, in processes of their own and up to the moment from which it would serve."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pytest

_RESET = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
SERVE = (sys.executable, "-c", f"{_RESET}; from ragorder.cli.main import main; main()", "serve")
"""The command `ragorder serve`, which a closed terminal ends although the tests may run under `nohup`."""


@dataclass
class ServeProcess:
    popen: subprocess.Popen[str]
    url: str

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def refuses(self) -> bool:
        """Whether nothing listens at its address any more."""
        try:
            socket.create_connection(self.address, timeout=1).close()
        except OSError:
            return True
        return False

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


@dataclass
class Served:
    """What a command said, on one line, and what it was about to serve when it was stopped."""

    said: str = ""
    exit_code: int = 0
    orderer: Any = None
    app: dict[str, Any] = field(default_factory=dict)
    """The options of `make_app`."""
    config: Any = None
    """uvicorn's, or None for a command that was refused."""
    address: Any = None
    no_delay: bool = False


def serve_until_listening(
    monkeypatch: pytest.MonkeyPatch, *options: str, command: str = "serve", **environment: str
) -> Served:
    """Run the command up to the moment from which it would serve, on a free port and for a server that is not there
    unless the options, a file or the environment give others."""
    import uvicorn
    from click.testing import CliRunner

    from ragorder.adapters.proxy import make_app
    from ragorder.cli import main

    served = Served()

    def make(orderer: Any, **given: Any) -> Any:
        served.orderer, served.app = orderer, given
        return make_app(orderer, **given)

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        served.config, served.address = server.config, sockets[0].getsockname()
        served.no_delay = bool(sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    given: list[str] = []
    if "--config" not in options and not any(name.startswith("RAGORDER_SERVE_") for name in environment):
        given += [] if "--upstream" in options or command == "engine" else ["--upstream", "http://127.0.0.1:9"]
        given += [] if "--port" in options else ["--port", "0"]
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAGORDER_")]:
            patch.delenv(name)
        patch.setattr("ragorder.adapters.proxy.make_app", make)
        patch.setattr(uvicorn.Server, "run", run)
        result = CliRunner().invoke(main, [command, *given, *options], env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    served.said, served.exit_code = " ".join(result.output.split()), result.exit_code
    return served
