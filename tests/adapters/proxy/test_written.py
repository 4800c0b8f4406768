"""Documents in messages, and bodies that are compressed."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from support.far_end import FarEnd
from support.sent_requests import (
    CHAT,
    TEMPLATE,
    names_in,
    tag,
    written,
)
from support.waiting import eventually

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.proxied import (
    COMPLETIONS,
    Proxy,
    Start,
    chat,
    error_of,
    tagged,
)

from ragorder.adapters.proxy import (
    DocumentTemplate,
)

EVERY_PATH = [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses"]


class TestDocumentsInMessages:
    @pytest.fixture
    def proxy(self, start: Start) -> Proxy:
        return start(template=DocumentTemplate(TEMPLATE))

    def test_the_first_message_with_two_or_more_is_ordered(self, proxy: Proxy, far_end: FarEnd) -> None:
        def body(first: str, second: str) -> dict[str, Any]:
            contents = ["Hello", written("h"), written(first), written(second)]
            return {"messages": [{"role": "user", "content": content} for content in contents]}

        proxy.post(body("ab", "cd"))
        proxy.post(body("ba", "dc"))
        assert far_end.last.json == body("ab", "dc")

    def test_a_tagged_request_is_ordered_by_its_tag(self, proxy: Proxy, far_end: FarEnd) -> None:
        proxy.post(chat("abc"))
        proxy.post(chat("cba") | {"ragorder": tag("")})
        assert far_end.last.json["messages"][:-1] == chat("cba")["messages"]

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"null",
            b"{",
            b'{"messages": NaN}',
            b'{"messages": null}',
            b'{"messages": {}}',
            b'{"messages": [1, null, [], "text", {"content": 1}, {"content": [1, null, {"text": 2}]}]}',
            b'{"messages": [{"role": "user", "content": "\\ud800"}], "x": "\\uD83D"}',
            b'{"messages": [{"role": "user", "content": "\xff"}]}',
            b'{"messages": {}, "input": 3, "system": 7, "instructions": []}',
            b'{"messages": [{"content": [1, null, {"content": [2]}, {"content": {}}]}]}',
            b'{"input": [1, null, [], {"output": 1}, {"output": [1, {"text": 2}]}], "instructions": null}',
            b'{"messages": ' + b"[" * 100_000,
            json.dumps(chat("a", system=written("b"), input=written("c"))).encode(),
            json.dumps(chat("ab", cache_salt=7)).encode(),
        ],
        ids=lambda body: repr(body[:50]),
    )
    def test_a_body_without_any_is_sent_byte_for_byte(self, body: bytes, proxy: Proxy, far_end: FarEnd) -> None:
        for path in EVERY_PATH:
            assert proxy.post(body, path).status_code == 200
            assert far_end.last.body == body
        prompt = json.dumps({"prompt": written("ab")}).encode()
        proxy.post(prompt)
        assert far_end.last.body == prompt, "a chat has none"


def raw_deflate(content: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "in capitals": ("GZIP", gzip.compress),
    "its old name": ("x-gzip", gzip.compress),
    "beside none": ("identity, gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without its frame": ("deflate", raw_deflate),
    "zstd": ("zstd", lambda content: pytest.importorskip("zstandard").compress(content)),
    "br": ("br", lambda content: pytest.importorskip("brotli", minversion="1.2").compress(content)),
}


class TestCompressedBodies:
    def post(
        self, proxy: Proxy, body: bytes, encoding: str, path: str = CHAT, kind: str = "application/json"
    ) -> httpx2.Response:
        headers = {"content-encoding": encoding, "content-type": kind}
        return proxy.client.post(path, content=body, headers=headers)

    @pytest.mark.parametrize("kind", PACKED)
    def test_documents_in_them_are_ordered(self, kind: str, start: Start, far_end: FarEnd) -> None:
        proxy = start(template=DocumentTemplate(TEMPLATE))
        encoding, packed = PACKED[kind]
        for make in (tagged, chat) if kind == "gzip" else (tagged,):
            for names in ("abc", "cba"):
                answer = self.post(proxy, packed(json.dumps(make(names)).encode()), encoding)
            assert answer.headers["x-ragorder-permutation"] == "2,1,0"
            assert names_in(far_end.last.json["messages"][-1]["content"]) == "abc"
            assert far_end.last.header("content-encoding") == []
            assert far_end.last.header("content-length") == [str(len(far_end.last.body))]

    def test_without_documents_they_are_sent_unpacked_and_a_tag_elsewhere_is_refused(
        self, proxy: Proxy, far_end: FarEnd
    ) -> None:
        body = json.dumps({"messages": [], "x": 1}).encode()
        for path in (*EVERY_PATH, "/v1/embeddings"):
            assert self.post(proxy, gzip.compress(body), "gzip", path).status_code == 200
            assert (far_end.last.body, far_end.last.header("content-encoding")) == (body, [])
        packed = gzip.compress(json.dumps(tagged("ab")).encode())
        assert error_of(self.post(proxy, packed, "gzip", "/v1/embeddings"))["code"] == "no_documents_here"
        assert len(far_end.requests) == 5

    @pytest.mark.parametrize("encoding", ["compress", "gzip, gzip", "unheard-of"])
    def test_those_that_may_hide_a_tag_are_refused(self, encoding: str, proxy: Proxy, far_end: FarEnd) -> None:
        for path in EVERY_PATH:
            answer = self.post(proxy, b"packed", encoding, path)
            assert (answer.status_code, far_end.requests) == (415, [])
            assert {"gzip", "deflate"} <= set(answer.headers["accept-encoding"].split(", "))
            assert "gzip" in answer.json()["error"]["message"]

    def test_on_other_routes_they_are_passed_on_and_counted_if_they_may_be_json(
        self, start: Start, far_end: FarEnd
    ) -> None:
        reasons: list[str] = []
        proxy = start(on_passed=reasons.append)
        assert self.post(proxy, b"packed", "compress", "/v1/embeddings").status_code == 200
        assert (far_end.last.body, far_end.last.header("content-encoding")) == (b"packed", ["compress"])
        assert self.post(proxy, b"packed", "gzip", "/v1/files", "application/octet-stream").status_code == 200
        assert (far_end.last.body, far_end.last.header("content-encoding")) == (b"packed", ["gzip"])
        assert reasons == ["compressed"]

    @pytest.mark.parametrize("kind", ["gzip", "deflate", "zstd", "br"])
    @pytest.mark.parametrize(
        "damage",
        [lambda packed: packed[:-1], lambda packed: packed + b"x", lambda packed: packed + b"x" * 100_000],
        ids=["cut", "longer", "much longer"],
    )
    def test_damaged_ones_are_refused(
        self, damage: Callable[[bytes], bytes], kind: str, proxy: Proxy, far_end: FarEnd
    ) -> None:
        encoding, packed = PACKED[kind]
        answer = self.post(proxy, damage(packed(json.dumps(tagged("ab")).encode())), encoding)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_encoding")
        assert far_end.requests == []

    @pytest.mark.parametrize("kind", ["gzip", "deflate", "zstd", "br"])
    def test_the_limit_counts_unpacked_bytes(self, kind: str, start: Start, far_end: FarEnd) -> None:
        proxy = start(body_limit=1 << 20)
        encoding, packed = PACKED[kind]
        for length, status in ((1 << 20, 200), ((1 << 20) + 1, 413), (1 << 26, 413)):
            body = b"{" + b" " * (length - 2) + b"}"
            assert self.post(proxy, packed(body), encoding).status_code == status
        assert len(far_end.requests) == 1

    def test_unpacked_bytes_count_with_all_bodies(self, start: Start, far_end: FarEnd) -> None:
        """One alone always has room; a second one waits until the first was sent."""
        proxy = start(bodies_limit=1 << 20)
        far_end.answer.status = 200
        with socket.create_connection(proxy.address) as holder:
            holder.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{".encode())
            assert eventually(lambda: self.post(proxy, gzip.compress(b" " * (1 << 21)), "gzip").status_code == 503)
        assert eventually(lambda: self.post(proxy, gzip.compress(b" " * (1 << 21)), "gzip").status_code == 200)
