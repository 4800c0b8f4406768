"""Requests and answers that the proxy passes on as they are."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.far_end import FarEnd, answer_events
from support.sent_requests import (
    CERTIFICATES,
    CHAT,
    ROLE,
    TOKEN,
    RecordingOrderer,
)
from support.waiting import eventually

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.proxied import (
    COMPLETIONS,
    FAILED,
    LAST,
    UNKNOWN,
    WHOLE,
    Proxy,
    Start,
    error_of,
    tagged,
)

from ragorder.adapters.proxy import (
    make_app,
)


class TestPassingOn:
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
    def test_the_bytes_of_a_body_that_is_not_tagged(self, path: str, proxy: Proxy, far_end: FarEnd) -> None:
        @given(body=st.binary(max_size=300))
        def check(body: bytes) -> None:
            assume(b'"ragorder"' not in body)
            far_end.answer.chunks = [body[::-1]]
            assert proxy.post(body, path).content == body[::-1]
            assert far_end.last.body == body

        check()

    @pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
    @pytest.mark.parametrize("path", ["/health", CHAT])
    def test_every_other_method(self, method: str, path: str, proxy: Proxy, far_end: FarEnd) -> None:
        response = proxy.client.request(method, path)
        assert response.status_code == 200
        assert response.content == (b"" if method == "HEAD" else WHOLE)
        assert (far_end.last.method, far_end.last.target) == (method, path)

    @pytest.mark.parametrize(
        "target",
        [
            "/",
            "//evil.example/x",
            "/v1/..admin/...",
            "/a%2Fb%20c",
            "/v1/models?after=1&x=%26",
            "/v1/models?x=../y",
            "/v1/.well-known",
            "/metrics2",
            "/?q?=//",
            "/a\\b|c^d`{e}",
            "/v1/chat/completions/",
        ],
    )
    @pytest.mark.parametrize("base", ["", "/base"])
    def test_the_target_as_it_is_after_the_path_of_the_upstream_address(
        self, base: str, target: str, start: Start, upstream: str, far_end: FarEnd
    ) -> None:
        proxy = start(upstream=f"{upstream}{base}/v1/")
        connection = http.client.HTTPConnection(*proxy.address, timeout=60)
        connection.putrequest("GET", target, skip_host=False)
        connection.endheaders()
        assert connection.getresponse().read() == WHOLE
        connection.close()
        assert far_end.last.target == base + target

    def test_headers_but_hop_by_hop_ones(self, proxy: Proxy, far_end: FarEnd) -> None:
        kept = [("x-one", "1"), ("x-one", "2"), ("cookie", "a=b"), ("authorization", "Bearer client"), ("te-x", "y")]
        dropped = [
            ("connection", "keep-alive, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "Basic eDp5"),
            ("proxy-connection", "keep-alive"),
            ("te", "trailers"),
            ("trailer", "x"),
            ("upgrade", "h2c"),
            ("expect", "100-continue"),
        ]
        request = httpx2.Request("POST", f"{proxy.url}{CHAT}", headers=kept + dropped, content=b"{}")
        assert proxy.client.send(request).content == WHOLE
        sent = [header for header in far_end.last.headers if header[0] not in ("host", "content-length")]
        assert sent == kept
        assert far_end.last.header("content-length") == ["2"]

    def test_no_header_is_made_up_but_host(self, proxy: Proxy, far_end: FarEnd) -> None:
        with socket.create_connection(proxy.address) as connection:
            connection.sendall(b"GET /x HTTP/1.1\r\nHost: proxy\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert [name for name, _ in far_end.last.headers] == ["host"]
        assert far_end.last.header("host") != ["proxy"]

    def test_the_headers_of_the_answer_whose_cookies_reach_no_other_client(self, proxy: Proxy, far_end: FarEnd) -> None:
        far_end.answer.headers = [
            ("content-type", "x/y"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("server", "far"),
            ("date", "today"),
            ("connection", "X-Private"),
            ("x-private", "1"),
            ("proxy-authenticate", "Basic"),
        ]
        got = proxy.client.get("/x").headers.multi_items()
        assert got == [*far_end.answer.headers[:5], ("transfer-encoding", "chunked")]
        httpx2.get(f"{proxy.url}/x", verify=CERTIFICATES)
        assert far_end.last.header("cookie") == []

    @pytest.mark.parametrize("status", [201, 202, 204, 301, 302, 304, 400, 401, 404, 422, 429, 500, 503, 599])
    def test_every_status_with_its_body_and_a_refused_request_is_discarded(
        self, status: int, proxy: Proxy, far_end: FarEnd, orderer: RecordingOrderer
    ) -> None:
        far_end.answer.status = status
        far_end.answer.headers = [("location", "http://elsewhere/"), ("retry-after", "7"), ("content-type", "text/x")]
        far_end.answer.chunks = [b"" if status in (204, 304) else b"why"]
        for response in (proxy.client.get("/x"), proxy.post(tagged("ab"))):
            assert (response.status_code, response.content) == (status, far_end.answer.chunks[0])
            assert response.headers["retry-after"] == "7"
        assert orderer.outcome() == (UNKNOWN if status < 300 else FAILED)

    def test_compressed_answers_stay_compressed(self, proxy: Proxy, far_end: FarEnd) -> None:
        packed = gzip.compress(b"hello")
        far_end.answer.headers = [("content-encoding", "gzip"), ("content-length", str(len(packed)))]
        far_end.answer.chunks = [packed]
        with proxy.client.stream("GET", "/x") as response:
            assert b"".join(response.iter_raw()) == packed
            assert response.headers["content-length"] == str(len(packed))

    def test_uploads_are_not_held_up(self, proxy: Proxy, far_end: FarEnd) -> None:
        """The far end has the first half of a body before the second is sent."""

        def halves() -> Iterator[bytes]:
            yield b"first"
            assert eventually(lambda: far_end.received == b"first")
            yield b"second"

        assert proxy.client.post("/v1/files", content=halves()).status_code == 200
        assert far_end.last.body == b"firstsecond"

    def test_chunked_bodies_of_the_two_routes_get_a_length(self, proxy: Proxy, far_end: FarEnd) -> None:
        proxy.client.post(CHAT, content=iter([b'{"a"', b": 1}"]))
        assert far_end.last.body == b'{"a": 1}'
        assert far_end.last.header("content-length") == ["8"]
        assert far_end.last.header("transfer-encoding") == []

    def test_websockets_are_refused(self, proxy: Proxy, far_end: FarEnd) -> None:
        headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "x"}
        response = proxy.client.get("/v1/realtime", headers=headers | {"sec-websocket-version": "13"})
        assert (response.status_code, error_of(response)["code"]) == (400, "no_websocket")
        assert far_end.requests == []

    def test_websockets_of_other_servers_are_closed(self, orderer: RecordingOrderer) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        app = make_app(orderer, upstream="http://x", api_key="key")
        scope = {"type": "websocket", "path": "/x", "headers": []}
        asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
        assert [message["type"] for message in sent] == ["websocket.close"]

    def test_its_own_routes_are_its_own(self, start: Start, far_end: FarEnd) -> None:
        proxy = start(routes=[Route("/metrics", lambda request: PlainTextResponse("mine"))])
        assert proxy.client.get("/metrics").text == "mine"
        assert proxy.client.get("/ragorder/health").json() == {"status": "ok"}
        assert proxy.client.post("/ragorder/health").status_code == 405
        assert far_end.requests == []


class TestStreaming:
    @pytest.mark.parametrize("body", [{"stream": True}, tagged("ab", stream=True)], ids=["untagged", "tagged"])
    def test_every_chunk_arrives_as_it_was_sent_and_when(self, body: Any, proxy: Proxy, far_end: FarEnd) -> None:
        steps = [threading.Event() for _ in range(3)]
        chunks = [ROLE, TOKEN[:20], TOKEN[20:] + b": comment\r\n\r\nevent: x\ndata: \xff\n\n", LAST]
        far_end.answer = answer_events(chunks[0], steps[0], chunks[1], steps[1], chunks[2], steps[2], chunks[3])
        with proxy.client.stream("POST", CHAT, json=body) as response:
            raw = response.iter_raw()
            for chunk, step in zip(chunks, [*steps, None], strict=True):
                # The next one is not sent before this one has come.
                assert next(raw) == chunk
                if step is not None:
                    step.set()
            assert b"".join(raw) == b""
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "stream_options" not in far_end.last.json, "nothing is asked for that the client did not"
