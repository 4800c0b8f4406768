"""`ragorder serve` as a process, and before a real vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.far_end import FarEnd, answer_events
from support.rings import grid
from support.sent_requests import (
    CERTIFICATES,
    CHAT,
    TEMPLATE,
    TOKEN,
    names_in,
)
from support.serve_process import SERVE, ServeProcess, launching
from support.waiting import eventually

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.proxied import (
    LAST,
    chat,
    tagged,
)

Launch = Callable[..., ServeProcess]


@pytest.fixture
def launch(upstream: str) -> Iterator[Launch]:
    """Starts `ragorder serve` for the far end."""
    command = [*SERVE, "--upstream", upstream, "--port", "0", "--capacity-tokens", "4096", "--block-size", "16"]
    with launching(ServeProcess, *command, PYTHONPATH="") as launch:
        yield launch


class TestServe:
    def test_it_serves_until_sigterm_and_logs_nothing_of_a_request(self, launch: Launch, far_end: FarEnd) -> None:
        options = ("--template", TEMPLATE.replace("\n", "\\n"), "--log-level", "info")
        process = launch(*options, RAGORDER_PROXY_API_KEY="secret")
        assert process.url.startswith("http://127.0.0.1:")
        headers = {"authorization": "Bearer secret", "connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c"}
        with httpx2.Client(base_url=process.url, headers=headers, verify=CERTIFICATES) as client:
            for body in (tagged("abc"), tagged("cba"), chat("ab"), chat("ba"), {"ragorder": {"secret": "secret"}}):
                client.post(f"{CHAT}?x=secret", json=body)
            client.post(CHAT, content=b'{"ragorder" secret')
            far_end.answer = answer_events(TOKEN, None)
            with pytest.raises(httpx2.RemoteProtocolError):
                client.post(CHAT, json=tagged("ab", user="secret"))
        prompts = [request.json["messages"][-1]["content"] for request in far_end.requests]
        assert list(map(names_in, prompts)) == ["abc", "abc", "ab", "ab", "ab"]
        with socket.create_connection(process.address, timeout=60) as connection:
            connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 400"
        said = process.stop()
        assert process.popen.returncode == 128 + signal.SIGTERM
        assert "an answer was cut off: upstream_unavailable" in said
        assert said.count("\n") <= 2, "clients do not fill its log"
        for text in ("secret", "a is a document", "Which?", "ragorder/", CHAT):
            assert text not in said

    @pytest.mark.parametrize("signum", grid([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 1))
    def test_streams_in_flight_may_end(self, signum: signal.Signals, launch: Launch, far_end: FarEnd) -> None:
        process, stopped = launch(), threading.Event()
        far_end.answer = answer_events(TOKEN, stopped, TOKEN, LAST)
        with httpx2.stream("POST", f"{process.url}{CHAT}", json=tagged("ab"), verify=CERTIFICATES) as response:
            raw = response.iter_raw()
            assert next(raw) == TOKEN
            process.popen.send_signal(signum)
            assert eventually(process.refuses)
            stopped.set()
            assert b"".join(raw) == TOKEN + LAST
        assert process.popen.communicate(timeout=60)[1] == ""
        assert process.popen.returncode == (0 if signum == signal.SIGINT else 128 + signal.SIGTERM)

    @pytest.mark.slow
    def test_a_closed_terminal_is_ignored_under_nohup(self, upstream: str) -> None:
        code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from ragorder.cli.main import main; main()"
        options = ("--upstream", upstream, "--port", "0", "--capacity-tokens", "4096", "--block-size", "16")
        with launching(ServeProcess, sys.executable, "-c", code, "serve", *options, PYTHONPATH="") as launch:
            process = launch()
            process.popen.send_signal(signal.SIGHUP)
            assert not eventually(process.refuses, seconds=1)
            assert process.stop() == ""

    @pytest.mark.slow
    def test_a_stream_beyond_the_grace_is_cut_off(self, launch: Launch, far_end: FarEnd) -> None:
        process = launch("--grace", "1")
        far_end.answer = answer_events(TOKEN, threading.Event())
        with httpx2.stream("POST", f"{process.url}{CHAT}", json=tagged("ab"), verify=CERTIFICATES) as response:
            raw = response.iter_raw()
            assert next(raw) == TOKEN
            process.stop()
            with pytest.raises(httpx2.RemoteProtocolError):
                next(raw)
        assert far_end.left.wait(60)


@pytest.mark.vllm
class TestOnVLLM:
    @pytest.mark.slow
    def test_the_example_with_curl(self, vllm_server: Any, tmp_path: Path) -> None:
        empty(vllm_server)
        script = Path(__file__).parents[3] / "examples" / "proxy_curl.sh"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"UPSTREAM": vllm_server.base_url, "PORT": str(port), "PATH": path}
        done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        cached = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
        assert len(cached) == 2
        # All of the prompt but its last block, which ends in the question.
        prompt = int(done.stdout.split()[0])
        assert cached[0] == 0
        assert cached[1] > prompt - 2 * vllm_server.block_size
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def empty(server: Any) -> None:
    """Empty the server's prefix cache."""
    assert httpx2.post(f"{server.base_url}/reset_prefix_cache", timeout=60, verify=CERTIFICATES).status_code == 200
