"""The proxy under load: many streams at a time, and the tool that measures what it costs."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rings import examples
from support.suites import page_of, run_suites

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from ragorder.benchmarks.proxy.client import post
from ragorder.benchmarks.proxy.load import measure_latency, run_streams, servers
from ragorder.benchmarks.proxy.upstream import allow_many_connections, answer, answer_events

pytestmark = pytest.mark.slow

STREAMS = 2000


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """An instant upstream, and a `ragorder serve` that forwards to it."""
    allow_many_connections(STREAMS)
    with servers("--body-limit", "1", "--max-connections", "2500") as (upstream, proxy):
        yield upstream.port, proxy.port


def test_two_thousand_streams_hold_and_each_client_gets_its_own(ports: tuple[int, int]) -> None:
    """None ends before all have begun: they are there at the same time."""
    whole = asyncio.run(run_streams(ports[1], STREAMS, events=6, pause_s=0.1))
    assert len(whole) == STREAMS
    assert all(whole)


def test_too_few_open_files_are_an_error_that_says_so() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
        "from ragorder.benchmarks.proxy.upstream import allow_many_connections\n"
        "allow_many_connections(480)\n"
        "try: allow_many_connections(2000)\n"
        "except OSError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ("2,000 connections need 4,064 open files, and the system allows 1,024: ulimit -Hn")


def test_what_comes_is_compared_byte_for_byte(ports: tuple[int, int]) -> None:
    """The check above would notice another client's stream, or a byte less."""
    body = {"stream": True, "user": "client-7", "max_tokens": 3, "pause": 0}
    came = asyncio.run(post(ports[1], json.dumps(body).encode()))
    assert came == b"".join(answer_events("client-7", 3))
    assert came not in (b"".join(answer_events("client-8", 3)), b"".join(answer_events("client-7", 4)))


def test_every_request_is_measured_past_the_proxy_and_through_it(ports: tuple[int, int]) -> None:
    measured = asyncio.run(measure_latency(*ports, rate=50, seconds=2))
    assert [tagged for tagged, *_ in measured] == [True, False] * 50
    assert all(min(direct, proxied) > 0 for _, direct, proxied in measured)


def test_the_suite_shows_latencies_and_streams(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    cell = {"rate": 40, "seconds": 0.5, "streams": 10, "events": 3, "pause": 0.01}
    for served in (2, 0):
        assert f"{served} runs served" in run_suites(tmp_path, "proxy-load", "--seeds", 0, **cell)
    page = page_of(tmp_path)
    assert "| tagged | 10 |" in page and "| others | 10 |" in page
    assert page.count("10 of 10, ") == 2


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.binary(max_size=40)
        | st.sampled_from(
            [
                b"POST /v1/chat/completions HTTP/1.1\r\n",
                b"GET / HTTP/1.0\r\n",
                b"Host: x\r\n",
                b"Content-Length: 3\r\n",
                b"Content-Length: 99999999999999999999999\r\n",
                b"Transfer-Encoding: chunked\r\n",
                b"Connection: upgrade\r\nUpgrade: websocket\r\n",
                b"\r\n",
                b"3\r\nabc\r\n0\r\n\r\n",
                b"ffffffffffffffff\r\n",
                b'{"ragorder":',
            ]
        ),
        max_size=12,
    )
)
def test_garbage_on_the_wire_harms_no_other_client(ports: tuple[int, int], pieces: list[bytes]) -> None:
    came = b""
    with socket.create_connection(("127.0.0.1", ports[1]), timeout=60) as connection, suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(65536):
            came += more
    assert b"HTTP/1.1 5" not in came
    assert asyncio.run(post(ports[1], b"{}")) == answer()
