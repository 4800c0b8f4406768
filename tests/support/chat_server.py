"""A chat server without a model, for clients of OpenAI's API: a simulated prefix cache, and what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from zlib import crc32

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ragorder.eval.engines.sim import SimEngine
from support.serving_app import serving

BLOCK = 16
_CHARACTERS = 4


class ChatServer:
    """A token has four characters, a message whole tokens. With tools, a question of the user's is answered by a call
    of the first one, and its result by a text. While `broken`, requests fail."""

    url = ""
    broken = False
    breaks: Callable[[dict[str, Any]], bool] | None = None
    """Requests that fail."""

    def __init__(self, capacity_tokens: int = 1 << 18) -> None:
        self.capacity_tokens = capacity_tokens
        self._engine = SimEngine(block_size=BLOCK, capacity_tokens=capacity_tokens, like="vllm-0.32")
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.usages: list[dict[str, Any]] = []

    @property
    def sent(self) -> list[list[dict[str, Any]]]:
        """The messages of each request."""
        return [body["messages"] for body in self.bodies]

    @property
    def cached(self) -> list[int]:
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in self.usages]

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def forget(self, which: Callable[[dict[str, Any]], bool]) -> None:
        """Requests that are not of the conversation."""
        kept = [place for place, body in enumerate(self.bodies) if not which(body)]
        self.bodies, self.answers, self.usages = (
            [each[place] for place in kept] for each in (self.bodies, self.answers, self.usages)
        )

    def check_replay(self) -> None:
        """Each request of one conversation has the messages of the one before and its answer in front, byte for byte,
        and found all whole blocks of them in the cache."""
        for (before, after), answer in zip(pairwise(self.sent), self.answers, strict=False):
            assert [json.dumps(each) for each in after[: len(before)]] == [json.dumps(each) for each in before]
            assert _shown(after[len(before)]) == _shown(answer)
            assert len(after) > len(before) + 1
        for (before, after), usage in zip(pairwise(self.usages), self.usages[1:], strict=True):
            held = before["prompt_tokens"] + before["completion_tokens"] - 1
            assert after["prompt_tokens_details"]["cached_tokens"] >= held // BLOCK * BLOCK, usage

    async def _metrics(self, _: Request) -> Response:
        blocks = f'block_size="{BLOCK}",num_gpu_blocks="{self.capacity_tokens // BLOCK + 1}",engine="0"'
        return PlainTextResponse(f"vllm:cache_config_info{{{blocks}}} 1.0\n")

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "served", "object": "model", "created": 0}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if self.broken or (self.breaks is not None and self.breaks(body)):
            return JSONResponse({"error": {"message": "broken", "type": "server_error"}}, 500)
        answer, usage = self._generate(body)
        finish = "tool_calls" if "tool_calls" in answer else "stop"
        common = {"id": "x", "created": 0, "model": "served"}
        if not body.get("stream"):
            choice = {"index": 0, "message": answer, "finish_reason": finish}
            return JSONResponse(common | {"object": "chat.completion", "choices": [choice], "usage": usage})

        async def events() -> AsyncIterator[str]:
            chunk = common | {"object": "chat.completion.chunk"}
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            text = answer["content"] or ""
            deltas += [{"content": text[start : start + 7]} for start in range(0, len(text), 7)]
            deltas += [{"tool_calls": [{"index": 0, **call}]} for call in answer.get("tool_calls", ())]
            for delta in deltas:
                yield _event(chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            yield _event(chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
            yield _event(chunk | {"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _generate(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        number = len(self.bodies)
        answer: dict[str, Any] = {"role": "assistant", "content": f"This is answer {number}, and the end of it."}
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            asked = {"query": str(body["messages"][-1]["content"])}
            called = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps(asked)}
            answer |= {"content": None, "tool_calls": [{"id": f"call{number}", "type": "function", "function": called}]}
        self.bodies.append(body)
        self.answers.append(answer)
        prompt = [token for message in body["messages"] for token in _tokens(message)]
        said = _tokens(answer)
        done = self._engine.generate(prompt, answer=said[:-1])
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(said),
            "total_tokens": len(prompt) + len(said),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        self.usages.append(usage)
        return answer, usage


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    with serving() as serve:
        server.url = serve(server.app())
        yield server


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """What a chat template shows."""
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    members = {name: message.get(name) for name in ("role", "content", "tool_call_id")}
    return members | {"calls": calls}


def _tokens(message: dict[str, Any]) -> list[int]:
    text = json.dumps(_shown(message))
    return [crc32(text[start : start + _CHARACTERS].encode()) for start in range(0, len(text), _CHARACTERS)]


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
