"""Streams of the client of OpenAI-compatible servers: whatever ends one, every ordering is finished, and what broke is
asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from ragorder import Document, Orderer, Ordering, PromptBuilder
from ragorder.adapters.openai import Answer, OrderedClient
from ragorder.ordering import RequestOutcome

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
from support.openai_clients import (
    CONFIRMED,
    CONFIRMED_GOOD,
    DISCARDED,
    DOCUMENTS,
    QUERY,
    Async,
    Connect,
    Sync,
    connecting,
)
from support.scripted_chat import GOOD, ROLE, STOP, Response, cached, chat, error
from support.sent_requests import RecordingOrderer

# What breaks in the middle of a stream, the openai package wraps from version 3 on.
_WRAPS = int(openai.__version__.partition(".")[0]) >= 3
CUT = openai.APIConnectionError if _WRAPS else httpx.RemoteProtocolError
STALLED = openai.APITimeoutError if _WRAPS else httpx.ReadTimeout


@pytest.fixture(params=[Sync, Async])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with connecting(request.param) as connect:
        yield connect


@pytest.fixture
def synchronous() -> Iterator[Connect]:
    with connecting(Sync) as connect:
        yield connect


@pytest.fixture
def asynchronous() -> Iterator[Connect]:
    with connecting(Async) as connect:
        yield connect


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
    def test_discards_before_the_first_token_and_a_broken_stream_is_asked_for_again(
        self, connect: Connect, case: str
    ) -> None:
        response, expected, again = FAILURES[case]
        connect.server.plays(response, response)
        with pytest.raises(expected):
            connect(retries=0, timeout=timeout_of(case)).stream(QUERY, DOCUMENTS)
        first = CONFIRMED if case in AFTER_FIRST_TOKEN else DISCARDED
        assert connect.orderer.finished == [first]
        assert len(connect.server.requests) == 1
        assert (connect.orderer.predict_cached_tokens(DOCUMENTS)[0] > 0) == first.served

        with nullcontext() if again else pytest.raises(expected):
            answer = connect(timeout=timeout_of(case)).generate(QUERY, DOCUMENTS)
            assert answer.text == "Hello world", "nothing of the broken stream is left in it"
        assert connect.orderer.finished == [first, first, CONFIRMED_GOOD][: 2 + again]
        assert connect.slept == [0.1] * again
        assert len(connect.server.requests) == 2 + again

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
    def test_each_attempt_waits_longer_and_they_are_counted(self, connect: Connect) -> None:
        connect.server.plays(*[Response([ROLE], "cut")] * 3)
        connect(retries=3).generate(QUERY, DOCUMENTS)
        assert connect.slept == [0.1, 0.2, 0.4]
        connect.server.plays(*[Response(end="cut")] * 3)
        with pytest.raises(CUT):
            connect(retries=2).generate(QUERY, DOCUMENTS)
        assert len(connect.server.requests) == 4 + 3

    def test_the_last_error_is_raised_as_it_is(self, connect: Connect) -> None:
        connect.server.plays(Response(end="cut"), error(404, "gone"))
        with pytest.raises(openai.NotFoundError, match="gone"):
            connect().generate(QUERY, DOCUMENTS)
        assert connect.orderer.finished == [DISCARDED, DISCARDED]

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
    def test_gives_the_pieces_and_then_the_answer(self, connect: Connect) -> None:
        stream, pieces = connect().stream(QUERY, DOCUMENTS)
        assert pieces == ["Hello", " world"]
        assert (stream.answer.text, stream.answer.cached_tokens) == ("Hello world", 64)
        assert stream.answer.ordering is stream.ordering
        assert connect.orderer.finished == [CONFIRMED_GOOD]

    @pytest.mark.parametrize(("take", "finished"), [(0, DISCARDED), (1, CONFIRMED)])
    def test_closed_it_is_cancelled_upstream_and_served_if_a_piece_was_there(
        self, connect: Connect, take: int, finished: RequestOutcome
    ) -> None:
        connect.server.plays(Response([ROLE, chat("Hel")][: 1 + take], "hold"))
        stream, pieces = connect().stream(QUERY, DOCUMENTS, take=take)
        assert pieces == ["Hel"][:take]
        assert sorted(document.id for document in stream.ordering.documents) == ["d0", "d1", "d2", "d3"]
        assert connect.orderer.finished == [finished]
        assert connect.server.hung_up.wait(60)
        assert stream.answer is None
        if connect.kind is Sync:
            assert next(stream, None) is None, "a closed stream has no more pieces"

    def test_a_loop_that_is_left_closes_it_and_one_that_nobody_reads_is_discarded(self, synchronous: Connect) -> None:
        client, server = synchronous().client, synchronous.server
        client.stream(QUERY, DOCUMENTS)
        server.plays(Response([ROLE, chat("Hel")], "hold"))
        for piece in client.stream(QUERY, DOCUMENTS):
            assert piece == "Hel"
            break
        assert synchronous.orderer.finished == [DISCARDED, CONFIRMED]
        assert server.hung_up.wait(60)

    def test_an_asynchronous_loop_that_is_left_closes_it(
        self, asynchronous: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        made, server = asynchronous(), asynchronous.server

        async def leave() -> None:
            async for piece in made.client.stream(QUERY, DOCUMENTS):
                assert piece == "Hel"
                break
            await asyncio.to_thread(server.hung_up.wait, 60)
            assert asynchronous.orderer.finished == [CONFIRMED]

        server.plays(Response([ROLE, chat("Hel")], "hold"))
        made.run(leave())
        assert [record.message for record in caplog.records if record.name == "asyncio"] == []

    def test_an_unread_asynchronous_stream_is_never_sent(self, asynchronous: Connect) -> None:
        made = asynchronous()
        made.client.stream(QUERY, DOCUMENTS)
        made.run(made.client.stream(QUERY, DOCUMENTS).close())
        assert asynchronous.orderer.orderings == []
        assert asynchronous.server.requests == []

    @pytest.mark.parametrize(("events", "finished"), [([ROLE], DISCARDED), ([ROLE, chat("Hel")], CONFIRMED)])
    @pytest.mark.parametrize("method", ["generate", "stream"])
    def test_a_cancelled_task_hangs_up(
        self, asynchronous: Connect, method: str, events: list[Any], finished: RequestOutcome
    ) -> None:
        made, server = asynchronous(), asynchronous.server

        async def read() -> None:
            async for _ in made.client.stream(QUERY, DOCUMENTS):
                pass

        async def cancel() -> None:
            task = asyncio.ensure_future(read() if method == "stream" else made.client.generate(QUERY, DOCUMENTS))
            await asyncio.to_thread(server.reached.wait, 60)
            await asyncio.sleep(1 if len(events) > 1 else 0)  # time for what was sent to be read
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asynchronous.orderer.finished == [finished]
            assert await asyncio.to_thread(server.hung_up.wait, 60)

        server.plays(Response(events, "hold"))
        made.run(cancel())


def echo(body: dict[str, Any]) -> Response:
    """Answers with the documents' ids, one chunk each."""
    content = body["messages"][-1]["content"]
    names = [line.strip("[]") for line in content.splitlines() if line.startswith("[")]
    return Response([ROLE, *[chat(f"{name} ") for name in names], STOP, cached(0)])


class TestConcurrency:
    REQUESTS = [[Document(f"r{number}-{each}", "text") for each in range(5)] for number in range(16)]  # noqa: RUF012

    def test_each_gets_its_own_answer(self, connect: Connect) -> None:
        async def ask() -> list[Answer]:
            return await asyncio.gather(*[client.generate(QUERY, documents) for documents in self.REQUESTS])

        connect.server.answer = echo
        made = connect()
        client = made.client
        if connect.kind is Async:
            answers = made.run(ask())
        else:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda documents: client.generate(QUERY, documents), self.REQUESTS))
        for documents, answer in zip(self.REQUESTS, answers, strict=True):
            assert sorted(answer.text.split()) == [document.id for document in documents]

    def test_each_request_leaves_before_the_next_is_ordered(self, asynchronous: Connect) -> None:
        happened: list[str] = []

        class Noting(Orderer):
            def order(self, documents: Any, **options: Any) -> Ordering[Any]:
                happened.append("ordered")
                return super().order(documents, **options)

        made = asynchronous(orderer=Noting(strict=True))
        completions = made.openai.chat.completions
        create = completions.create

        def noting(**options: Any) -> Any:
            happened.append("sent")
            return create(**options)

        async def ask() -> None:
            await asyncio.gather(*[made.client.generate(QUERY, documents) for documents in self.REQUESTS])

        completions.create = noting
        made.run(ask())
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

    @pytest.fixture
    def orderer(self) -> RecordingOrderer:
        return RecordingOrderer()

    def ask(self, orderer: Orderer, *streams: PlainStream) -> Answer:
        options: Any = {"model": "m", "orderer": orderer, "builder": PromptBuilder(), "sleep": lambda _: None}
        return OrderedClient(PlainClient(*streams), **options).generate(QUERY, DOCUMENTS)

    @pytest.mark.parametrize("nonsense", ["64", True, 64.0, [64]])
    def test_a_count_is_an_integer(self, orderer: RecordingOrderer, nonsense: Any) -> None:
        # The openai client would make integers of the first three.
        assert self.ask(orderer, PlainStream([STOP, cached(nonsense)], None)).cached_tokens is None

    @pytest.mark.parametrize(
        "failure", [httpx.RemoteProtocolError("x"), httpx.ReadError("x"), httpx.ReadTimeout("x"), None], ids=repr
    )
    def test_what_httpx_raises_breaks_a_stream_as_does_an_end_without_a_reason(
        self, orderer: RecordingOrderer, failure: Exception | None
    ) -> None:
        # openai before version 3 passes these on.
        assert self.ask(orderer, PlainStream([chat("Hel")], failure), self.GOOD).text == "Hello world"
        assert orderer.finished == [CONFIRMED, CONFIRMED_GOOD]

    @pytest.mark.parametrize(("chunks", "finished"), [([], DISCARDED), ([chat("Hel")], CONFIRMED)])
    @pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(), RuntimeError()], ids=repr)
    def test_whatever_else_is_raised_finishes_the_ordering(
        self, orderer: RecordingOrderer, failure: BaseException, chunks: list[Any], finished: RequestOutcome
    ) -> None:
        with pytest.raises(type(failure)) as raised:
            self.ask(orderer, PlainStream(chunks, failure), self.GOOD)
        assert raised.value is failure
        assert orderer.finished == [finished]
