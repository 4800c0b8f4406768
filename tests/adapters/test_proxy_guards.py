"""What does not pass the proxy, what it says of itself, and how it asks its server."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from support.inside import set_bounds

from ragorder import Orderer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

import httpx2
from support.http_server import Handler, LocalServer
from support.sent_requests import CHAT

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.proxy import make_app
from ragorder.adapters.proxy.access import THIS_MACHINE


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


@dataclass
class RawServer:
    """A server that answers each request with these bytes, whatever they are, and tells connections apart. Without any
    it closes the connection."""

    answers: list[bytes] = field(default_factory=list)
    requests: list[tuple[int, bytes]] = field(default_factory=list)
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def paths(self) -> list[str]:
        return [head.split(b" ")[1].decode() for _, head in self.requests]

    @property
    def connections(self) -> list[int]:
        return [number for number, _ in self.requests]

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            number += 1
            threading.Thread(target=self._answer, args=(number, connection), daemon=True).start()

    def _answer(self, number: int, connection: socket.socket) -> None:
        received = b""
        # The proxy may close at any time.
        with connection, suppress(OSError):
            while piece := connection.recv(1 << 16):
                received += piece
                if b"\r\n\r\n" not in received:
                    continue
                self.requests.append((number, received))
                received = b""
                time.sleep(self.delay_s)
                given = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
                if not given:
                    return
                connection.sendall(given)


Start = Callable[..., httpx2.Client]


@pytest.fixture
def server() -> Iterator[RawServer]:
    server = RawServer([answer(b"ok")])
    yield server
    server.close()


@pytest.fixture
def start(server: RawServer, serve: Callable[[Any], str]) -> Iterator[Start]:
    """Starts proxies of the server; gives clients of them."""
    clients: list[httpx2.Client] = []

    def start(**options: Any) -> httpx2.Client:
        app = make_app(Orderer(block_size=16, strict=True), **{"upstream": server.url} | options)
        clients.append(httpx2.Client(base_url=serve(app), timeout=60, trust_env=False, verify=False))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def code_of(response: httpx2.Response) -> str:
    code: str = response.json()["error"]["code"]
    return code


class TestAnswersOfTheServer:
    def test_connections_are_used_again(self, start: Start, server: RawServer) -> None:
        client = start()
        for _ in range(3):
            assert client.get("/v1/models").text == "ok"
        assert client.post(CHAT, json={}).text == "ok"
        assert server.connections == [1] * 4

    @pytest.mark.parametrize(
        ("body", "method"),
        [(b"ok", "GET"), (b"x" * (1 << 16), "GET"), (b"x" * ((1 << 16) - 42), "GET"), (b"", "HEAD")],
        ids=["short", "long", "64 KiB on the wire", "HEAD"],
    )
    def test_bytes_after_an_answer_are_dropped(self, body: bytes, method: str, start: Start, server: RawServer) -> None:
        smuggled = answer(body) + answer(b"SMUGGLED") * 3
        server.answers = [smuggled] * 4 + [answer(b"end")]
        client = start()
        for _ in range(4):
            assert client.request(method, "/v1/models").content == body
        assert client.get("/v1/models").text == "end"
        assert len(set(server.connections)) == 5

    def test_a_body_after_head_reaches_no_client(self, start: Start, server: RawServer) -> None:
        server.answers = [answer(b"body"), answer(b"next")]
        client = start()
        assert client.head("/v1/models").status_code == 200
        assert client.get("/v1/models").text == "next"

    def test_of_two_lengths_the_chunks_count(self, start: Start, server: RawServer) -> None:
        chunks = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
        lines = [b"HTTP/1.1 200 OK", b"Content-Length: 2", b"Transfer-Encoding: chunked", b"X: y", b"", chunks]
        server.answers = [b"\r\n".join(lines)]
        response = start().get("/v1/models")
        assert (response.status_code, response.text) == (200, "hello world")
        assert "content-length" not in response.headers
        assert response.headers["x"] == "y"

    @pytest.mark.parametrize(
        "wrong",
        [
            b"",
            b"garbage\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nx: \x01\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 9\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\nok",
        ],
        ids=repr,
    )
    def test_one_that_is_no_http_is_502(self, wrong: bytes, start: Start, server: RawServer) -> None:
        server.answers = [wrong]
        response = start().get("/v1/models")
        assert (response.status_code, code_of(response)) == (502, "upstream_unavailable")


class TestPaths:
    def test_no_path_leads_out_of_the_upstream_address(self, start: Start, server: RawServer) -> None:
        client = start(upstream=f"{server.url}/tenant1/v1", upstream_api_key="operator")
        for path in (
            "/../tenant2/v1/models",
            "/v1/../admin",
            "/v1/./models",
            "/v1/..",
            "/%2e%2e/x",
            "/v1/%2E./x",
            "/v1/..%2fadmin",
            "/v1/..%5cadmin",
            "/v1/..\\admin",
            "/v1/..;x=1/admin",
        ):
            with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=60) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert connection.recv(12) == b"HTTP/1.1 400", path
        assert server.requests == []


class TestHosts:
    def refused(self, client: httpx2.Client, **headers: str) -> str | None:
        response = client.post(CHAT, content=b"{}", headers={"content-type": "text/plain", **headers})
        return None if response.status_code == 200 else code_of(response)

    def test_names_of_this_machine_are_accepted(self, start: Start) -> None:
        client = start(hosts=THIS_MACHINE)
        assert self.refused(client) is None
        for host in ("localhost", "LOCALHOST:8100", "127.0.0.1:1", "[::1]:8100"):
            assert self.refused(client, host=host) is None
        assert self.refused(client, host="localhost", origin="http://localhost:3000") is None

    def test_other_hosts_and_their_web_pages_are_refused(self, start: Start, server: RawServer) -> None:
        client = start(hosts=THIS_MACHINE)
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.", "evil@localhost:x", "[::1", ""):
            assert self.refused(client, host=host) == "foreign_host"
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", ""):
            assert self.refused(client, origin=origin) == "foreign_origin"
        assert client.get("/ragorder/openapi.json", headers={"host": "evil.example"}).status_code == 403
        assert server.requests == []

    def test_a_missing_or_repeated_host_is_refused(self, start: Start, server: RawServer) -> None:
        url = start(hosts=THIS_MACHINE).base_url
        for head in (b"HTTP/1.0\r\n", b"HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n"):
            with socket.create_connection((url.host, url.port or 0), timeout=60) as connection:
                connection.sendall(b"GET /v1/models " + head + b"\r\n")
                assert connection.recv(10).startswith((b"HTTP/1.1 4",))
        assert server.requests == []

    def test_probes_are_answered_for_any_host(self, start: Start) -> None:
        client = start(hosts=THIS_MACHINE)
        for path in ("/ragorder/health", "/ragorder/ready"):
            assert client.get(path, headers={"host": "10.0.0.7"}).status_code == 200

    def test_with_a_key_or_another_address_all_hosts_are_accepted(self, start: Start) -> None:
        client = start(hosts=THIS_MACHINE, api_key="k")
        key = {"authorization": "Bearer k"}
        assert self.refused(client, host="proxy.example", origin="https://app.example", **key) is None
        assert self.refused(start(), host="proxy.example", origin="https://app.example") is None


class TestWebPages:
    """Of other origins, which browsers let send a request only if the server says so, and read only what it allows."""

    ORIGIN: ClassVar[dict[str, str]] = {"origin": "http://localhost:3000"}
    ASKED: ClassVar[dict[str, str]] = {
        **ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    def test_ask_the_server_without_the_key(self, start: Start, server: RawServer) -> None:
        server.answers = [
            answer(b"", b"access-control-allow-origin: *", b"access-control-allow-headers: authorization")
        ]
        response = start(api_key="k").options(CHAT, headers=self.ASKED)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
        assert response.headers["access-control-allow-headers"] == "authorization"
        assert server.requests[0][1].startswith(f"OPTIONS {CHAT} HTTP/1.1\r\n".encode())
        assert b"origin: http://localhost:3000\r\n" in server.requests[0][1]

    def test_only_ask_without_it(self, start: Start, server: RawServer) -> None:
        client = start(api_key="k")
        for method, headers, content in (
            ("OPTIONS", {}, b""),
            ("OPTIONS", self.ORIGIN, b""),
            ("OPTIONS", self.ASKED, b"a body"),
            ("OPTIONS", self.ASKED | {"transfer-encoding": "chunked"}, b"a body"),
            ("GET", self.ASKED, b""),
            ("POST", self.ASKED, b"{}"),
        ):
            response = client.request(method, CHAT, headers=headers, content=content)
            assert code_of(response) == "invalid_api_key"
        assert server.requests == []

    def test_do_not_get_to_pages_of_the_proxy(self, start: Start, server: RawServer) -> None:
        response = start(api_key="k").options("/ragorder/openapi.json", headers=self.ASKED)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
        assert server.requests == []

    def test_can_read_why_they_were_refused(self, start: Start) -> None:
        """Without credentials of the browser's own: that is what the asterisk means."""
        client = start(api_key="k")
        bad = client.post(CHAT, json={"ragorder": 1}, headers=self.ORIGIN | {"authorization": "Bearer k"})
        for response in (client.post(CHAT, headers=self.ORIGIN), bad):
            assert response.status_code in (400, 401)
            assert response.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in response.headers
        own = start(hosts=THIS_MACHINE).post(CHAT, json={"ragorder": 1}, headers=self.ORIGIN)
        assert (own.status_code, own.headers["access-control-allow-origin"]) == (400, "*")

    def test_can_read_nothing_if_foreign_or_not_checked(self, start: Start, server: RawServer) -> None:
        foreign = self.ASKED | {"origin": "https://evil.example"}
        client = start(hosts=THIS_MACHINE)
        for response in (client.options(CHAT, headers=foreign), client.post(CHAT, headers=foreign)):
            assert code_of(response) == "foreign_origin"
            assert "access-control-allow-origin" not in response.headers
        assert server.requests == []
        response = start().post(CHAT, json={"ragorder": 1}, headers=foreign)
        assert response.status_code == 400
        assert "access-control-allow-origin" not in response.headers

    def test_get_answers_with_the_headers_of_the_server(self, start: Start, server: RawServer) -> None:
        server.answers = [answer(b"ok", b"access-control-allow-origin: http://localhost:3000", b"vary: Origin")]
        response = start(api_key="k").get("/v1/models", headers=self.ORIGIN | {"authorization": "Bearer k"})
        assert response.headers.get_list("access-control-allow-origin") == ["http://localhost:3000"]


class TestReadiness:
    def test_a_server_that_answers_is_ready(self, start: Start, server: RawServer) -> None:
        client = start(api_key="k", upstream_api_key="up")
        for _ in range(5):
            assert client.get("/ragorder/ready").status_code == 200
        assert server.paths in (["/health"], ["/health"] * 2), "at most once a second"
        assert b"authorization: Bearer up" in server.requests[0][1]

    def test_readiness_falls_back_to_the_second_path(self, start: Start, server: RawServer) -> None:
        server.answers = [answer(b"", status=b"404 Not Found"), answer(b"{}")]
        assert start().get("/ragorder/ready").status_code == 200
        assert server.paths == ["/health", "/v1/models"]

    def test_a_server_with_errors_is_not_ready(self, start: Start, server: RawServer) -> None:
        server.answers = [answer(b"", status=b"503 Starting")]
        client = start()
        response = client.get("/ragorder/ready")
        assert (response.status_code, code_of(response)) == (503, "upstream_not_ready")
        assert client.get("/ragorder/health").status_code == 200

    def test_a_silent_server_is_not_ready(self, start: Start, server: RawServer, monkeypatch: Any) -> None:
        set_bounds(monkeypatch, answer_check_s=0.2)
        server.delay_s = 5
        assert start().get("/ragorder/ready").status_code == 503


class TestServer:
    """What the proxy itself asks a server for."""

    def test_metrics_are_read_without_an_http_proxy(self, server: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with Server(server.url, timeout_s=10, api_key="secret") as asked:
            assert asked.get("/metrics") == "ok"

    def test_endless_metrics_are_not_read(self) -> None:
        sent = 0

        class Endless(Handler):
            def do_GET(self) -> None:
                nonlocal sent
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):
                    while sent < 1 << 28:
                        sent += self.wfile.write(bytes(1 << 20))

        with (
            LocalServer(Endless) as endless,
            Server(endless.base_url, timeout_s=30) as asked,
            pytest.raises(ServerError, match="more than 64 MiB"),
        ):
            asked.get("/metrics")
        assert sent < 1 << 27

    def test_compressed_metrics_are_not_read(self, server: RawServer) -> None:
        server.answers = [answer(gzip.compress(bytes(1 << 20)), b"content-encoding: gzip")]
        with Server(server.url, timeout_s=10) as asked, pytest.raises(ServerError, match="compressed"):
            asked.get("/metrics")
        assert b"accept-encoding: identity" in server.requests[0][1].lower()
