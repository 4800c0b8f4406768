"""The proxy under load: many streams at a time, and the tool that measures what it costs."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rings import examples

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from ragorder.benchmarks.proxy.client import post
from ragorder.benchmarks.proxy.load import run_streams, servers
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


def test_what_comes_is_compared_byte_for_byte(ports: tuple[int, int]) -> None:
    """The check above would notice another client's stream, or a byte less."""
    body = {"stream": True, "user": "client-7", "max_tokens": 3, "pause": 0}
    came = asyncio.run(post(ports[1], json.dumps(body).encode()))
    assert came == b"".join(answer_events("client-7", 3))
    assert came not in (b"".join(answer_events("client-8", 3)), b"".join(answer_events("client-7", 4)))


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
