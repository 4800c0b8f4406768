"""Calls of Ray's own LLM server, whose documents are ordered on the way."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray.serve")

from pydantic import BaseModel, ConfigDict
from support.sent_requests import RecordingOrderer

from ragorder import Orderer
from ragorder.adapters.ray.ordered_calls import MalformedDocumentsError, OrderedCalls
from ragorder.ordering import RequestOutcome


class Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[dict[str, str]]
    stream: bool = False


class Answer(BaseModel):
    usage: dict[str, Any]


class Server:
    """Keeps what it is asked, and gives these answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[Request] = []

    async def chat(self, request: Request, info: Any = None) -> AsyncIterator[Any]:
        self.asked.append(request)
        return self._stream()

    async def _stream(self) -> AsyncIterator[Any]:
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer


class Failure(BaseModel):
    error: str


class TestCallsOfRaysLLMServer:
    USAGE: ClassVar = {"prompt_tokens": 400, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    EVENTS: ClassVar = [
        ['data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'],
        f'data: {{"choices": [], "usage": {json.dumps(USAGE)}}}\n\n',
        "data: [DONE]\n\n",
    ]

    @staticmethod
    def request(names: str, **fields: Any) -> Request:
        documents = [{"id": name, "text": f"{name} " * 200} for name in names]
        return Request(model="m", messages=[], ragorder={"documents": documents, "query": "?"}, **fields)

    @staticmethod
    async def run(calls: OrderedCalls, server: Server, request: Request) -> list[Any]:
        return [answer async for answer in await calls.run("chat", server.chat, request, "info")]

    @staticmethod
    def order_in(request: Request) -> list[str]:
        prompt = request.messages[-1]["content"]
        return sorted("abc", key=lambda name: prompt.index(f"{name} {name} {name}"))

    @pytest.mark.parametrize(("stream", "answers"), [(False, [Answer(usage=USAGE)]), (True, EVENTS)])
    async def test_are_ordered_alike_and_their_answers_are_read(self, stream: bool, answers: list[Any]) -> None:
        orderer = RecordingOrderer()
        calls, server = OrderedCalls(orderer), Server(*answers)
        for names in ("bac", "cab"):
            assert await self.run(calls, server, self.request(names, stream=stream)) == answers
        first, second = server.asked
        assert self.order_in(first) == self.order_in(second)
        assert first.stream is stream and "ragorder" not in (first.model_extra or {})
        assert orderer.finished == [RequestOutcome(True, 0, 401, 400)] * 2

    @pytest.mark.parametrize("answers", [[Failure(error="no")], [ValueError("no")]])
    async def test_that_fail_count_as_not_served(self, answers: list[Any]) -> None:
        orderer = RecordingOrderer()
        with suppress(ValueError):
            await self.run(OrderedCalls(orderer), Server(*answers), self.request("abc"))
        (outcome,) = orderer.finished
        assert not outcome.served

    async def test_without_documents_go_on_as_they_are(self) -> None:
        request, server = (
            Request(model="m", messages=[{"role": "user", "content": "hello"}]),
            Server("data: [DONE]\n\n"),
        )
        assert await self.run(OrderedCalls(Orderer(strict=True)), server, request) == ["data: [DONE]\n\n"]
        assert server.asked[0] is request

    async def test_with_malformed_documents_are_refused(self) -> None:
        request = Request(model="m", messages=[], ragorder={"documents": 3, "query": "?"})
        server = Server()
        with pytest.raises(MalformedDocumentsError, match="ragorder") as raised:
            await self.run(OrderedCalls(Orderer(strict=True)), server, request)
        assert server.asked == []
        # It comes to Ray's ingress from another process.
        assert pickle.loads(pickle.dumps(raised.value)).status_code == 400  # noqa: S301


class Engine:
    """In place of vLLM's."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def chat(self, request: Any, info: Any = None) -> AsyncIterator[Any]:
        self.asked.append(request)
        yield Answer(usage=TestCallsOfRaysLLMServer.USAGE)

    completions = chat


@pytest.mark.slow
async def test_rays_own_server_orders_its_own_requests() -> None:
    """Ray's classes, with the requests that its ingress hands on; the engine alone is none."""
    pytest.importorskip("vllm")
    module = pytest.importorskip("ragorder.adapters.ray.llm_server")
    from ray.serve.llm import LLMConfig
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

    orderer = RecordingOrderer()

    class OrderedServer(module.OrderedLLMServer):  # type: ignore[misc, name-defined]
        def make_calls(self) -> OrderedCalls:
            return OrderedCalls(orderer)

    server = OrderedServer.sync_init(LLMConfig(model_loading_config={"model_id": "m"}))
    server.engine = Engine()
    order_in = TestCallsOfRaysLLMServer.order_in
    for names in ("bac", "cab"):
        tagged = TestCallsOfRaysLLMServer.request(names).model_extra
        request = ChatCompletionRequest(model="m", messages=[], **tagged)
        assert [answer async for answer in await server.chat(request)] == [Answer(usage=TestCallsOfRaysLLMServer.USAGE)]
    first, second = server.engine.asked
    assert isinstance(first, ChatCompletionRequest) and order_in(first) == order_in(second)
    # Ray refuses a completion without a prompt.
    request = CompletionRequest(model="m", prompt="Answer.", **tagged)
    assert len([answer async for answer in await server.completions(request)]) == 1
    assert server.engine.asked[-1].prompt.startswith("Answer.") and "a a a" in server.engine.asked[-1].prompt
    assert orderer.finished == [RequestOutcome(True, 0, 401, 400)] * 3
