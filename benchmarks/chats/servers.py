"""Chat servers of a measurement: vLLM, or its block pool simulated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.sim import SimEngine
from ragorder.kernels.random_model import make_model

if TYPE_CHECKING:
    from ragorder.eval.running.options import Options

_CHARACTERS = 3.75


class SimulatedServer:
    """An ASGI application without a model. A token has 3.75 characters; answers have `max_tokens`."""

    base_url = "http://simulated"
    model_name = "served"

    def __init__(self, blocks: int, block_size: int = 32) -> None:
        import httpx2

        self.block_size = block_size
        self.capacity_tokens = blocks * block_size
        self.transport = httpx2.ASGITransport(self)
        self._engine = SimEngine(block_size=block_size, capacity_tokens=self.capacity_tokens, like="vllm-0.32")
        self._answers = 0

    def reset(self) -> None:
        self._engine.reset()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        content = json.dumps(self._answer(await Request(scope, receive).json())).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self._answers += 1
        answer = f"{self._answers} is the number of this answer. ".ljust(int(body["max_tokens"] * _CHARACTERS), ".")
        said = "".join(f"<{each['role']}>{_text(each['content'])}</>" for each in body["messages"]) + "<assistant>"
        prompt, whole = simulated_tokens(said), simulated_tokens(said + answer)
        done = self._engine.generate(prompt, answer=whole[len(prompt) : -1])
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(whole) - len(prompt),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        return {"choices": [{"message": {"content": answer}, "finish_reason": "length"}], "usage": usage}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def simulated_tokens(text: str) -> list[int]:
    edges = [int(number * _CHARACTERS) for number in range(int(len(text) / _CHARACTERS) + 1)]
    return [crc32(text[start:end].encode()) for start, end in pairwise([*edges, len(text)]) if start < end]


ChatServer = VLLMServer | SimulatedServer


class ChatServers:
    """Servers for prompts of up to `longest_prompt` tokens; `model` is the folder of the one that vLLM serves."""

    def __init__(self, options: Options, longest_prompt: int) -> None:
        self._options = options
        self._longest_prompt = longest_prompt
        self.model: Path | None = None

    @property
    def obstacle(self) -> str | None:
        if self._options.engine not in ("sim", "openai") or self._options.base_url is not None:
            return "a server is simulated or started: use --engine sim, or openai without --base-url"
        return None

    def start(self, blocks: int, texts: Iterable[str], resources: ExitStack) -> ChatServer:
        """A server with a cache of `blocks`. The tokenizer of a model of random weights is made from `texts`."""
        if self._options.engine == "sim":
            return SimulatedServer(blocks)
        if self._options.model is None:
            folder = Path(resources.enter_context(TemporaryDirectory()))
            shape = {"layers": 2, "hidden_size": 256, "vocab_size": 4096}
            self.model = make_model(
                folder / "model", texts=list(texts), max_position_embeddings=self._longest_prompt, **shape
            )
        else:
            self.model = self._options.model
        return resources.enter_context(VLLMServer(self.model, blocks=blocks, max_model_len=self._longest_prompt))

    def describe(self, server: ChatServer) -> dict[str, Any]:
        """What the record of a run says of its engine."""
        return {
            "name": self._options.engine,
            "model": None if self.model is None else str(self._options.model or "random weights"),
            "block_size": server.block_size,
            "capacity_tokens": server.capacity_tokens,
        }
