"""Chat servers of a measurement: vLLM, or its block pool simulated."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from zlib import crc32

from ragorder.benchmarks.chats.talks import ChatTurn, conversations
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.kernels.random_model import make_model

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
        from starlette.responses import JSONResponse

        await JSONResponse(self._answer(await Request(scope, receive).json()))(scope, receive, send)

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


class Chats(Experiment):
    """Conversations sent to a server; `model` is the folder of the one that vLLM serves."""

    base = RunRecord
    one_job = True
    longest_prompt: ClassVar[int]
    """In tokens."""
    model: Path | None = None

    def obstacle(self, suite: Suite, cell: Any, policy: str) -> str | None:
        if self.options.engine not in ("sim", "openai") or self.options.base_url is not None:
            return "a server is simulated or started: use --engine sim, or openai without --base-url"
        return None

    def requests(self, suite: Suite, cell: Any) -> int:
        """The turns of all whole conversations within the limit, those of one at least."""
        asked = cell.conversations * cell.turns
        return int(max(cell.turns, min(asked, self.options.limit or asked) // cell.turns * cell.turns))

    def begin(self, job: Job, *texts: str) -> tuple[ChatServer, list[list[ChatTurn]]]:
        """Return a server with a cache of the cell's blocks, and the conversations. The tokenizer of a model of random
        weights is made from these texts and the documents'."""
        chats = conversations(job.requests // job.cell.turns, job.cell.turns, job.seed)
        shown = [*texts, *(text for turns in chats for turn in turns for _, text in turn.documents)]
        return self.kept(job.cell.blocks, lambda: self._start(job.cell.blocks, shown)), chats

    def line(self, policy: str, server: ChatServer, rows: Mapping[str, Any]) -> Line:
        engine = {
            "name": self.options.engine,
            "model": None if self.model is None else str(self.options.model or "random weights"),
            "block_size": server.block_size,
            "capacity_tokens": server.capacity_tokens,
        }
        return {"policy": policy, "engine": engine, "rows": rows}

    def _start(self, blocks: int, texts: list[str]) -> ChatServer:
        if self.options.engine == "sim":
            return SimulatedServer(blocks)
        self.model = self.options.model
        if self.model is None:
            folder = Path(self.resources.enter_context(TemporaryDirectory()))
            shape = {"layers": 2, "hidden_size": 256, "vocab_size": 4096}
            self.model = make_model(folder / "model", texts=texts, max_position_embeddings=self.longest_prompt, **shape)
        server = VLLMServer(self.model, blocks=blocks, max_model_len=self.longest_prompt)
        return self.resources.enter_context(server)
