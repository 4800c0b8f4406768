"""Requests that the proxy refuses: limits, keys, its own failures and options that cannot be."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from typing import Any

import pytest
from support.far_end import Answer, FarEnd
from support.sent_requests import (
    CHAT,
    TEMPLATE,
)

from ragorder import Orderer, PromptBuilder

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.proxied import (
    WHOLE,
    Proxy,
    Start,
    error_of,
    fail,
    tagged,
)

from ragorder.adapters.http_client import AddressError, Server, ServerError
from ragorder.adapters.proxy import (
    DocumentTemplate,
    Fleet,
    RepeatedDocuments,
    ReplicaAddress,
    TemplateError,
    make_app,
)


class TestLimits:
    @pytest.mark.parametrize("path", [CHAT, "/v1/files"])
    @pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
    def test_a_body_that_is_too_long_is_413(self, path: str, chunked: bool, start: Start, far_end: FarEnd) -> None:
        proxy = start(body_limit=1000)
        body = b"x" * 1001
        response = proxy.client.post(path, content=iter([body[:500], body[500:]]) if chunked else body)
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert far_end.requests == []
        assert proxy.client.post(path, content=body[1:]).status_code == 200

    def test_a_declared_length_is_believed_before_the_body_comes(self, start: Start) -> None:
        with socket.create_connection(start(body_limit=1000).address, timeout=60) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
            assert connection.recv(20).startswith(b"HTTP/1.1 413")


class TestKeys:
    KEY = "k3y-äöü"

    @pytest.fixture
    def proxy(self, start: Start) -> Proxy:
        """Blanks around the key do not count."""
        page = Route("/ragorder", lambda request: PlainTextResponse("page"))
        return start(api_key=f" {self.KEY}\n", routes=[page])

    def bearer(self, key: str) -> dict[str, bytes]:
        return {"authorization": b"Bearer " + key.encode()}

    def basic(self, key: str, user: str = "anyone") -> dict[str, bytes]:
        return {"authorization": b"Basic " + base64.b64encode(f"{user}:{key}".encode())}

    def test_it_is_taken_as_token_and_as_password(self, proxy: Proxy, far_end: FarEnd) -> None:
        for headers in (self.bearer(self.KEY), self.basic(self.KEY), self.basic(self.KEY, "")):
            assert proxy.client.get("/x", headers=headers).content == WHOLE
            assert far_end.last.header("authorization") == [], "it is not forwarded"
            assert proxy.client.get("/ragorder", headers=headers).text == "page"
        lower = {"authorization": b"bearer   " + self.KEY.encode()}
        assert proxy.client.get("/x", headers=lower).status_code == 200

    @pytest.mark.parametrize(
        "path", ["/", "/health", CHAT, "/metrics", "/ragorder", "/ragorder/openapi.json", "/ragorder/health/"]
    )
    def test_without_it_nothing_is_answered_but_probes(self, path: str, proxy: Proxy, far_end: FarEnd) -> None:
        encoded = self.KEY.encode()
        wrong = [
            b"",
            b"Bearer",
            b"Bearer x" + encoded,
            b"Bearer " + encoded[:-1],
            encoded,
            b"Basic " + encoded,
            b"Basic " + base64.b64encode(encoded),
            b"Basic " + base64.b64encode(encoded + b":"),
            b"Basic \xff===",
            b"Digest " + encoded,
        ]
        for authorization in (None, *wrong):
            headers = {} if authorization is None else {"authorization": authorization}
            response = proxy.client.request("POST" if path == CHAT else "GET", path, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            challenges = response.headers.get_list("www-authenticate")
            assert [challenge.split()[0] for challenge in challenges] == ["Bearer", "Basic"]
        twice = [("authorization", b"Bearer " + encoded), ("authorization", b"Bearer x")]
        assert proxy.client.get(path, headers=twice).status_code == 401
        assert proxy.client.get("/ragorder/health").status_code == 200
        assert far_end.requests == []

    def test_keys_are_compared_in_constant_time(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        compared = []

        def compare(given: bytes, key: bytes) -> bool:
            compared.append((given, key))
            return True

        monkeypatch.setattr("hmac.compare_digest", compare)
        assert proxy.client.get("/x", headers=self.bearer("wrong")).status_code == 200
        assert compared == [(b"wrong", self.KEY.encode())]

    @pytest.mark.parametrize("api_key", [None, "k"])
    def test_the_upstreams_key_is_sent_instead(self, api_key: str | None, start: Start, far_end: FarEnd) -> None:
        start(api_key=api_key, upstream_api_key="up").client.get("/x", headers=self.bearer("k"))
        assert far_end.last.header("authorization") == ["Bearer up"]

    def test_user_and_password_of_the_upstream_are_sent(self, start: Start, upstream: str, far_end: FarEnd) -> None:
        start(upstream=upstream.replace("//", "//us%40er:pass@")).client.get("/x", headers=self.bearer("k"))
        assert far_end.last.header("authorization") == [f"Basic {base64.b64encode(b'us@er:pass').decode()}"]


class TestFailures:
    def test_an_error_of_its_own_quotes_nothing(self, proxy: Proxy, far_end: FarEnd, caplog: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ragorder.adapters.proxy.bodies.parsing.read_tagged", fail)
            response = proxy.post(tagged("ab"))
        assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
        assert "secret" not in response.text + caplog.text
        assert "RuntimeError" in caplog.text
        assert far_end.requests == []

    @pytest.mark.parametrize(
        ("options", "error", "said"),
        [
            ({"builder": PromptBuilder("Be kind.")}, ValueError, "system prompt"),
            ({"template": DocumentTemplate("<d>{text}</d>"), "number_by_place": True}, TemplateError, r"needs \{id}"),
            (
                {"repeated": RepeatedDocuments(DocumentTemplate(TEMPLATE)), "number_by_place": True},
                TemplateError,
                "position number",
            ),
            ({"route": True}, ValueError, "topic_header='x-session-id'"),
            ({"topic_header": "x session"}, ValueError, "x session"),
            (
                {"route": True, "topic_header": "x", "upstream": Fleet([ReplicaAddress("http://x", Orderer())])},
                ValueError,
                "chooses the replica itself",
            ),
            *(
                ({"upstream": address}, AddressError, None)
                for address in ("", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://u:secret@")
            ),
        ],
        ids=lambda options: ", ".join(options) if isinstance(options, dict) else "",
    )
    def test_options_that_cannot_be_are_refused(self, options: Any, error: type[Exception], said: str | None) -> None:
        with pytest.raises(error, match=said) as caught:
            make_app(Orderer(), **{"upstream": "http://127.0.0.1:1"} | options)
        assert "secret" not in str(caught.value)


def test_a_server_that_redirects_to_no_possible_host_gives_no_answer(serve: Callable[[Any], str]) -> None:
    far_end = FarEnd(Answer([b" "], 302, [("location", "http://gpu..lan/metrics")]))
    with Server(serve(far_end), timeout_s=60) as server, pytest.raises(ServerError, match="gave no answer"):
        server.get("/metrics")
