"""A simulated chat server: vLLM's block pool behind an OpenAI-compatible application."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any
from zlib import crc32

import httpx2
from starlette.requests import Request

from ragorder.eval.engines.sim import SimEngine

__all__ = ["SimulatedServer"]

_CHARACTERS = 3.75


class SimulatedServer:
    """An ASGI application without a model. A token has 3.75 characters; answers have `max_tokens`."""

    base_url = "http://simulated"
    model_name = "served"

    def __init__(self, blocks: int, block_size: int = 32) -> None:
        self.block_size = block_size
        self.capacity_tokens = blocks * block_size
        self.transport = httpx2.ASGITransport(self)
        self._engine = SimEngine(block_size=block_size, capacity_tokens=self.capacity_tokens, like="vllm-0.32")
        self._answers = 0

    def reset(self) -> None:
        self._engine.reset()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content = json.dumps(self._answer(await Request(scope, receive).json())).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self._answers += 1
        answer = f"{self._answers} is the number of this answer. ".ljust(int(body["max_tokens"] * _CHARACTERS), ".")
        said = "".join(f"<{each['role']}>{_text(each['content'])}</>" for each in body["messages"]) + "<assistant>"
        prompt, whole = _tokens(said), _tokens(said + answer)
        done = self._engine.generate(prompt, answer=whole[len(prompt) : -1])
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(whole) - len(prompt),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        return {"choices": [{"message": {"content": answer}, "finish_reason": "length"}], "usage": usage}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _tokens(text: str) -> list[int]:
    edges = [int(number * _CHARACTERS) for number in range(int(len(text) / _CHARACTERS) + 1)]
    return [crc32(text[start:end].encode()) for start, end in pairwise([*edges, len(text)]) if start < end]
