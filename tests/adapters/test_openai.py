"""The client of OpenAI-compatible servers: what it sends, what it reads, and that every ordering is finished once."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_server import Handler, LocalServer
from support.inside import turns_in

from ragorder import Document, Orderer, Ordering, PromptBuilder
from ragorder.adapters.openai import Answer, AsyncOrderedClient, OrderedClient
from ragorder.conversation import message_key

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
# What breaks in the middle of a stream, the openai package wraps from version 3 on.
_WRAPS = int(openai.__version__.partition(".")[0]) >= 3
CUT = openai.APIConnectionError if _WRAPS else httpx.RemoteProtocolError
STALLED = openai.APITimeoutError if _WRAPS else httpx.ReadTimeout

QUERY = "Which secret is kept where?"
DOCUMENTS = [Document(f"d{number}", f"Secret number {number} is kept in drawer {number}.") for number in range(4)]


# ---------------------------------------------------------------- a server that says what a test tells it to say


def chat(content: str | None = None, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content} | delta, "finish_reason": finish_reason}]}


def usage(prompt_tokens: Any = 100, completion_tokens: Any = 2, **fields: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0}
    return {"choices": [], "usage": counts | fields}


def cached(tokens: Any) -> dict[str, Any]:
    return usage(prompt_tokens_details={"cached_tokens": tokens})


ROLE = chat("", role="assistant")
STOP = chat(None, "stop")


@dataclass
class Response:
    """A stream of events (JSON, or raw lines of bytes), and how it ends.

    done: as it should, "[DONE]" included; eof: without it; cut: in the middle of the body; hold: not until the client
    hangs up; stall: the same, without a sign of life; silent: no response at all; hangup: the connection is closed
    instead of a response.
    """

    events: Sequence[dict[str, Any] | bytes] = ()
    end: str = "done"
    status: int = 200


GOOD = Response([ROLE, chat("Hello"), chat(" world"), STOP, cached(64)])


def error(status: int, message: str = "no", **fields: Any) -> Response:
    return Response([{"error": {"message": message, "type": "x", "param": None, "code": status} | fields}], "", status)


class Scripted(Handler):
    server: Server

    def do_POST(self) -> None:
        body = self.read_json()
        with self.server.lock:
            self.server.requests.append(body)
            self.server.paths.append(self.path)
            response = self.server.responses.popleft() if self.server.responses else self.server.answer(body)
        self.close_connection = response.end not in ("done", "")
        with suppress(OSError):
            self.play(response)

    def play(self, response: Response) -> None:
        if response.end == "silent":
            self.server.reached.set()
            self.server.closing.wait(60)
        if response.end in ("silent", "hangup"):
            return
        if response.status != 200:
            self.answer(response.status, json.dumps(response.events[0]))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        if response.end != "eof":
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in response.events:
            self.send(event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode(), response.end)
        if response.end == "done":
            self.send(b"data: [DONE]", response.end)
            self.wfile.write(b"0\r\n\r\n")
        elif response.end == "stall":
            self.server.closing.wait(60)
        elif response.end == "hold":
            self.server.reached.set()
            with suppress(OSError):
                while not self.server.closing.wait(0.02):
                    self.send(b": ping", response.end)
                return
            self.server.hung_up.set()

    def send(self, line: bytes, end: str) -> None:
        data = line + b"\n\n"
        self.wfile.write(data if end == "eof" else b"%x\r\n%s\r\n" % (len(data), data))


class Server(LocalServer):
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(Scripted)
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.responses: deque[Response] = deque()
        self.answer: Callable[[dict[str, Any]], Response] = lambda body: GOOD
        self.reached, self.hung_up, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.url = f"{self.base_url}/v1"

    def plays(self, *responses: Response) -> None:
        self.responses.extend(responses)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.closing.set()


# ---------------------------------------------------------------- clients, and an orderer that is watched


Events = list[tuple[str, float | None, float | None]]


class WatchedOrdering(Ordering[Any]):
    """An ordering that notes how it is finished: with how many cached tokens, and how many in all."""

    def __init__(self, ordering: Ordering[Any], events: Events) -> None:
        super().__init__(ordering.documents, ordering.permutation, ordering.prefix_documents, ordering.cached_tokens)
        self.watched, self.events = ordering, events

    def confirm(
        self,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        *,
        prompt_tokens: float | None = None,
    ) -> None:
        self.events.append(("confirmed", cached_tokens, total_tokens))
        self.watched.confirm(cached_tokens, total_tokens, prompt_tokens=prompt_tokens)

    def discard(self) -> None:
        self.events.append(("discarded", None, None))
        self.watched.discard()


class Watched(Orderer):
    """Keeps what it was asked, and how each of its orderings was finished, in the order in which they were made."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.finished: list[Events] = []
        self.asked: list[dict[str, Any]] = []

    def order(self, documents: Any, **options: Any) -> Ordering[Any]:
        self.asked.append(options)
        # Of this thread: the last one of the list may be another's.
        events: Events = []
        self.finished.append(events)
        return WatchedOrdering(super().order(documents, **options), events)


DISCARDED: Events = [("discarded", None, None)]
CONFIRMED: Events = [("confirmed", None, None)]
CONFIRMED_GOOD: Events = [("confirmed", 64, 102)]


@pytest.fixture
def sizes() -> dict[str, Any]:
    return {"block_size": 4}


@pytest.fixture
def orderer(sizes: dict[str, Any]) -> Iterator[Watched]:
    orderer = Watched(strict=True, **sizes)
    yield orderer
    assert all(len(events) == 1 for events in orderer.finished), "every ordering is finished exactly once"


class Sync:
    """The synchronous client, as the tests use both."""

    def __init__(self, url: str, options: dict[str, Any], **connection: Any) -> None:
        self.client = OrderedClient(openai.OpenAI(base_url=url, **connection), **options)

    def generate(self, *arguments: Any, **options: Any) -> Answer:
        return self.client.generate(*arguments, **options)

    def stream(self, *arguments: Any, take: int = 1000, of: Any = None, **options: Any) -> tuple[Any, list[str]]:
        """The stream after so many pieces were taken from it and it was closed, and the pieces."""
        pieces: list[str] = []
        with (of or self.client).stream(*arguments, **options) as stream:
            while len(pieces) < take and (piece := next(stream, None)) is not None:
                pieces.append(piece)
        return stream, pieces

    def close(self) -> None:
        pass


class Async:
    """The asynchronous client, driven from outside its event loop."""

    def __init__(self, url: str, options: dict[str, Any], **connection: Any) -> None:
        self.runner = asyncio.Runner()
        self.openai = openai.AsyncOpenAI(base_url=url, **connection)
        sleep = options.pop("sleep")

        async def async_sleep(seconds: float) -> None:
            sleep(seconds)

        self.client = AsyncOrderedClient(self.openai, sleep=async_sleep, **options)

    def generate(self, *arguments: Any, **options: Any) -> Answer:
        return self.runner.run(self.client.generate(*arguments, **options))

    def stream(self, *arguments: Any, take: int = 1000, of: Any = None, **options: Any) -> tuple[Any, list[str]]:
        async def read() -> tuple[Any, list[str]]:
            pieces: list[str] = []
            async with (of or self.client).stream(*arguments, **options) as stream:
                while len(pieces) < take and (piece := await anext(stream, None)) is not None:
                    pieces.append(piece)
            return stream, pieces

        return self.runner.run(read())

    def close(self) -> None:
        self.runner.run(self.openai.close())
        self.runner.close()


class Connect:
    """Makes clients of one kind for the scripted server; `slept` are the seconds that they waited before a retry."""

    def __init__(self, kind: type[Sync | Async], server: Any, orderer: Watched) -> None:
        self.kind, self.server, self.orderer = kind, server, orderer
        self.builder = PromptBuilder("Be brief.")
        self.slept: list[float] = []
        self.made: list[Sync | Async] = []

    def __call__(self, *, timeout: float = 10, max_retries: int = 0, **options: Any) -> Any:
        options = {"model": "served", "orderer": self.orderer, "builder": self.builder} | options
        options["sleep"] = self.slept.append
        connection = {"api_key": "key", "timeout": timeout, "max_retries": max_retries}
        self.made.append(self.kind(self.server.url, options, **connection))
        return self.made[-1]


@pytest.fixture(params=[Sync, Async])
def connect(request: pytest.FixtureRequest, server: Server, orderer: Watched) -> Iterator[Connect]:
    connect = Connect(request.param, server, orderer)
    yield connect
    for made in connect.made:
        made.close()


def async_client(server: Server, orderer: Orderer, **options: Any) -> AsyncOrderedClient:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=60)
    return AsyncOrderedClient(client, model="served", orderer=orderer, builder=PromptBuilder("Be brief."), **options)


# ---------------------------------------------------------------- the specification


class TestRequest:
    def test_asks_a_chat_for_a_stream_with_usage_with_documents_in_order(
        self, connect: Connect, server: Server
    ) -> None:
        client = connect()
        client.generate(QUERY, [DOCUMENTS[2], DOCUMENTS[0]])
        answer = client.generate(QUERY, [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2]])
        assert [document.id for document in answer.ordering.documents] == ["d2", "d0", "d1"]
        assert server.paths == ["/v1/chat/completions"] * 2
        assert server.requests[1] == {
            "model": "served",
            "messages": connect.builder.build(QUERY, answer.ordering).messages,
            "max_tokens": 256,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_token_ids_go_through_completions_as_the_builder_made_them(
        self, connect: Connect, tokenizers: dict[str, Any]
    ) -> None:
        builder = PromptBuilder(tokenizer=tokenizers["chatml"])
        connect.server.plays(
            Response([{"choices": [{"text": "Hel"}]}, {"choices": [{"text": "lo", "finish_reason": "stop"}]}])
        )
        answer = connect(builder=builder, prompts="token_ids").generate(QUERY, DOCUMENTS)
        assert answer.text == "Hello"
        assert connect.server.paths == ["/v1/completions"]
        assert connect.server.requests[0]["prompt"] == builder.build(QUERY, answer.ordering).token_ids
        assert "messages" not in connect.server.requests[0]

    @pytest.mark.parametrize(
        ("options", "sent"),
        [
            (
                {"seed": 7, "stop": ["."], "n": 1, "extra_body": {"top_k": 3}},
                {"max_tokens": 256, "temperature": 0.0, "seed": 7, "stop": ["."], "n": 1, "top_k": 3},
            ),
            ({"max_completion_tokens": 9}, {"max_completion_tokens": 9, "temperature": 0.0}),
            ({"max_tokens": None, "temperature": None, "extra_body": None}, {}),
        ],
        ids=str,
    )
    def test_other_options_are_passed_on_and_none_leaves_one_to_the_server(
        self, connect: Connect, options: dict[str, Any], sent: dict[str, Any]
    ) -> None:
        answer = connect().generate(QUERY, [], **options)
        assert (answer.text, answer.ordering.documents) == ("Hello world", [])
        (request,) = connect.server.requests
        assert QUERY in request["messages"][-1]["content"]
        own = request.keys() - {"model", "messages", "stream", "stream_options"}
        assert {name: request[name] for name in own} == sent

    def test_waiting_requests_and_scope_reach_the_orderer(self, connect: Connect, orderer: Watched) -> None:
        connect().generate(QUERY, DOCUMENTS, waiting=[DOCUMENTS[1:]], scope="tenant")
        assert orderer.asked[0]["waiting"] == [DOCUMENTS[1:]]
        assert orderer.asked[0]["scope"] == "tenant"

    @pytest.mark.parametrize("name", ["messages", "prompt", "model", "stream", "stream_options"])
    def test_what_the_client_sets_is_refused(self, connect: Connect, orderer: Watched, name: str) -> None:
        client = connect()
        for options in ({name: "x"}, {"extra_body": {name: "x"}}):
            with pytest.raises(TypeError, match=name):
                client.generate(QUERY, DOCUMENTS, **options)
            with pytest.raises(TypeError, match=name):
                client.stream(QUERY, DOCUMENTS, **options)
        assert orderer.finished == []

    @pytest.mark.parametrize("options", [{"n": 2}, {"extra_body": {"n": 2}}])
    def test_more_than_one_answer_is_refused(self, connect: Connect, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="n is not 1"):
            connect().generate(QUERY, DOCUMENTS, **options)

    def test_an_unknown_option_of_the_openai_client_discards(self, connect: Connect, orderer: Watched) -> None:
        with pytest.raises(TypeError, match="no_such_option"):
            connect().generate(QUERY, DOCUMENTS, no_such_option=1)
        assert orderer.finished == [DISCARDED]


# Scopes that vLLM refuses as a salt, and the longest and the oddest that it does not.
NO_SALTS = ["", "someone@example.org", "org/team", "org\\team", "tenant\0", "x" * 129]
SALTS = ["x" * 128, "Müller & Söhne: 100 % \n", hashlib.sha256(b"someone@example.org").hexdigest()]


class TestScope:
    @pytest.mark.parametrize(
        ("scope", "given", "salt"),
        [
            *[(salt, None, salt) for salt in ("tenant", *SALTS)],
            (None, None, None),
            (("model", 1), None, None),
            ("tenant", "tenant", "tenant"),
            (("model", "tenant"), "own", "own"),
        ],
        ids=ascii,
    )
    def test_a_string_is_sent_as_cache_salt(
        self, connect: Connect, scope: Any, given: str | None, salt: str | None
    ) -> None:
        body = {"top_k": 3} if given is None else {"top_k": 3, "cache_salt": given}
        before = dict(body)
        connect().generate(QUERY, DOCUMENTS, scope=scope, extra_body=body)
        assert (connect.server.requests[0].get("cache_salt"), connect.server.requests[0]["top_k"]) == (salt, 3)
        assert body == before, "the caller's dictionary is left alone"

    @pytest.mark.parametrize("scope", NO_SALTS, ids=ascii)
    def test_what_vllm_refuses_as_a_salt_is_sent_to_servers_without_salts_alone(
        self, connect: Connect, scope: str
    ) -> None:
        client = connect()
        for method in (client.generate, client.stream):
            with pytest.raises(ValueError, match=r"give None for no tenant, .*hashlib\.sha256") as raised:
                method(QUERY, DOCUMENTS, scope=scope)
            assert not scope or scope not in str(raised.value)
        assert connect.orderer.finished == []
        assert connect.server.requests == []
        connect(send_salt=False).generate(QUERY, DOCUMENTS, scope=scope)
        assert "cache_salt" not in connect.server.requests[0]
        assert connect.orderer.asked[0]["scope"] == scope

    @pytest.mark.parametrize("scope", [None, "tenant"])
    def test_another_salt_than_the_scope_is_refused(self, connect: Connect, scope: str | None) -> None:
        with pytest.raises(ValueError, match="cache_salt") as raised:
            connect().generate(QUERY, DOCUMENTS, scope=scope, extra_body={"cache_salt": "hidden"})
        assert "hidden" not in str(raised.value)
        assert "tenant" not in str(raised.value)
        assert connect.orderer.finished == []


class TestRoom:
    """The room in the cache that the orderer is asked for: the question's, and the expected answer's but for its last
    token, which is never computed on."""

    LONG = "Where? " * 100

    def asked(self, connect: Connect, orderer: Watched) -> list[int]:
        """The tokens of answers that room was asked for, one request each."""
        return [options["lengths"].suffix - connect.builder.suffix_tokens(QUERY) for options in orderer.asked]

    def answers(self, *lengths: Any) -> list[Response]:
        return [Response([chat("Yes"), STOP, usage(completion_tokens=length)]) for length in lengths]

    @pytest.mark.parametrize("unlimited", [{}, {"max_tokens": None}, {"max_tokens": -1}], ids=str)
    def test_at_first_it_is_what_the_settings_say(self, connect: Connect, unlimited: dict[str, Any]) -> None:
        client = connect()
        for question in (QUERY, self.LONG):
            client.generate(question, DOCUMENTS, **unlimited)
        short, long = (options["lengths"].suffix for options in connect.orderer.asked)
        assert short == connect.orderer.settings.suffix_tokens - 1
        assert long >= connect.builder.suffix_tokens(self.LONG) > connect.orderer.settings.suffix_tokens

    @pytest.mark.parametrize(
        ("limit", "tokens"),
        [({"max_tokens": 0}, 0), ({"max_tokens": 1}, 0), ({"max_tokens": 9}, 8), ({"max_completion_tokens": 9}, 8)],
        ids=str,
    )
    def test_it_is_never_more_than_the_limit(self, connect: Connect, limit: dict[str, int], tokens: int) -> None:
        connect.server.plays(*self.answers(1000))
        client = connect()
        for _ in range(2):
            client.generate(QUERY, DOCUMENTS, **limit)
        assert self.asked(connect, connect.orderer) == [tokens, tokens]

    def test_then_it_follows_the_answers_slowly(self, connect: Connect, server: Server, orderer: Watched) -> None:
        server.plays(*self.answers(33, 49, 2, 2))
        client = connect()
        for _ in range(4):
            client.generate(QUERY, DOCUMENTS)
        assert self.asked(connect, orderer)[1:] == [33 - 1, 34 - 1, 32 - 1]

    @pytest.mark.parametrize(
        "unknown", [None, "many", -1, 1 << 40, 10**400], ids=["null", "text", "-1", "2**40", "1e400"]
    )
    def test_answers_of_unknown_length_or_that_broke_off_change_nothing(self, connect: Connect, unknown: Any) -> None:
        running = chat("Yes") | {"usage": usage(completion_tokens=1)["usage"]}
        connect.server.plays(*self.answers(33, unknown), Response([running], "cut"))
        client = connect()
        client.stream(QUERY, DOCUMENTS)
        for _ in range(2):
            client.generate(QUERY, DOCUMENTS)
        assert self.asked(connect, connect.orderer)[1:] == [32] * 3

    @given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(0, 300))
    def test_it_lies_between_the_shortest_and_the_longest_answer(self, lengths: list[int], limit: int) -> None:
        orderer, builder = Watched(strict=True), PromptBuilder()
        streams = [PlainStream([STOP, usage(completion_tokens=length)], None) for length in [*lengths, 0]]
        client = OrderedClient(PlainClient(*streams), model="m", orderer=orderer, builder=builder)
        for _ in streams:
            client.generate(QUERY, DOCUMENTS, max_tokens=limit)
        room = orderer.asked[-1]["lengths"].suffix - builder.suffix_tokens(QUERY)
        assert max(0, min(*lengths, limit) - 1) <= room <= max(0, min(max(lengths), limit) - 1)


class TestAnswer:
    def test_holds_what_the_server_said(self, connect: Connect, orderer: Watched) -> None:
        answer = connect().generate(QUERY, DOCUMENTS)
        assert (answer.text, answer.finish_reason) == ("Hello world", "stop")
        assert (answer.cached_tokens, answer.prompt_tokens, answer.completion_tokens) == (64, 100, 2)
        assert answer.ttft_s is not None
        assert sorted(answer.ordering.documents, key=lambda document: document.id) == DOCUMENTS
        assert orderer.finished == [CONFIRMED_GOOD]

    def test_odd_chunks_are_passed_over(self, connect: Connect, server: Server) -> None:
        odd: list[Any] = [{}, {"choices": None}, {"choices": "x"}, {"choices": ["x"]}, {"choices": [{"delta": "x"}]}]
        odd += [[], None, "x", 5, {"choices": [{"delta": {"content": 5}}]}, {"choices": [], "usage": "x"}]
        odd += [chat(None, reasoning_content="Hm."), chat(None, reasoning="Hm."), chat(None, tool_calls=None)]
        server.plays(Response([ROLE, *odd, chat("Yes"), STOP]))

        answer = connect().generate(QUERY, DOCUMENTS)
        assert (answer.text, answer.cached_tokens) == ("Yes", None)

    def test_done_ends_an_answer_whose_end_has_no_reason(self, connect: Connect) -> None:
        connect.server.plays(Response([ROLE, chat("Yes")]))
        answer = connect(retries=0).generate(QUERY, DOCUMENTS)
        assert (answer.text, answer.finish_reason) == ("Yes", None)
        assert connect.orderer.finished == [CONFIRMED]


class TestUsage:
    @pytest.mark.parametrize(
        ("last", "cached_tokens"),
        [
            (cached(0), 0),
            (cached(100), 100),
            (usage(prompt_tokens_details={"cached_tokens": 64, "audio_tokens": 0}), 64),
            (usage(prompt_tokens_details=None), None),
            (usage(prompt_tokens_details="x"), None),
            *((cached(impossible), None) for impossible in (None, -1, "many", 64.5, 101)),
            (usage("x", prompt_tokens_details={"cached_tokens": 64}), None),
            (STOP, None),
        ],
        ids=str,
    )
    def test_confirms_what_the_server_reports_if_it_can_be(
        self, connect: Connect, last: dict[str, Any], cached_tokens: int | None
    ) -> None:
        connect.server.plays(Response([ROLE, chat("Yes"), STOP, last]))
        answer = connect().generate(QUERY, DOCUMENTS)
        assert answer.text == "Yes"
        assert answer.cached_tokens == cached_tokens
        assert connect.orderer.finished == [[("confirmed", cached_tokens, answer.total_tokens)]]

    @pytest.mark.parametrize("reports", ["never", "now and then"])
    def test_a_server_that_never_reports_what_was_expected_is_warned_of_once(
        self, connect: Connect, reports: str
    ) -> None:
        """A server may leave out a zero; and where nothing was expected, nothing is missed."""
        client = connect()
        silent = Response([ROLE, chat("Yes"), STOP, usage()])
        connect.server.plays(*[GOOD if reports == "now and then" and not number else silent for number in range(24)])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for number in range(12):
                client.generate(QUERY, [Document(f"{number}", "New.")])
            assert connect.orderer.degraded == ()
            for _ in range(12):
                client.generate(QUERY, DOCUMENTS)
        told = [str(each.message) for each in warned if each.category.__name__ == "DegradedWarning"]
        assert told == list(connect.orderer.degraded)
        assert len(told) == (reports == "never")
        assert all("--enable-prompt-tokens-details" in reason for reason in told)

    def test_of_several_reports_the_last_counts(self, connect: Connect, server: Server) -> None:
        running = chat("Yes") | {"usage": usage(100, 1, prompt_tokens_details={"cached_tokens": 16})["usage"]}
        server.plays(Response([running, STOP | {"usage": None}, cached(32)]))
        answer = connect().generate(QUERY, DOCUMENTS)
        assert (answer.cached_tokens, answer.completion_tokens) == (32, 2)

    def test_nonsense_counts_are_unknown(self, connect: Connect, server: Server) -> None:
        server.plays(Response([chat("Yes"), STOP, usage(-1, "two")]))
        answer = connect().generate(QUERY, DOCUMENTS)
        assert (answer.prompt_tokens, answer.completion_tokens, answer.total_tokens) == (None, None, None)


PYDANTIC = {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Extra inputs"}]}


class TestStreamOptions:
    @pytest.mark.parametrize(
        "refusal",
        [
            error(400, "Unrecognized request argument supplied: stream_options"),
            error(400, "invalid", param="stream_options.include_usage"),
            error(400, "unknown field `include_usage`"),
            Response([PYDANTIC], "", 422),
        ],
        ids=["argument", "param", "field", "pydantic"],
    )
    def test_a_server_that_refuses_them_is_asked_without_from_then_on(
        self, connect: Connect, refusal: Response
    ) -> None:
        connect.server.plays(refusal)
        client = connect(retries=0)
        assert [client.generate(QUERY, DOCUMENTS).text for _ in range(2)] == ["Hello world"] * 2
        assert ["stream_options" in request for request in connect.server.requests] == [True, False, False]
        assert connect.orderer.finished == [DISCARDED, CONFIRMED_GOOD, CONFIRMED_GOOD]
        assert connect.slept == []

    def test_a_server_that_refuses_both_is_not_asked_a_third_time(self, connect: Connect) -> None:
        connect.server.plays(error(400, "bad temperature in {'stream_options': …}"), error(400, "bad temperature"))
        client = connect()
        with pytest.raises(openai.BadRequestError):
            client.generate(QUERY, DOCUMENTS)
        client.generate(QUERY, DOCUMENTS)
        # It was not remembered.
        assert ["stream_options" in request for request in connect.server.requests] == [True, False, True]
        assert connect.orderer.finished == [DISCARDED, DISCARDED, CONFIRMED_GOOD]


def error_in_stream(code: object) -> Response:
    return Response([ROLE, {"error": {"message": "x", "code": code}}])


# Responses, what they raise, and whether `generate` asks again.
BEFORE_FIRST_TOKEN = {
    "bad request": (error(400), openai.BadRequestError, False),
    "not found": (error(404), openai.NotFoundError, False),
    "too many": (error(429), openai.RateLimitError, False),
    "server error": (error(500), openai.InternalServerError, False),
    "no response": (Response(end="hangup"), openai.APIConnectionError, False),
    "timeout": (Response(end="silent"), openai.APITimeoutError, False),
    "cut at once": (Response(end="cut"), CUT, True),
    "cut after the role": (Response([ROLE], "cut"), CUT, True),
    "over after the role": (Response([ROLE], "eof"), openai.APIConnectionError, True),
    "error in the stream": (error_in_stream(500), openai.APIError, True),
    "error at once": (Response([{"error": {"message": "x", "code": 500}}]), openai.APIError, True),
    "busy in the stream": (error_in_stream(429), openai.APIError, True),
    "unknown error in the stream": (error_in_stream(None), openai.APIError, True),
    "refusal in the stream": (error_in_stream(400), openai.APIError, False),
    "garbage": (Response([b"data: {garbage"]), ValueError, False),
    "no text": (Response([b"data: \xff\xfe"]), ValueError, False),
    "a web page": (Response([b"<html>", b"</html>"], "eof"), openai.APIConnectionError, True),
    "stall": (Response(end="stall"), STALLED, True),
}
AFTER_FIRST_TOKEN = {
    "cut after a token": (Response([ROLE, chat("Hel")], "cut"), CUT, True),
    "cut after a thought": (Response([ROLE, chat(None, reasoning="Hm.")], "cut"), CUT, True),
    "cut after the end": (Response([ROLE, STOP], "cut"), CUT, True),
    "over after a token": (Response([ROLE, chat("Hel")], "eof"), openai.APIConnectionError, True),
    "error after a token": (Response([chat("Hel"), {"error": {"message": "x"}}]), openai.APIError, True),
    "garbage after a token": (Response([chat("Hel"), b"data: {garbage"]), ValueError, False),
    "stall after a token": (Response([chat("Hel")], "stall"), STALLED, True),
}
FAILURES = BEFORE_FIRST_TOKEN | AFTER_FIRST_TOKEN


def timeout_of(case: str) -> int:
    return 1 if case.startswith(("timeout", "stall")) else 60


class TestFailure:
    @pytest.mark.parametrize("case", FAILURES)
    def test_before_the_first_token_discards_and_later_counts_as_served(self, connect: Connect, case: str) -> None:
        response, expected, _ = FAILURES[case]
        connect.server.plays(response)
        with pytest.raises(expected):
            connect(retries=0, timeout=timeout_of(case)).stream(QUERY, DOCUMENTS)
        assert connect.orderer.finished == [CONFIRMED if case in AFTER_FIRST_TOKEN else DISCARDED]
        assert len(connect.server.requests) == 1
        assert (connect.orderer.order(DOCUMENTS).cached_tokens > 0) == (case in AFTER_FIRST_TOKEN)
        connect.orderer.finished.pop()

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, MemoryError])
    def test_a_prompt_that_is_not_built_is_discarded(self, connect: Connect, interrupt: type[BaseException]) -> None:
        class Interrupted(PromptBuilder):
            def build(self, query: str, documents: Any) -> Any:
                raise interrupt

        with pytest.raises(interrupt):
            connect(builder=Interrupted()).generate(QUERY, DOCUMENTS)
        assert connect.orderer.finished == [DISCARDED]
        assert connect.server.requests == []


class TestRetry:
    @pytest.mark.parametrize("case", FAILURES)
    def test_only_an_answer_whose_stream_broke_is_asked_for_again(self, connect: Connect, case: str) -> None:
        response, expected, again = FAILURES[case]
        connect.server.plays(response)
        with nullcontext() if again else pytest.raises(expected):
            answer = connect(timeout=timeout_of(case)).generate(QUERY, DOCUMENTS)
            assert answer.text == "Hello world", "nothing of the broken stream is left in it"
        first = CONFIRMED if case in AFTER_FIRST_TOKEN else DISCARDED
        assert connect.orderer.finished == [first, CONFIRMED_GOOD][: 1 + again]
        assert connect.slept == [0.1] * again
        assert len(connect.server.requests) == 1 + again

    def test_each_attempt_waits_longer_and_they_are_counted(self, connect: Connect, server: Server) -> None:
        server.plays(*[Response([ROLE], "cut")] * 3)
        connect(retries=3).generate(QUERY, DOCUMENTS)
        assert connect.slept == [0.1, 0.2, 0.4]
        server.plays(*[Response(end="cut")] * 3)
        with pytest.raises(CUT):
            connect(retries=2).generate(QUERY, DOCUMENTS)
        assert len(server.requests) == 4 + 3

    def test_the_last_error_is_raised_as_it_is(self, connect: Connect, server: Server, orderer: Watched) -> None:
        server.plays(Response(end="cut"), error(404, "gone"))
        with pytest.raises(openai.NotFoundError, match="gone"):
            connect().generate(QUERY, DOCUMENTS)
        assert orderer.finished == [DISCARDED, DISCARDED]

    def test_an_orderer_that_fails_at_the_second_attempt_leaves_the_first_finished_once(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order, results = connect.orderer.order, deque([None, RuntimeError()])

        def failing(documents: Any, **options: Any) -> Ordering[Any]:
            if failure := results.popleft():
                raise failure
            return order(documents, **options)

        monkeypatch.setattr(connect.orderer, "order", failing)
        connect.server.plays(Response(end="cut"))
        with pytest.raises(RuntimeError):
            connect().generate(QUERY, DOCUMENTS)
        assert connect.orderer.finished == [DISCARDED]

    def test_the_openai_client_repeats_requests_without_response_in_one_ordering(self, connect: Connect) -> None:
        connect.server.plays(Response(end="hangup"))
        assert connect(max_retries=1).generate(QUERY, DOCUMENTS).text == "Hello world"
        assert connect.orderer.finished == [CONFIRMED_GOOD]

    def test_a_stream_is_asked_for_again_before_its_first_piece_alone(self, connect: Connect) -> None:
        connect.server.plays(Response([ROLE, chat(None, reasoning="Hm.")], "cut"))
        stream, pieces = connect().stream(QUERY, DOCUMENTS)
        assert pieces == ["Hello", " world"]
        assert stream.answer.text == "Hello world"
        assert connect.orderer.finished == [CONFIRMED, CONFIRMED_GOOD]
        connect.server.plays(Response([ROLE, chat("Hel")], "cut"))
        with pytest.raises(CUT):
            connect().stream(QUERY, DOCUMENTS)
        assert len(connect.server.requests) == 3
        assert connect.orderer.finished[2:] == [CONFIRMED]


class TestStream:
    def test_gives_the_pieces_and_then_the_answer(self, connect: Connect, orderer: Watched) -> None:
        stream, pieces = connect().stream(QUERY, DOCUMENTS)
        assert pieces == ["Hello", " world"]
        assert (stream.answer.text, stream.answer.cached_tokens) == ("Hello world", 64)
        assert stream.answer.ordering is stream.ordering
        assert orderer.finished == [CONFIRMED_GOOD]

    @pytest.mark.parametrize(("take", "finished"), [(0, DISCARDED), (1, CONFIRMED)])
    def test_closed_it_is_cancelled_upstream_and_served_if_a_piece_was_there(
        self, connect: Connect, take: int, finished: Events
    ) -> None:
        connect.server.plays(Response([ROLE, chat("Hel")][: 1 + take], "hold"))
        stream, pieces = connect().stream(QUERY, DOCUMENTS, take=take)
        assert pieces == ["Hel"][:take]
        assert sorted(document.id for document in stream.ordering.documents) == ["d0", "d1", "d2", "d3"]
        assert connect.orderer.finished == [finished]
        assert connect.server.hung_up.wait(60)
        assert stream.answer is None

    def test_a_closed_stream_has_no_more_pieces(self, server: Server, orderer: Watched) -> None:
        server.plays(Response([ROLE, chat("Hel")], "hold"))
        stream = Connect(Sync, server, orderer)().client.stream(QUERY, DOCUMENTS)
        assert next(stream) == "Hel"
        stream.close()
        stream.close()
        assert list(stream) == []

    def test_a_loop_that_is_left_closes_it_and_one_that_nobody_reads_is_discarded(
        self, server: Server, orderer: Watched
    ) -> None:
        client = Connect(Sync, server, orderer)().client
        client.stream(QUERY, DOCUMENTS)
        server.plays(Response([ROLE, chat("Hel")], "hold"))
        for piece in client.stream(QUERY, DOCUMENTS):
            assert piece == "Hel"
            break
        assert orderer.finished == [DISCARDED, CONFIRMED]
        assert server.hung_up.wait(60)

    def test_an_asynchronous_loop_that_is_left_closes_it(
        self, server: Server, orderer: Watched, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def leave() -> None:
            async for piece in async_client(server, orderer).stream(QUERY, DOCUMENTS):
                assert piece == "Hel"
                break
            await asyncio.to_thread(server.hung_up.wait, 60)
            assert orderer.finished == [CONFIRMED]

        server.plays(Response([ROLE, chat("Hel")], "hold"))
        asyncio.run(leave())
        assert [record.message for record in caplog.records if record.name == "asyncio"] == []

    def test_an_unread_asynchronous_stream_is_never_sent(self, server: Server, orderer: Watched) -> None:
        async def drop() -> None:
            client = async_client(server, orderer)
            client.stream(QUERY, DOCUMENTS)
            await client.stream(QUERY, DOCUMENTS).close()

        asyncio.run(drop())
        assert orderer.finished == []
        assert server.requests == []

    @pytest.mark.parametrize(("events", "finished"), [([ROLE], DISCARDED), ([ROLE, chat("Hel")], CONFIRMED)])
    @pytest.mark.parametrize("method", ["generate", "stream"])
    def test_a_cancelled_task_hangs_up(
        self, server: Server, orderer: Watched, method: str, events: list[Any], finished: Events
    ) -> None:
        async def cancel() -> None:
            client = async_client(server, orderer)

            async def read() -> None:
                async for _ in client.stream(QUERY, DOCUMENTS):
                    pass

            task = asyncio.ensure_future(read() if method == "stream" else client.generate(QUERY, DOCUMENTS))
            await asyncio.to_thread(server.reached.wait, 60)
            await asyncio.sleep(1 if len(events) > 1 else 0)  # time for what was sent to be read
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert orderer.finished == [finished]
            assert await asyncio.to_thread(server.hung_up.wait, 60)

        server.plays(Response(events, "hold"))
        asyncio.run(cancel())


def echo(body: dict[str, Any]) -> Response:
    """Answers with the documents' ids, one chunk each."""
    content = body["messages"][-1]["content"]
    names = [line.strip("[]") for line in content.splitlines() if line.startswith("[")]
    return Response([ROLE, *[chat(f"{name} ") for name in names], STOP, cached(0)])


class TestConcurrency:
    REQUESTS = [[Document(f"r{number}-{each}", "text") for each in range(5)] for number in range(16)]  # noqa: RUF012

    @pytest.mark.parametrize("kind", ["tasks", "threads"])
    def test_each_gets_its_own_answer(self, server: Server, orderer: Watched, kind: str) -> None:
        async def ask() -> list[Answer]:
            client = async_client(server, orderer)
            return await asyncio.gather(*[client.generate(QUERY, documents) for documents in self.REQUESTS])

        server.answer = echo
        if kind == "tasks":
            answers = asyncio.run(ask())
        else:
            client = Connect(Sync, server, orderer)().client
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda documents: client.generate(QUERY, documents), self.REQUESTS))
        for documents, answer in zip(self.REQUESTS, answers, strict=True):
            assert sorted(answer.text.split()) == [document.id for document in documents]

    def test_each_request_leaves_before_the_next_is_ordered(self, server: Server) -> None:
        happened: list[str] = []

        class Noting(Watched):
            def order(self, documents: Any, **options: Any) -> Ordering[Any]:
                happened.append("ordered")
                return super().order(documents, **options)

        async def ask() -> None:
            connection = openai.AsyncOpenAI(base_url=server.url, api_key="key", timeout=60)
            completions = connection.chat.completions
            create = completions.create

            def noting(**options: Any) -> Any:
                happened.append("sent")
                return create(**options)

            completions.create = noting
            orderer = Noting(strict=True)
            client = AsyncOrderedClient(connection, model="served", orderer=orderer, builder=PromptBuilder())
            await asyncio.gather(*[client.generate(QUERY, documents) for documents in self.REQUESTS])

        asyncio.run(ask())
        assert happened == ["ordered", "sent"] * len(self.REQUESTS)


class PlainStream:
    """A stream that is no openai.Stream: it gives pieces of an answer, then raises."""

    def __init__(self, chunks: Sequence[Any], failure: BaseException | None) -> None:
        self.chunks, self.failure = chunks, failure

    def __enter__(self) -> PlainStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        yield from self.chunks
        if self.failure is not None:
            raise self.failure


class PlainClient:
    """The least that a client must have: chat.completions.create. Its chunks are plain dictionaries."""

    def __init__(self, *streams: PlainStream) -> None:
        self.chat = self.completions = self
        self.streams = list(streams)

    def create(self, **_: Any) -> PlainStream:
        return self.streams.pop(0)


class TestOtherClients:
    """A client needs `create` only."""

    GOOD = PlainStream(GOOD.events, None)

    def ask(self, orderer: Orderer, *streams: PlainStream) -> Answer:
        options: Any = {"model": "m", "orderer": orderer, "builder": PromptBuilder(), "sleep": lambda _: None}
        return OrderedClient(PlainClient(*streams), **options).generate(QUERY, DOCUMENTS)

    @pytest.mark.parametrize("nonsense", ["64", True, 64.0, [64]])
    def test_a_count_is_an_integer(self, orderer: Watched, nonsense: Any) -> None:
        # The openai client would make integers of the first three.
        assert self.ask(orderer, PlainStream([STOP, cached(nonsense)], None)).cached_tokens is None

    @pytest.mark.parametrize(
        "failure", [httpx.RemoteProtocolError("x"), httpx.ReadError("x"), httpx.ReadTimeout("x"), None], ids=repr
    )
    def test_what_httpx_raises_breaks_a_stream_as_does_an_end_without_a_reason(
        self, orderer: Watched, failure: Exception | None
    ) -> None:
        # openai before version 3 passes these on.
        assert self.ask(orderer, PlainStream([chat("Hel")], failure), self.GOOD).text == "Hello world"
        assert orderer.finished == [CONFIRMED, CONFIRMED_GOOD]

    @pytest.mark.parametrize(("chunks", "finished"), [([], DISCARDED), ([chat("Hel")], CONFIRMED)])
    @pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(), RuntimeError()], ids=repr)
    def test_whatever_else_is_raised_finishes_the_ordering(
        self, orderer: Watched, failure: BaseException, chunks: list[Any], finished: Events
    ) -> None:
        with pytest.raises(type(failure)) as raised:
            self.ask(orderer, PlainStream(chunks, failure), self.GOOD)
        assert raised.value is failure
        assert orderer.finished == [finished]


class TestSecrecy:
    def test_logs_and_errors_quote_no_prompt(self, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "ragorder")
        connect.server.plays(Response([ROLE, chat("Hel")], "eof"), Response([ROLE, chat("Hel")], "eof"))
        with pytest.raises(openai.APIConnectionError) as raised:
            connect().generate(QUERY, DOCUMENTS, scope="tenant")
        messages = [record.getMessage() for record in caplog.records if record.name.startswith("ragorder")]
        assert len(messages) == 1, "a retry is logged"
        for message in [*messages, str(raised.value)]:
            assert not any(secret in message for secret in ("tenant", "secret", "Secret", "d0", "Hel", "key"))


class TestConstruction:
    def test_the_other_kind_of_client_is_refused(self) -> None:
        options: dict[str, Any] = {"model": "m", "orderer": Orderer(), "builder": PromptBuilder()}
        with pytest.raises(TypeError, match="use AsyncOrderedClient"):
            OrderedClient(openai.AsyncOpenAI(api_key="key"), **options)
        with pytest.raises(TypeError, match="use OrderedClient"):
            AsyncOrderedClient(openai.OpenAI(api_key="key"), **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"prompts": "text"}, "'text'"), ({"prompts": "token_ids"}, "tokenizer"), ({"retries": -1}, "-1")],
    )
    def test_wrong_options_are_named(self, connect: Connect, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            connect(**options)

    def test_the_module_is_imported_without_openai(self, python: Any) -> None:
        script = (
            "from ragorder import Orderer, PromptBuilder\n"
            "from ragorder.adapters.openai import AsyncOrderedClient, OrderedClient\n"
            "for client in (OrderedClient, AsyncOrderedClient):\n"
            "    try:\n"
            "        client(object(), model='m', orderer=Orderer(), builder=PromptBuilder())\n"
            "    except ImportError as error:\n"
            "        print(error)\n"
        )
        done = python("-c", script, blocked=("openai", "httpx", "httpx2"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("pip install '.[live]'") == 2


# ---------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def served_builder(vllm_model: Any) -> PromptBuilder:
    from transformers import AutoTokenizer

    return PromptBuilder("Answer briefly.", tokenizer=AutoTokenizer.from_pretrained(vllm_model))


def text_document(number: int, words: int) -> Document:
    return Document(f"doc-{number}", " ".join(f"fact {number} {word}" for word in range(words)))


@pytest.mark.vllm
class TestVLLM:
    """Random weights: what is answered means nothing, but tokens and cache hits are real."""

    DOCUMENTS = [text_document(number, 12 + number) for number in range(4)]  # noqa: RUF012
    # The likeliest token of random weights may be one without text, for ever.
    TALKATIVE = {"temperature": 1.0, "seed": 1, "extra_body": {"ignore_eos": True}}  # noqa: RUF012

    @pytest.fixture
    def server(self, vllm_server: Any) -> Any:
        vllm_server.reset()
        return SimpleNamespace(url=f"{vllm_server.base_url}/v1")

    @pytest.fixture
    def sizes(self, vllm_server: Any, served_builder: PromptBuilder) -> dict[str, Any]:
        kv = {"capacity_tokens": vllm_server.capacity_tokens, "block_size": vllm_server.block_size}
        return kv | {"prefix_tokens": served_builder.prefix_tokens, "tokens": served_builder.document_tokens}

    @pytest.fixture
    def connect(self, connect: Connect, served_builder: PromptBuilder) -> Connect:
        connect.builder = served_builder
        return connect

    @pytest.mark.parametrize("prompts", ["messages", "token_ids"])
    def test_predicted_cached_tokens_are_reported(self, connect: Connect, vllm_server: Any, prompts: str) -> None:
        client = connect(prompts=prompts, timeout=60)
        first = client.generate(QUERY, self.DOCUMENTS, max_tokens=4)
        again = client.generate(QUERY, self.DOCUMENTS[::-1], max_tokens=4)
        assert (first.cached_tokens, first.ordering.cached_tokens) == (0, 0)
        assert again.ordering.documents == self.DOCUMENTS
        assert again.ordering.cached_tokens >= 3 * vllm_server.block_size
        assert again.cached_tokens is not None
        assert abs(again.cached_tokens - again.ordering.cached_tokens) <= vllm_server.block_size
        reported = [[("confirmed", each.cached_tokens, each.total_tokens)] for each in (first, again)]
        assert connect.orderer.finished == reported
        assert first.total_tokens == first.prompt_tokens + first.completion_tokens
        if prompts == "token_ids":
            token_ids = connect.builder.build(QUERY, again.ordering).token_ids
            assert token_ids is not None
            assert again.prompt_tokens == len(token_ids)

    @pytest.mark.slow
    def test_a_stream_that_is_closed_leaves_its_prompt_in_the_cache(self, connect: Connect) -> None:
        client = connect(prompts="token_ids", timeout=60)
        _, pieces = client.stream(QUERY, self.DOCUMENTS, take=1, max_tokens=500, **self.TALKATIVE)
        assert len(pieces) == 1
        again = client.generate(QUERY, self.DOCUMENTS, max_tokens=1)
        assert again.ordering.cached_tokens > 0
        assert again.cached_tokens is not None
        assert again.cached_tokens >= again.ordering.cached_tokens
        assert connect.orderer.finished[0] == CONFIRMED

    def test_tenants_share_nothing(self, connect: Connect) -> None:
        client = connect(prompts="token_ids", timeout=60)
        reported, predicted = [], []
        for scope in ("a", "b", "a", None):
            answer = client.generate(QUERY, self.DOCUMENTS, scope=scope, max_tokens=1)
            reported.append(bool(answer.cached_tokens))
            predicted.append(bool(answer.ordering.cached_tokens))
        assert reported == predicted == [False, False, True, False]

    @pytest.mark.slow
    def test_exactly_the_scopes_that_the_server_refuses_are_not_sent(self, connect: Connect, server: Any) -> None:
        client = connect(timeout=60)
        with openai.OpenAI(base_url=server.url, api_key="key", timeout=60) as direct:
            for scope in NO_SALTS:
                with pytest.raises(openai.BadRequestError, match="cache_salt"):
                    direct.completions.create(model="served", prompt="x", extra_body={"cache_salt": scope})
                with pytest.raises(ValueError, match="cache_salt"):
                    client.generate(QUERY, self.DOCUMENTS, scope=scope)
        assert connect.orderer.finished == []
        for scope in SALTS:
            client.generate(QUERY, self.DOCUMENTS, scope=scope, max_tokens=1)


def finished(made: Sync | Async, result: Any) -> Any:
    """What a call returns, awaited if it is asynchronous."""
    return made.runner.run(result) if isinstance(made, Async) else result


class TestConversation:
    ANSWER: ClassVar[dict[str, str]] = {"role": "assistant", "content": "Hello world"}

    def test_a_turn_adds_to_what_was_sent(self, connect: Connect, server: Server) -> None:
        made = connect()
        chat = made.client.conversation(scope="tenant")
        answer = finished(made, chat.ask(QUERY, DOCUMENTS[:2]))
        assert answer.text == "Hello world"
        (first,) = (request["messages"] for request in server.requests)
        assert first == connect.builder.build(QUERY, answer.ordering).messages
        assert chat.messages == [*first, self.ANSWER]
        finished(made, chat.ask("And there?", DOCUMENTS[1:3]))
        second = server.requests[1]["messages"]
        assert second[:3] == [*first, self.ANSWER]
        assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
        assert (chat.turn.new, chat.turn.repeated) == ([DOCUMENTS[2]], [DOCUMENTS[1]])
        assert [request["cache_salt"] for request in server.requests] == ["tenant", "tenant"]
        assert connect.orderer.finished == [CONFIRMED_GOOD] * 2

    def test_a_failed_turn_leaves_the_messages_as_they_were(self, connect: Connect, server: Server) -> None:
        made = connect(retries=0)
        conversation = made.client.conversation()
        finished(made, conversation.ask(QUERY, DOCUMENTS))
        before = list(conversation.messages)
        for response in (error(500), error(400), Response([ROLE, chat("Hel")], "cut")):
            server.plays(response)
            with pytest.raises((openai.APIError, httpx.TransportError)):
                finished(made, conversation.ask("And?", DOCUMENTS))
            assert conversation.messages == before
        finished(made, conversation.regenerate())
        failed, again = (request["messages"] for request in server.requests[-2:])
        assert again == failed
        assert conversation.messages == [*again, self.ANSWER]

    def test_a_broken_stream_is_one_turn(self, connect: Connect, server: Server) -> None:
        server.plays(Response([ROLE, chat("Hel")], "cut"))
        made = connect(retries=1)
        conversation = made.client.conversation()
        finished(made, conversation.ask(QUERY, DOCUMENTS))
        assert server.requests[0]["messages"] == server.requests[1]["messages"]
        assert conversation.messages == [*server.requests[1]["messages"], self.ANSWER]

    def test_a_regenerated_answer_replaces_the_last_one(self, connect: Connect, server: Server) -> None:
        made = connect()
        conversation = made.client.conversation()
        finished(made, conversation.ask(QUERY, DOCUMENTS[:2]))
        branch = conversation.branch()
        finished(made, conversation.ask("And?", DOCUMENTS[2:]))
        server.plays(Response([ROLE, chat("Other"), STOP, cached(64)]))
        finished(made, conversation.regenerate(temperature=1.0))
        assert server.requests[2]["messages"] == server.requests[1]["messages"]
        assert server.requests[2]["temperature"] == 1.0
        assert [message["content"] for message in conversation.messages[-3:]][::2] == ["Hello world", "Other"]
        assert branch.messages == conversation.messages[:3]
        with pytest.raises(ValueError, match="nothing to regenerate"):
            branch.regenerate()

    def test_a_turn_is_generated_again_after_the_messages_as_they_are_now(self, connect: Connect) -> None:
        made = connect(retries=0)
        conversation = made.client.conversation()
        for number in range(3):
            finished(made, conversation.ask(f"{number}?", DOCUMENTS[number : number + 1]))
        asked = connect.server.requests[-1]["messages"][-1]
        # What an application has redacted or cut off does not come back.
        system, _, answer, *others = conversation.messages
        conversation.messages = [system, {"role": "user", "content": "(deleted)"}, answer, *others]
        for _ in range(2):
            finished(made, conversation.regenerate())
            assert connect.server.requests[-1]["messages"] == [*conversation.messages[:5], asked]
            assert conversation.messages[1]["content"] == "(deleted)"
        connect.server.plays(error(400))
        with pytest.raises(openai.APIError):
            finished(made, conversation.regenerate())
        finished(made, conversation.regenerate())
        assert connect.server.requests[-1]["messages"] == [*conversation.messages[:5], asked]
        assert len(conversation.messages) == 7

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_happens_what_is_sent_extends_what_is_replayed(self, server: Server, seed: int) -> None:
        draw = random.Random(seed)
        orderer = Orderer(block_size=16, capacity_tokens=2000, strict=True, feedback=False)
        client = openai.OpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=60)
        rag = OrderedClient(client, model="served", orderer=orderer, builder=PromptBuilder("Be brief."), retries=0)
        texts = [
            Document(f"d{each}", f"Version {version} of {each}. " * 9) for each in range(5) for version in range(2)
        ]
        failures = itertools.cycle([error(500), Response([ROLE, chat("Hel")], "cut"), error(400)])
        chats = [rag.conversation()]
        asked: dict[int, tuple[str, list[Document], bool]] = {}
        for number in range(60):
            talk = draw.choice(chats)
            kind = draw.choice(["ask", "ask", "ask", "fail", "again", "branch", "cut", "edit"])
            question, documents = f"{number}?", draw.sample(texts, draw.randrange(3))
            before = list(talk.messages)
            if kind == "branch":
                chats.append(talk.branch())
            elif kind == "cut" and len(before) > 5:
                talk.messages = [before[0], *before[3:]]
            elif kind == "edit" and before:
                talk.messages[-1] = {"role": "assistant", "content": f"Edited: {number}."}
            elif kind == "fail":
                server.plays(next(failures))
                with pytest.raises((openai.APIError, httpx.TransportError)):
                    talk.ask(question, documents)
                assert talk.messages == before
                asked[id(talk)] = question, documents, False
            elif kind in ("ask", "again"):
                if kind == "again" and id(talk) in asked:
                    question, documents, answered = asked[id(talk)]
                    talk.regenerate()
                    before = before[:-2] if answered and len(before) > 3 else before[: 1 if answered else None]
                else:
                    talk.ask(question, documents)
                asked[id(talk)] = question, documents, True
                sent = server.requests[-1]["messages"]
                assert sent[: len(before)] == before
                assert len(sent) == max(1, len(before)) + 1
                assert sent[-1]["content"].endswith(f"Question: {question}")
                assert talk.messages == [*sent, self.ANSWER]
                shown = "\0".join(message["content"] for message in sent if message["role"] == "user")
                assert all(f"[{each.id}]\n{each.text}\n\n" in shown for each in documents)
        client.close()

    def test_a_streamed_turn_counts_once_it_is_whole(self, connect: Connect, server: Server) -> None:
        made = connect()
        conversation = made.client.conversation()
        made.stream(QUERY, DOCUMENTS, take=1, of=conversation)
        assert conversation.messages == []
        made.stream(QUERY, DOCUMENTS, of=conversation)
        assert conversation.messages == [*server.requests[1]["messages"], self.ANSWER]

    def test_the_engines_history_is_predicted(self, server: Server) -> None:
        orderer: Any = Orderer(block_size=4, strict=True)
        server.answer = lambda body: Response([ROLE, chat("Yes."), STOP, usage(100, 30)])
        conversation = Connect(Sync, server, orderer)().client.conversation()
        assert conversation.ask(QUERY, DOCUMENTS).ordering.cached_tokens == 0
        # All that was computed: the last token of the answer was not.
        assert conversation.ask("And?", DOCUMENTS).ordering.cached_tokens == 128

    def test_all_turns_have_the_topic_of_the_first(self, connect: Connect) -> None:
        made = connect(topic_header="x-session-id")
        conversation = made.client.conversation()
        for document in DOCUMENTS[:3]:
            finished(made, conversation.ask(QUERY, [document]))
        assert conversation.topic([], []) == connect.orderer.topic(DOCUMENTS[:1])

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_stored_conversations_have_the_topic_of_their_first_message(self, connect: Connect, role: str) -> None:
        client = connect(topic_header="x-session-id", builder=PromptBuilder("Be brief.")).client

        def topic(said: str, scope: str | None = None) -> str | None:
            stored = [{"role": role, "content": "Be brief."}, {"role": "user", "content": said}, self.ANSWER]
            return client.conversation(stored, scope=scope).topic(DOCUMENTS, stored)

        assert topic("Owls?") == topic("Owls?") != topic("Bees?")
        # Digests of messages say what was asked.
        assert topic("Owls?") != topic("Owls?", "acme")
        assert message_key({"role": "user", "content": "Owls?"})[:16] not in str(topic("Owls?"))

    LONG: ClassVar[list[Document]] = [Document(f"d{number}", f"It is number {number}. " * 60) for number in range(5)]

    def lost(self, connect: Connect, rebase: Any) -> tuple[Any, Any]:
        """A client, and its conversation of two turns, whose documents are still held by another prompt only."""
        orderer = Orderer(strict=True, block_size=16, capacity_tokens=4096, feedback=False)
        made = connect(orderer=orderer)
        conversation = made.client.conversation(rebase=rebase)
        finished(made, conversation.ask(QUERY, self.LONG[:2]))
        finished(made, conversation.ask("And?", self.LONG[2:3]))
        made.generate(QUERY, [Document("x", "y" * 16_000)])
        made.generate(QUERY, [self.LONG[2], self.LONG[0]])
        return made, conversation

    def test_one_that_the_engine_has_lost_is_laid_out_again_if_allowed(self, connect: Connect) -> None:
        made, conversation = self.lost(connect, [])
        finished(made, conversation.ask("So?", self.LONG[3:4]))
        turn = conversation.turn
        assert turn.rebased
        # As another prompt has them, which is still there.
        assert {each.id for each in turn.new[:2]} == {"d0", "d2"}
        assert turn.ordering.prefix_documents == 2
        sent = connect.server.requests[-1]["messages"]
        assert sent == turn.messages == conversation.messages[:-1]
        assert sent[3]["content"] == "[d2] is above.\nQuestion: And?"
        finished(made, conversation.regenerate())
        assert connect.server.requests[-1]["messages"] == sent
        again = conversation.turn.ordering
        assert again.cached_tokens > again.documents_end // 16 * 16
        # From then on as ever.
        branch = conversation.branch()
        for chat in (conversation, branch):
            finished(made, chat.ask("Why?", self.LONG[:1]))
            assert connect.server.requests[-1]["messages"][: len(sent)] == sent
        finished(made, conversation.regenerate())
        assert connect.server.requests[-1]["messages"][: len(sent)] == sent

    def test_stored_messages_are_laid_out_again_with_their_documents(self, connect: Connect, server: Server) -> None:
        made, conversation = self.lost(connect, None)
        for rebase, moved in ((None, False), ([], False), (self.LONG[:3], True)):
            stored = made.client.conversation(conversation.messages, rebase=rebase)
            finished(made, stored.ask("So?", self.LONG[3:4]))
            assert stored.turn.rebased == moved
            assert (server.requests[-1]["messages"][:5] == conversation.messages) != moved
            made.generate(QUERY, [Document("x", "y" * 16_000)])
            made.generate(QUERY, [self.LONG[2], self.LONG[0]])

    def test_documents_of_messages_that_are_cut_off_are_forgotten(self, connect: Connect) -> None:
        made = connect()
        conversation = made.client.conversation(rebase=[])
        for number in range(12):
            finished(made, conversation.ask("And?", [Document(f"n{number}", "Text.")]))
            conversation.messages = [conversation.messages[0], *conversation.messages[-4:]]
        assert len(conversation.earlier(conversation.messages)) == 2
        assert len(turns_in(conversation)) == 3

    def test_what_cannot_be_a_conversation_is_refused(self, connect: Connect, tokenizers: dict[str, Any]) -> None:
        ids = connect(prompts="token_ids", builder=PromptBuilder(tokenizer=tokenizers["chatml"]))
        with pytest.raises(ValueError, match="needs messages"):
            ids.client.conversation()
        with pytest.raises(TypeError, match="history must hold messages"):
            connect().client.conversation(["hello"])
        with pytest.raises(TypeError, match="rebase must hold the documents"):
            connect().client.conversation(rebase=True)
        with pytest.raises(ValueError, match="tools: a conversation has text answers only"):
            connect().client.conversation().ask(QUERY, DOCUMENTS, tools=[{}])


class TestClouds:
    DOCUMENTS: ClassVar[list[Document]] = [Document(f"d{number}", f"{number} " * 1600) for number in range(4)]

    @pytest.fixture
    def rag(self, server: Server) -> Iterator[OrderedClient]:
        """A client of a cloud that writes the first prompt into its cache."""
        builder = PromptBuilder("Be brief.")
        orderer = Orderer.for_cloud("openai", model="gpt-5.6", builder=builder, strict=True)
        written = usage(2500, prompt_tokens_details={"cached_tokens": 0, "cache_write_tokens": 2400})
        server.plays(Response([ROLE, chat("Hi"), STOP, written]))
        with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=60) as client:
            yield OrderedClient(client, model="gpt-5.6", orderer=orderer, builder=builder)

    def test_marks_are_sent_and_what_was_written_is_read(self, server: Server, rag: OrderedClient) -> None:
        answer, again = (rag.generate(QUERY, self.DOCUMENTS[:3]) for _ in range(2))
        for sent, ordering in zip(server.requests, (answer.ordering, again.ordering), strict=True):
            assert sent["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
            parts = sent["messages"][1]["content"]
            assert [part["text"] for part in parts[:3]] == [f"[{d.id}]\n{d.text}\n\n" for d in ordering.documents]
            marked = [place for place, part in enumerate(parts, 1) if "prompt_cache_breakpoint" in part]
            assert marked == [mark for mark in ordering.breakpoints if mark] != []
        assert answer.written_tokens == 2400
        assert answer.ordering.cost is not None and answer.ordering.cost.written_tokens == 2400
        assert again.ordering.cached_tokens > 0

    def test_turns_of_a_conversation_have_marks(self, server: Server, rag: OrderedClient) -> None:
        talk = rag.conversation()
        talk.ask(QUERY, self.DOCUMENTS[:2])
        talk.ask("And there?", self.DOCUMENTS[2:])
        first, second = server.requests
        assert first["prompt_cache_options"] == second["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
        # Where this turn resumes, and where the next does.
        ends = [sent["messages"][place]["content"][-1] for sent, place in ((first, 1), (second, 1), (second, 3))]
        assert all("prompt_cache_breakpoint" in part for part in ends)
        unmarked = [
            [part | {"prompt_cache_breakpoint": None} for part in sent["messages"][1]["content"]]
            for sent in (first, second)
        ]
        assert unmarked[0] == unmarked[1]
        assert "prompt_cache_breakpoint" not in json.dumps(talk.messages)
