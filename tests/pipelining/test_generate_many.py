"""Batches of the openai clients: each request is answered once, and those that are cached go first."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.waiting import eventually, until

from ragorder import Document, Orderer, Ordering, PromptBuilder

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

from ragorder.adapters.openai import Answer, AsyncOrderedClient, OrderedClient

USAGE = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


@dataclass
class FarEnd:
    """The far end of a connection that is not there: answers each request with its question, and a status of 400 where
    that says so. With `open` cleared it answers nobody, until it is set, or so many requests are there."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    opens_at: int | None = None
    open: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.open.set()

    @property
    def questions(self) -> list[str]:
        return [question_of(body) for body in self.asked]

    def enter(self, request: Any) -> Any:
        body = json.loads(request.content)
        with self.lock:
            self.asked.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if self.in_flight == self.opens_at:
                self.open.set()
        return body

    def leave(self, body: Any) -> Any:
        with self.lock:
            self.in_flight -= 1
        if "refused" in question_of(body):
            return httpx.Response(400, json={"error": {"message": "no"}})
        events = [{"choices": [{"index": 0, "delta": {"content": question_of(body)}, "finish_reason": "stop"}]}]
        events += [{"choices": [], "usage": USAGE}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content="".join(lines).encode())

    def answer(self, request: Any) -> Any:
        body = self.enter(request)
        # An answer takes time: threads that never wait would keep the interpreter from the one that reads outcomes.
        time.sleep(0.002)
        self.open.wait(60)
        return self.leave(body)

    async def answer_async(self, request: Any) -> Any:
        body = self.enter(request)
        try:
            await asyncio.sleep(0)
            while not self.open.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.leave(body)
            raise
        return self.leave(body)


def question_of(body: dict[str, Any]) -> str:
    question: str = body["messages"][-1]["content"].rpartition("Question: ")[2]
    return question


class Tracking(Orderer):
    """An orderer that keeps what it was asked, and its orderings as long as they are not finished."""

    def __init__(self) -> None:
        super().__init__(capacity_tokens=80, block_size=16, prefix_tokens=0, suffix_tokens=16, strict=True)
        self.asked: list[dict[str, Any]] = []
        self.unfinished: list[Ordering[Any]] = []

    def order(self, documents: Any, **options: Any) -> Ordering[Any]:
        ordering = super().order(documents, **options)
        self.asked.append(options)
        self.unfinished.append(ordering)
        ordering.add_done_callback(lambda _: self.unfinished.remove(ordering))
        return ordering


Many = Callable[..., Iterator[tuple[int, Any]]]


@pytest.fixture
def orderer() -> Tracking:
    return Tracking()


@pytest.fixture
def far_end() -> FarEnd:
    return FarEnd()


def make_client(kind: str, far_end: FarEnd, orderer: Tracking) -> Any:
    options: dict[str, Any] = {"base_url": "http://far.end/v1", "api_key": "k", "max_retries": 0}
    setup: dict[str, Any] = {"model": "m", "orderer": orderer, "builder": PromptBuilder("")}
    if kind == "threads":
        http = httpx.Client(transport=httpx.MockTransport(far_end.answer))
        return OrderedClient(openai.OpenAI(http_client=http, **options), **setup)
    transport = httpx.MockTransport(far_end.answer_async)
    return AsyncOrderedClient(
        openai.AsyncOpenAI(http_client=httpx.AsyncClient(transport=transport), **options), **setup
    )


@pytest.fixture(params=["threads", "tasks"])
def many(request: pytest.FixtureRequest, far_end: FarEnd, orderer: Tracking) -> Many:
    """`generate_many` of either client, as an iterator."""
    client = make_client(request.param, far_end, orderer)
    if request.param == "threads":
        return client.generate_many  # type: ignore[no-any-return]

    def drive(requests: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        outcomes: AsyncIterator[tuple[int, Any]] = client.generate_many(requests, **options)

        def iterate() -> Iterator[tuple[int, Any]]:
            with asyncio.Runner() as runner:
                try:
                    while (outcome := runner.run(take(outcomes))) is not None:
                        yield outcome
                finally:
                    runner.run(outcomes.aclose())  # type: ignore[attr-defined]

        async def take(outcomes: AsyncIterator[tuple[int, Any]]) -> tuple[int, Any] | None:
            return await anext(outcomes, None)

        return iterate()

    return drive


def alternating(count: int) -> list[tuple[str, list[Document]]]:
    """By turns one of two documents; the cache has room for one (RAGCache section 5.2)."""
    pair = [Document(name, name, tokens=64) for name in "ab"]
    return [(f"q{number}", [pair[number % 2]]) for number in range(count)]


class TestTheBatchApi:
    def test_answers_every_request_once_and_says_which(self, many: Many, far_end: FarEnd, orderer: Tracking) -> None:
        far_end.open.clear()
        far_end.opens_at = 4
        outcomes = list(many(alternating(30), concurrency=4))
        assert sorted(index for index, _ in outcomes) == list(range(30))
        assert all(answer.text == f"q{index}" for index, answer in outcomes)
        assert all(answer.ordering.documents[0].id == "ab"[index % 2] for index, answer in outcomes)
        assert sorted(far_end.questions) == sorted(f"q{number}" for number in range(30))
        assert far_end.most_in_flight == 4
        assert orderer.unfinished == []

    @pytest.mark.parametrize(
        ("options", "order", "cached"),
        [
            ({}, "02461357", "246357"),
            ({"window": 2}, "02413576", "24357"),
            ({"window": 0}, "01234567", ""),
        ],
    )
    def test_those_go_first_that_the_cache_has_most_of_within_the_window(
        self, many: Many, far_end: FarEnd, options: dict[str, int], order: str, cached: str
    ) -> None:
        answers = dict(many(alternating(8), concurrency=1, **options))
        assert far_end.questions == [f"q{number}" for number in order]
        hits = [number for number in order if answers[int(number)].ordering.cached_tokens]
        assert hits == [*cached]

    def test_each_is_laid_out_for_those_that_wait_in_its_scope(
        self, many: Many, far_end: FarEnd, orderer: Tracking
    ) -> None:
        requests = [
            (question, documents, "xy"[number % 3 == 0]) for number, (question, documents) in enumerate(alternating(30))
        ]
        list(many(requests, concurrency=1, window=40))
        assert [body["cache_salt"] for body in far_end.asked].count("y") == 10
        for body, options in zip(far_end.asked, orderer.asked, strict=True):
            assert body["cache_salt"] == options["scope"]
            assert len(options["waiting"]) <= 8
        assert len(orderer.asked[0]["waiting"]) < 8, "those of the other scope are not among them"
        assert orderer.asked[0]["waiting"] and orderer.asked[-1]["waiting"] == []

    def test_a_request_that_fails_has_its_error_instead(self, many: Many, orderer: Tracking) -> None:
        requests: list[Any] = [*alternating(4), ("refused", []), ("bad scope", [], "a/b")]
        outcomes = dict(many(requests, concurrency=2))
        assert [type(outcomes[index]) for index in range(6)] == [Answer] * 4 + [openai.BadRequestError, ValueError]
        assert orderer.unfinished == []

    def test_an_error_ends_everything(self, many: Many, far_end: FarEnd, orderer: Tracking) -> None:
        with pytest.raises(openai.BadRequestError):
            list(many([("refused", []), *alternating(400)], concurrency=2, window=0, on_error="raise"))
        assert len(far_end.asked) < 400
        assert (far_end.in_flight, orderer.unfinished) == (0, [])

    def test_nothing_is_sent_before_the_first_iteration_nor_without_requests(self, many: Many, far_end: FarEnd) -> None:
        with closing(many(alternating(3))):  # type: ignore[type-var]
            assert list(many([])) == far_end.asked == []

    @pytest.mark.parametrize(
        ("requests", "options", "error"),
        [
            (["ab"], {}, "request 0 has the wrong form"),
            ([("q", []), ("q",)], {}, "request 1 has the wrong form"),
            ([(1, [])], {}, "request 0 has the wrong form"),
            ([], {"concurrency": 0}, "concurrency"),
            ([], {"window": -1}, "window"),
            ([], {"on_error": "ignore"}, "on_error"),
            ([], {"messages": []}, "messages is set by the client"),
        ],
    )
    def test_invalid_arguments_are_refused_at_once(self, many: Many, requests: Any, options: Any, error: str) -> None:
        with pytest.raises((ValueError, TypeError), match=error):
            many(requests, **options)

    def test_closing_early_ends_what_is_in_flight_in_threads(self, far_end: FarEnd, orderer: Tracking) -> None:
        outcomes = make_client("threads", far_end, orderer).generate_many(alternating(400), concurrency=3)
        next(outcomes)
        outcomes.close()
        assert (far_end.in_flight, orderer.unfinished) == (0, [])
        assert len(far_end.asked) < 400
        assert not [thread for thread in threading.enumerate() if thread.name == "ragorder-batch"]

    async def test_closing_early_ends_what_is_in_flight_in_tasks(self, far_end: FarEnd, orderer: Tracking) -> None:
        client = make_client("tasks", far_end, orderer)
        async with aclosing(client.generate_many(alternating(40), concurrency=3)) as outcomes:
            await anext(outcomes)
            far_end.open.clear()
            assert await asyncio.to_thread(eventually, lambda: far_end.in_flight == 3)
        assert (far_end.in_flight, orderer.unfinished) == (0, [])
        # The loop closes generators that HTTP clients abandon in tasks of its own, which are no coroutines.
        running = {task for task in asyncio.all_tasks() if inspect.iscoroutine(task.get_coro())}
        assert running == {asyncio.current_task()}

    async def test_a_cancelled_caller_leaves_nothing_running(self, far_end: FarEnd, orderer: Tracking) -> None:
        client = make_client("tasks", far_end, orderer)
        far_end.open.clear()

        async def ask() -> list[Any]:
            return [outcome async for outcome in client.generate_many(alternating(9), concurrency=2)]

        asking = asyncio.create_task(ask())
        await until(lambda: far_end.in_flight == 2, pause_s=0.005)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: (far_end.in_flight, orderer.unfinished) == (0, []), pause_s=0.005)

    @pytest.mark.slow
    @pytest.mark.vllm
    def test_on_a_real_server(self, vllm_server: Any, vllm_model: Any) -> None:
        from transformers import AutoTokenizer

        builder = PromptBuilder("Answer.", tokenizer=AutoTokenizer.from_pretrained(vllm_model))
        shape: dict[str, Any] = {"block_size": vllm_server.block_size, "capacity_tokens": vllm_server.capacity_tokens}
        orderer = Orderer(tokens=builder.document_tokens, prefix_tokens=builder.prefix_tokens, strict=True, **shape)
        connection = openai.OpenAI(base_url=f"{vllm_server.base_url}/v1", api_key="none")
        setup: dict[str, Any] = {"model": vllm_server.model_name, "orderer": orderer, "builder": builder}
        client = OrderedClient(connection, prompts="token_ids", **setup)
        texts = {name: f"{name} is a document about {name}. " * 12 for name in "abcdef"}
        rng = random.Random(0)
        requests = [
            (f"q{number}", [Document(name, texts[name]) for name in rng.sample("abcdef", 3)]) for number in range(12)
        ]
        outcomes = dict(client.generate_many(requests, concurrency=2, max_tokens=4))
        answers = [outcomes[index] for index in range(12)]
        assert all(isinstance(answer, Answer) and answer.completion_tokens for answer in answers)
        assert sum(answer.cached_tokens for answer in answers) > 0
