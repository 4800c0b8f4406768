"""How requests end: what the orderer hears, clients that leave, and timeouts."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from support.far_end import Answer, FarEnd, answer_events
from support.sent_requests import (
    CHAT,
    ROLE,
    TOKEN,
    RecordingOrderer,
    tag,
)

from ragorder import Ordering
from ragorder.ordering import RequestOutcome

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.proxied import (
    COMPLETIONS,
    FAILED,
    JSON,
    LAST,
    UNKNOWN,
    WHOLE,
    Proxy,
    Start,
    error_of,
    fail,
    tagged,
)

from ragorder.adapters.proxy import (
    Timeouts,
    make_app,
)

SERVED = RequestOutcome(True, 512, 607, 600)
ODD_USAGE = {"prompt_tokens": 3, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": 4}}


class TestOutcomes:
    @pytest.mark.parametrize(
        ("content", "finished"),
        [
            (WHOLE, SERVED),
            (b'{"choices": []}', UNKNOWN),
            (gzip.compress(WHOLE), UNKNOWN),
            # Numbers that cannot be are ignored.
            (json.dumps({"usage": ODD_USAGE}).encode(), RequestOutcome(True, None, None, 3)),
        ],
        ids=["usage", "none", "compressed", "odd"],
    )
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_an_answer_in_one_piece_is_confirmed_with_its_usage(
        self, path: str, content: bytes, finished: Any, proxy: Proxy, far_end: FarEnd, orderer: RecordingOrderer
    ) -> None:
        packed = [("content-encoding", "gzip")] if content[:1] == b"\x1f" else []
        far_end.answer.headers, far_end.answer.chunks = [*JSON.items(), *packed], [content]
        proxy.post({"ragorder": tag("ab")}, path)
        assert orderer.outcome() == finished

    def test_the_time_between_tokens_of_a_stream_is_counted(self, start: Start, far_end: FarEnd) -> None:
        times: list[float] = []
        proxy = start(on_tbt=times.append)
        proxy.post({"ragorder": tag("ab")})
        far_end.answer = answer_events(TOKEN, LAST)
        proxy.post(tagged("ab", stream=True))
        assert times == [], "there is none between the tokens of an answer in one piece, or of one token"
        far_end.answer = answer_events(ROLE, TOKEN, TOKEN, TOKEN, LAST)
        proxy.post(tagged("ab", stream=True))
        (tbt_s,) = times
        assert tbt_s >= 0
        # A counter that fails fails no request.
        assert start(on_tbt=lambda tbt_s: 1 / 0).post(tagged("ab", stream=True)).content.endswith(LAST)

    def test_a_stream_is_confirmed_with_its_last_event(
        self, proxy: Proxy, far_end: FarEnd, orderer: RecordingOrderer
    ) -> None:
        far_end.answer = answer_events(TOKEN, LAST, threading.Event())
        with proxy.client.stream("POST", CHAT, json=tagged("ab", stream=True)) as response:
            raw = response.iter_raw()
            assert next(raw) + next(raw) == TOKEN + LAST
            assert orderer.finished == [SERVED]

    @pytest.mark.parametrize(
        ("chunks", "finished"),
        [
            ([None], FAILED),
            ([ROLE, None], FAILED),
            ([b'data: {"error": {"message": "no"}}\n\n'], FAILED),
            ([ROLE, b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n'], FAILED),
            ([ROLE, TOKEN, None], UNKNOWN),
            ([TOKEN + LAST[:30], None], UNKNOWN),
            ([TOKEN, b"data: [DONE]\n\n"], UNKNOWN),
        ],
        ids=["nothing", "role", "error", "role-error", "token", "broken-usage", "no-usage"],
    )
    def test_a_stream_that_breaks_counts_from_its_first_token_on(
        self, chunks: Any, finished: RequestOutcome, proxy: Proxy, far_end: FarEnd, orderer: RecordingOrderer
    ) -> None:
        far_end.answer = answer_events(*chunks)
        has_begun_and_breaks = chunks[-1] is None and len(chunks) > 1
        with pytest.raises(httpx2.RemoteProtocolError) if has_begun_and_breaks else nullcontext():
            proxy.post(tagged("ab", stream=True))
        assert orderer.outcome() == finished

    def test_an_answer_that_is_shorter_than_it_says_is_broken_for_the_client_too(
        self, proxy: Proxy, far_end: FarEnd
    ) -> None:
        far_end.answer = Answer([WHOLE, None], headers=[*JSON.items(), ("content-length", "1000")])
        with pytest.raises(httpx2.RemoteProtocolError):
            proxy.post({})

    @pytest.mark.parametrize("headers", [[], [("content-length", str(len(WHOLE)))]], ids=["chunks", "length"])
    async def test_it_is_finished_when_the_client_has_its_answer(
        self, headers: list[tuple[str, str]], upstream: str, far_end: FarEnd, orderer: RecordingOrderer
    ) -> None:
        """Which may send the next request at once."""
        far_end.answer.headers = [("content-type", "application/json"), *headers]
        body = json.dumps(tagged("ab")).encode()
        received = iter([{"type": "http.request", "body": body, "more_body": False}])
        got, finished = b"", []

        async def receive() -> dict[str, Any]:
            return next(received, None) or await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Any) -> None:
            nonlocal got
            got += message.get("body", b"")
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last or (headers and got == WHOLE):
                finished.append(list(orderer.finished))

        head: dict[str, Any] = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode()}
        sent = [(b"host", b"x"), (b"content-type", b"application/json")]
        app = make_app(orderer, upstream=upstream)
        await app(head | {"query_string": b"", "headers": sent}, receive, send)
        assert got == WHOLE
        assert finished[0] == [SERVED]

    def test_a_failure_in_finishing_is_not_raised(self, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ordering, "confirm", fail)
            assert proxy.post(tagged("ab")).content == WHOLE
        assert "secret" not in caplog.text


class TestAClientThatLeaves:
    @pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
    def test_before_the_answer_cancels_the_request(self, path: str, proxy: Proxy, far_end: FarEnd) -> None:
        far_end.answer.chunks = [threading.Event()]
        body = json.dumps(tagged("ab") if path == CHAT else {"input": "x"})
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        with socket.create_connection(proxy.address) as connection:
            connection.sendall("\r\n".join([*lines, "", body]).encode())
            assert far_end.begun.wait(60)
        assert far_end.left.wait(60)

    def test_during_an_upload_cancels_it(self, proxy: Proxy, far_end: FarEnd) -> None:
        with socket.create_connection(proxy.address) as connection:
            connection.sendall(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
            assert far_end.reached.wait(60)
        assert far_end.left.wait(60)
        assert far_end.requests == []

    @pytest.mark.parametrize(("token", "finished"), [(b"", FAILED), (TOKEN, UNKNOWN)], ids=["before", "after"])
    def test_during_a_stream_cancels_it_which_counts_from_its_first_token_on(
        self, token: bytes, finished: RequestOutcome, proxy: Proxy, far_end: FarEnd, orderer: RecordingOrderer
    ) -> None:
        far_end.answer = answer_events(ROLE + token, threading.Event())
        with proxy.client.stream("POST", CHAT, json=tagged("ab", stream=True)) as response:
            assert next(response.iter_raw()) == ROLE + token
            assert not far_end.left.is_set()
        assert far_end.left.wait(60)
        assert orderer.outcome() == finished
        far_end.answer = answer_events(TOKEN)
        assert proxy.post({}).content == TOKEN


class TestTimeouts:
    def test_a_server_that_does_not_answer_in_time_is_504(self, start: Start, far_end: FarEnd) -> None:
        far_end.answer.chunks = [threading.Event()]
        response = start(timeouts=Timeouts(read_s=0.2)).post({})
        assert (response.status_code, error_of(response)["type"]) == (504, "server_error")
        assert far_end.left.wait(60)

    def test_each_byte_starts_the_time_again(self, start: Start, far_end: FarEnd) -> None:
        far_end.answer = answer_events(TOKEN, 0.6, TOKEN, 0.6, TOKEN, 0.6, LAST)
        assert start(timeouts=Timeouts(read_s=1.7)).post({}).content == 3 * TOKEN + LAST

    def test_a_stream_that_stops_is_broken_off(self, start: Start, far_end: FarEnd, orderer: RecordingOrderer) -> None:
        far_end.answer = answer_events(TOKEN, threading.Event())
        with pytest.raises(httpx2.RemoteProtocolError):
            start(timeouts=Timeouts(read_s=1)).post(tagged("ab", stream=True))
        assert orderer.outcome() == UNKNOWN
        assert far_end.left.wait(60)

    def test_a_server_that_does_not_accept_is_504(self, start: Start) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            # Connections that nobody accepts fill its queue.
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            proxy = start(upstream=f"http://127.0.0.1:{full.getsockname()[1]}", timeouts=Timeouts(connect_s=0.2))
            response = proxy.post({})
            for each in waiting:
                each.close()
        assert (response.status_code, error_of(response)["code"]) == (504, "upstream_timeout")

    def test_a_server_that_is_not_there_is_502(self, start: Start, orderer: RecordingOrderer) -> None:
        response = start(upstream="http://127.0.0.1:9").post(tagged("ab"))
        assert (response.status_code, error_of(response)["type"]) == (502, "server_error")
        assert orderer.outcome() == FAILED
        assert "127.0.0.1" not in response.text
