"""The memory of a proxy that is attacked in every known way at once (docs/security.md)."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2

CHAT = "/v1/chat/completions"
LIMIT_KB = 1_000_000
SECONDS = 40
MIB = 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc"),
    pytest.mark.timeout(300),
]


class Engine(BaseHTTPRequestHandler):
    """A server that answers each question at once, and /v1/endless without end."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        while left:
            left -= len(self.rfile.read(min(left, MIB)))
        self.send_response(200)
        if self.path != "/v1/endless":
            answer = json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode()
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while True:
                self.wfile.write(b"x" * 65536)

    def log_message(self, *_: object) -> None:
        pass


class Proxy:
    """`ragorder serve`, a process of its own."""

    def __init__(self, upstream: str) -> None:
        start = "from ragorder.cli import main; main(prog_name='ragorder')"
        command = [sys.executable, "-c", start, "serve", "--upstream", upstream, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--capacity-tokens", "100000"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", said.replace(upstream, ""))):
            line = self.process.stderr.readline()
            assert line, said
            said += line
        self.port = int(found[1])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    @property
    def peak_kb(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]

    def connect(self, sent: bytes) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    engine.daemon_threads = True
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    served = Proxy(f"http://127.0.0.1:{engine.server_port}")
    yield served
    served.process.send_signal(signal.SIGKILL)
    served.process.wait(60)
    engine.shutdown()
    engine.server_close()


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n".encode()


def tagged(text: str, length: int) -> bytes:
    """A body of about `length` bytes with three documents of this text."""
    documents = [{"id": f"{number}", "text": text * (length // 3 // len(text.encode()))} for number in range(3)]
    body = {"messages": [], "ragorder": {"documents": documents, "query": "why?"}}
    return json.dumps(body, ensure_ascii=False).encode()


def with_unknown_fields(length: int) -> bytes:
    fields = ",".join(f'"f{number}":[{{}}]' for number in range(length // 16))
    return f'{{"messages":[],{fields}}}'.encode()


BODIES = {
    "characters of four bytes": tagged("\U0001f600", 29 * MIB),
    "documents": tagged("a word ", 31 * MIB),
    "many documents": json.dumps(
        {"messages": [], "ragorder": {"documents": [{"id": f"{n}", "text": "t"} for n in range(200_000)], "query": "?"}}
    ).encode(),
    "unknown fields": with_unknown_fields(8 * MIB),
    "brackets": b'{"messages":[],"x":' + b"[" * (8 * MIB),
}


def attacks(proxy: Proxy, kept: ExitStack) -> list[Callable[[], object]]:
    """One step of each attack; what stays open is kept."""

    def hold(sent: bytes) -> Callable[[], None]:
        return lambda: kept.callback(proxy.connect(sent).close)

    def post(body: bytes) -> Callable[[], None]:
        def ask() -> None:
            with closing(proxy.connect(head(CHAT, len(body)) + body)) as connection:
                while connection.recv(65536):
                    pass

        return ask

    def endless_headers() -> None:
        with closing(proxy.connect(f"POST {CHAT} HTTP/1.1\r\n".encode())) as connection:
            for number in range(100_000):
                connection.sendall(f"X-{number}: {'y' * 1000}\r\n".encode())

    return [
        hold(head("/v1/endless", 2) + b"{}"),
        hold(head(CHAT, MIB) + b"x" * (MIB // 2)),
        hold(head(CHAT, 32 * MIB) + b"x" * (31 * MIB)),
        hold(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
        endless_headers,
        *map(post, BODIES.values()),
    ]


def test_memory_stays_below_a_gigabyte_under_all_attacks_together(proxy: Proxy) -> None:
    stop, done = threading.Event(), 0

    def repeat(step: Callable[[], object]) -> None:
        nonlocal done
        while not stop.is_set():
            # Refused, closed in the middle, or no place in the queue: all of that is an answer to an attack.
            with suppress(OSError):
                step()
                done += 1

    with ExitStack() as kept:
        threads = [threading.Thread(target=repeat, args=(step,)) for step in attacks(proxy, kept) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            stop.wait(SECONDS)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert done > 100 and proxy.process.poll() is None
    assert proxy.peak_kb < LIMIT_KB
    assert httpx2.get(f"http://127.0.0.1:{proxy.port}/ragorder/health", timeout=60).status_code == 200
