"""Requests of applications, sent directly and through the proxy."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.chats.servers import simulated_tokens
from ragorder.benchmarks.proxy.shapes import APPLICATIONS, Passage, Shape
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.report.declared import Column, Row, TableForm, figure
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

_WORDS = "order refund invoice carrier label engine window policy account holder parcel battery".split()  # noqa: SIM905
_TOPICS, _DOCUMENTS = 14, 60
_LARGE, _LARGE_CHARACTERS = 8, 4096
_COUNTED = 40
Retrieved = tuple[list[Passage], str]


class ApplicationCell(SuiteCell):
    """`requests` of an application go to a cache of `blocks` of 16 tokens."""

    application: Annotated[str, one_of("application", APPLICATIONS)]
    requests: int = Field(60, ge=1)
    blocks: int = Field(2000, ge=1)


def _cached(run: Any) -> float:
    return float(sum(run.rows["cached_tokens"]) / max(1, sum(run.rows["prompt_tokens"])))


def _option(row: Row) -> str:
    template = APPLICATIONS[row.cell.application].template
    if not isinstance(template, str):
        return "a file"
    if template == "auto":
        return "no option"
    return "a form" if "{" in template else f"`--template {template}`"


def _direct(row: Row) -> str:
    share = row.mean(_cached, "direct")
    return format_number(None if share is None else 100 * share)


class Applications(Experiment):
    """Rows: of each request. `changed` bodies are none that the application writes; times are of a body of 32 KiB."""

    kind = "applications"
    cell = ApplicationCell
    columns = ("prompt_tokens", "cached_tokens")
    facts = ("ordered", "changed", "ordering_ms", "looking_ms")
    policies: ClassVar[Any] = ("direct", "proxied")
    simulated = True
    tables: ClassVar[Any] = [
        TableForm(
            "Applications and APIs",
            [
                Column("", lambda row: APPLICATIONS[row.cell.application].application),
                Column("recognised by", _option),
                Column("direct: cached, %", _direct),
                figure("proxied: cached, %", _cached, scale=100),
                figure("requests ordered", "ordered", 0),
                figure("otherwise changed", "changed", 0),
                figure("32 KiB: ordering, ms of CPU", "ordering_ms", 2),
                figure("without a template, ms", "looking_ms", 2),
            ],
            "Mean of {seeds} seeds. Otherwise changed: requests that are not, byte for byte, what the application "
            "writes for the documents in that order. Processor time of finding, ordering and writing the eight "
            "documents of a body of 32 KiB, and of looking for presets in it without --template.",
            labels=2,
            by=(),
            policies=("proxied",),
        )
    ]

    def requests(self, suite: Suite, cell: ApplicationCell) -> int:
        return min(cell.requests, self.options.limit or cell.requests)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import asyncio

        cell: ApplicationCell = job.cell
        shape = APPLICATIONS[cell.application]
        asked = list(_retrieved(job.requests, job.seed))
        for policy in job.policies:
            server = _Server(cell.blocks)
            facts: dict[str, Any] = dict.fromkeys(self.facts)
            if policy == "proxied":
                ordered, changed = asyncio.run(_send(server, shape, asked, advance))
                facts = {
                    "ordered": ordered,
                    "changed": changed,
                    "ordering_ms": _cpu_ms(shape, job.seed),
                    "looking_ms": _cpu_ms(shape, job.seed, looks=True),
                }
            else:
                for passages, question in asked:
                    server.take(shape.encode(passages, question))
                    advance()
            yield {"policy": policy, "engine": {"name": "sim", "block_size": 16}, "rows": server.rows, "facts": facts}


def _passages(characters: int) -> list[Passage]:
    draw = random.Random(7)
    found = []
    for number in range(_DOCUMENTS):
        text = ""
        while len(text) < characters:
            text += f"{draw.choice(_WORDS)} "
        found.append(Passage(f"kb-{number}", f"Article {number}", text[:characters].strip()))
    return found


def _retrieved(count: int, seed: int, k: int = 5, characters: int = 700) -> Iterator[Retrieved]:
    draw, passages = random.Random(seed), _passages(characters)
    for number in range(count):
        topic = draw.choices(range(_TOPICS), [1 / (place + 1) for place in range(_TOPICS)])[0]
        yield draw.sample(passages[4 * topic : 4 * topic + 8], k), f"Question {number} about {draw.choice(_WORDS)}?"


class _Server:
    """An ASGI application without a model: instructions, documents, and then the conversation are its prompt."""

    def __init__(self, blocks: int) -> None:
        self._engine = SimEngine(block_size=16, capacity_tokens=16 * blocks, like="vllm-0.32")
        self.capacity_tokens = 16 * blocks
        self.rows: dict[str, list[int]] = {"prompt_tokens": [], "cached_tokens": []}
        self.body = b""

    def take(self, body: bytes) -> bytes:
        self.body, fields = body, json.loads(body)
        names = ("instructions", "documents", "messages", "input", "prompt")
        prompt = simulated_tokens("".join(json.dumps(fields[name]) for name in names if name in fields))
        done = self._engine.generate(prompt)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        self.rows["prompt_tokens"].append(len(prompt))
        self.rows["cached_tokens"].append(done.cached_tokens)
        choice = {"message": {"content": "yes"}, "finish_reason": "stop"}
        return json.dumps({"choices": [choice], "usage": usage}).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        answer = self.take(await Request(scope, receive).body())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": answer})


async def _send(
    server: _Server, shape: Shape, asked: Sequence[Retrieved], advance: Callable[[], None]
) -> tuple[int, int]:
    """Send the requests through the proxy; returns how many were ordered, and how many otherwise changed."""
    import httpx2

    from ragorder.adapters.proxy import make_app
    from ragorder.orderer import Orderer

    proxy = make_app(
        Orderer(capacity_tokens=server.capacity_tokens, block_size=16),
        upstream="http://simulated",
        template=shape.templates(),
        make_transport=lambda: httpx2.ASGITransport(server),
    )
    ordered = changed = 0
    transport = httpx2.ASGITransport(proxy)
    async with httpx2.AsyncClient(base_url="http://127.0.0.1", transport=transport, trust_env=False) as http:
        for passages, question in asked:
            body = shape.encode(passages, question)
            answer = await http.post(shape.path, content=body, headers={"content-type": "application/json"})
            answer.raise_for_status()
            permutation = answer.headers.get("x-ragorder-permutation")
            ordered += permutation is not None
            changed += server.body != body and not shape.orders(passages, question, server.body, permutation)
            advance()
    return ordered, changed


def _cpu_ms(shape: Shape, seed: int, *, looks: bool = False) -> float:
    """Return the median processor time of a body of 32 KiB; the first half of the bodies is not counted."""
    from ragorder.adapters.proxy.bodies.parsing import BodyParser
    from ragorder.adapters.proxy.bodies.presets import PromptRecogniser
    from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
    from ragorder.adapters.proxy.ordering import RequestOrderer
    from ragorder.orderer import Orderer
    from ragorder.prompt import PromptBuilder

    builder, orderer = PromptBuilder(""), Orderer(block_size=16)
    read = BodyParser(
        builder,
        TokenCounter(builder, None),
        [] if looks else shape.templates(),
        warn=lambda _: None,
        finds_native=True,
        recogniser=PromptRecogniser(orderer.settings, lambda *_: None) if looks else None,
    )
    requests = RequestOrderer(orderer)
    parse = partial(read.parse, _ROUTES[shape.path])
    times = []
    for passages, question in _retrieved(2 * _COUNTED, seed, _LARGE, _LARGE_CHARACTERS):
        body = shape.encode(passages, question)
        began = time.process_time()
        parsed = parse(body)
        if parsed is not None:
            request = requests.order(parsed)
            request.take_body()
            request.begin(200, [(b"content-type", b"application/json")])
            request.feed(b"{}")
            request.complete = True
            request.end()
        times.append(time.process_time() - began)
    return 1e3 * median(times[_COUNTED:])


_ROUTES: dict[str, Any] = {
    "/v1/chat/completions": "chat",
    "/v2/chat": "cohere",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
