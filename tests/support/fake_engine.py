"""An OpenAI-compatible server without a model, in a process that can be killed: a block pool for each of its ranks, and
answers that take as long as the request says.

    python -m support.fake_engine --ranks 2 --capacity-tokens 16384
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from ragorder.eval.engines.sim import SimEngine

BLOCK = 16
_CHARACTERS = 4


class FakeEngine:
    """A prompt's tokens are its pieces of four characters. The field `pace` of a request says how many seconds its
    first token and each further one take, or None: until the gate is opened."""

    def __init__(self, ranks: int, capacity_tokens: int) -> None:
        self.ranks = ranks
        self.capacity_tokens = capacity_tokens
        self.clear()

    def clear(self) -> None:
        """Be as new."""
        self.engines = [
            SimEngine(block_size=BLOCK, capacity_tokens=self.capacity_tokens, like="vllm-0.32")
            for _ in range(self.ranks)
        ]
        self.begun: list[str] = []
        self.cached_tokens = self.prompt_tokens = 0
        self.served = [0] * self.ranks
        self.healthy = True
        self.gate = asyncio.Event()
        self.responses: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/state", self.state)
        app.router.add_post("/{what:sick|open|clear}", self.told)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/responses", self.respond)
        app.router.add_route("*", "/v1/responses/{id}", self.stored)
        app.router.add_route("*", "/v1/responses/{id}/cancel", self.stored)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def told(self, request: web.Request) -> web.Response:
        match request.match_info["what"]:
            case "sick":
                self.healthy = False
            case "open":
                self.gate.set()
            case "clear":
                self.clear()
        return web.Response()

    async def pause(self, seconds: float | None) -> None:
        await (self.gate.wait() if seconds is None else asyncio.sleep(seconds))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        # vLLM gives the sum of all engines for each, a null block included.
        blocks = len(self.engines) * (self.capacity_tokens // BLOCK + 1)
        lines = [
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{blocks}",engine="{rank}"}} 1.0'
            for rank in range(len(self.engines))
        ]
        return web.Response(text="\n".join([*lines, ""]))

    async def state(self, _: web.Request) -> web.Response:
        names = ("begun", "cached_tokens", "prompt_tokens", "served")
        return web.json_response({name: getattr(self, name) for name in names})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rank = int(request.headers.get("x-data-parallel-rank", 0))
        text = "\n".join(message["content"] for message in body["messages"])
        self.begun.append(text.rpartition("Question: ")[2])
        self.served[rank] += 1
        done, handle = self.engines[rank].admit(_tokens(text), 16)
        self.cached_tokens += done.cached_tokens
        self.prompt_tokens += done.prompt_tokens
        usage = {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        pace = body.get("pace", [0.0, 0.0])
        try:
            if not body.get("stream"):
                await self.pause(pace[0])
                answer = {"choices": [{"message": {"role": "assistant", "content": "a b c"}}], "usage": usage}
                return web.json_response(answer)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await _send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await self.pause(pace[0])
            for word in ("a", " b", " c"):
                await _send(response, {"choices": [{"index": 0, "delta": {"content": word}}]})
                await self.pause(pace[1])
            await _send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.engines[rank].finish(handle)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Keeps its responses, and continues those that it has."""
        body = await request.json()
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.responses:
            return web.json_response({"error": {"message": "no such response", "code": "not_found"}}, status=404)
        name = f"resp_{uuid4().hex}"
        self.responses.add(name)
        item = {"id": f"msg_{uuid4().hex}", "type": "message", "content": [{"type": "output_text", "text": "a"}]}
        whole = {"output": [item], "object": "response", "id": name}
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (
            {"type": "response.created", "response": whole | {"output": []}},
            {"type": "response.output_text.delta", "item_id": item["id"], "delta": "a"},
            {"type": "response.completed", "response": whole},
        ):
            await _send(response, event)
        return response

    async def stored(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self.responses:
            return web.json_response({"error": {"message": "no such response", "code": "not_found"}}, status=404)
        if request.method == "DELETE":
            self.responses.discard(name)
        return web.json_response({"id": name})


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _tokens(text: str) -> list[int]:
    pieces = (text[start : start + _CHARACTERS] for start in range(0, len(text), _CHARACTERS))
    return [int.from_bytes(piece.encode()[:7].ljust(7), "big") for piece in pieces]


class RunningEngine:
    """A fake engine at `url`."""

    url: str

    @property
    def state(self) -> Any:
        """The questions that have begun, its tokens, and the requests of each rank."""
        with urllib.request.urlopen(f"{self.url}/state", timeout=30) as response:
            return json.load(response)

    def sicken(self) -> None:
        """From now on it says that it takes no requests."""
        self._tell("sick")

    def open(self) -> None:
        """Its gate."""
        self._tell("open")

    def clear(self) -> None:
        self._tell("clear")

    def _tell(self, what: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{what}", b""), timeout=30).close()


class EngineProcess(RunningEngine):
    def __init__(self, popen: subprocess.Popen[str], url: str, ranks: int, capacity_tokens: int) -> None:
        self.popen = popen
        self.url = url
        self.shape = ranks, capacity_tokens

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(60)


class Engines:
    """Starts engines; one that was given back and still runs serves again, as if it were new."""

    def __init__(self) -> None:
        self._started: list[EngineProcess] = []
        self._taken: list[EngineProcess] = []

    def start(self, *, ranks: int = 1, capacity_tokens: int = 16_384, port: int = 0) -> EngineProcess:
        for engine in self._started:
            is_free = engine not in self._taken and engine.popen.poll() is None
            if is_free and engine.shape == (ranks, capacity_tokens) and not port:
                engine.clear()
                self._taken.append(engine)
                return engine
        options = ["--ranks", str(ranks), "--capacity-tokens", str(capacity_tokens), "--port", str(port)]
        folder = Path(__file__).resolve().parents[1]
        command = [sys.executable, "-m", "support.fake_engine", *options]
        popen = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert popen.stdout is not None
        engine = EngineProcess(popen, popen.stdout.readline().strip(), ranks, capacity_tokens)
        self._started.append(engine)
        self._taken.append(engine)
        return engine

    def give_back(self) -> None:
        self._taken.clear()

    def stop(self) -> None:
        for engine in self._started:
            engine.popen.kill()
            engine.popen.communicate()


async def _serve(engine: FakeEngine, port: int) -> None:
    runner = web.AppRunner(engine.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--capacity-tokens", type=int, default=16_384)
    arguments = parser.parse_args()
    asyncio.run(_serve(FakeEngine(arguments.ranks, arguments.capacity_tokens), arguments.port))
