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
from ragorder.benchmarks.chats.talks import draw_topics
from ragorder.benchmarks.common.served import cached_share
from ragorder.benchmarks.proxy.shapes import MEASURED, Passage, Shape
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.report.declared import Column, Row, TableForm, figure
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.suite import Experiment, Job, Line

_WORDS = "order refund invoice carrier label engine window policy account holder parcel battery".split()  # noqa: SIM905
_TOPICS, _DOCUMENTS = 14, 60
_LARGE, _LARGE_CHARACTERS = 8, 4096
_FIRST, _COUNTED = 20, 80
Retrieved = tuple[list[Passage], str]


class ApplicationCell(SuiteCell):
    """`requests` of an application go to a cache of `blocks` of 16 tokens."""

    application: Annotated[str, one_of("application", MEASURED)]
    requests: int = Field(60, ge=1)
    blocks: int = Field(2000, ge=1)


def _option(row: Row) -> str:
    shape = MEASURED[row.cell.application]
    template = shape.template
    if shape.tag is not None:
        return "the tag"
    if shape.stable_tools:
        return "`--stable-tools`"
    if not isinstance(template, str):
        return "a file"
    if template == "auto":
        return "no option"
    return "a form" if "{" in template else f"`--template {template}`"


def _direct(row: Row) -> str:
    share = row.mean(cached_share, "direct")
    return format_number(None if share is None else 100 * share)


class Applications(Experiment):
    """Rows: of each request. `changed` bodies are none that the application writes; times are of a body of 32 KiB."""

    kind = "applications"
    cell = ApplicationCell
    columns = ("prompt_tokens", "cached_tokens")
    facts = ("ordered", "changed", "ordering_ms", "ordering_least_ms", "looking_ms", "looking_least_ms")
    policies: ClassVar[Any] = ("direct", "proxied")
    simulated = True
    tables: ClassVar[Any] = [
        TableForm(
            "Applications and APIs",
            [
                Column("", lambda row: MEASURED[row.cell.application].application),
                Column("recognised by", _option),
                Column("direct: cached, %", _direct),
                figure("proxied: cached, %", cached_share, scale=100),
                figure("requests ordered", "ordered", 0),
                figure("otherwise changed", "changed", 0),
                figure("32 KiB: ordering, ms of CPU", "ordering_ms", 2),
                figure("least", "ordering_least_ms", 2, over=min),
                figure("without a template, ms", "looking_ms", 2),
                figure("least of these", "looking_least_ms", 2, over=min),
            ],
            "Mean of {seeds} seeds. Sorted tools are not counted as ordered. Otherwise changed: requests that are not, "
            "byte for byte, what the application writes for the documents in that order. Processor time of finding, "
            "ordering and writing the eight documents of a body of 32 KiB, and of looking for presets in it without "
            "--template: medians, and the least of all seeds, which other work on the machine disturbs least.",
            labels=2,
            by=(),
            policies=("proxied",),
        )
    ]

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import asyncio

        cell: ApplicationCell = job.cell
        shape = MEASURED[cell.application]
        asked = list(_retrieved(job.requests, job.seed, listed=shape.listed))
        for policy in job.policies:
            server = _Server(cell.blocks)
            facts: dict[str, Any] = dict.fromkeys(self.facts)
            if policy == "proxied":
                ordered, changed = asyncio.run(_send(server, shape, asked, advance))
                ordering, looking = (_cpu_ms(shape, job.seed, looks=looks) for looks in (False, True))
                facts = {
                    "ordered": ordered,
                    "changed": changed,
                    "ordering_ms": median(ordering),
                    "ordering_least_ms": min(ordering),
                    "looking_ms": median(looking),
                    "looking_least_ms": min(looking),
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


def _retrieved(count: int, seed: int, k: int = 5, characters: int = 700, listed: int = 0) -> Iterator[Retrieved]:
    draw, passages = random.Random(seed), _passages(characters)
    for number in range(count):
        topic = draw_topics(draw, range(_TOPICS), 1)[0]
        found = passages[:listed] or passages[4 * topic : 4 * topic + 8]
        yield draw.sample(found, listed or k), f"Question {number} about {draw.choice(_WORDS)}?"


class _Server:
    """An ASGI application without a model: tools, instructions, documents, then the conversation are its prompt."""

    def __init__(self, blocks: int) -> None:
        self._engine = SimEngine(block_size=16, capacity_tokens=16 * blocks, like="vllm-0.32")
        self.capacity_tokens = 16 * blocks
        self.rows: dict[str, list[int]] = {"prompt_tokens": [], "cached_tokens": []}
        self.body = b""

    def take(self, body: bytes) -> dict[str, Any]:
        self.body, fields = body, json.loads(body)
        names = ("tools", "instructions", "documents", "messages", "input", "prompt")
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
        return {"choices": [choice], "usage": usage}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        await JSONResponse(self.take(await Request(scope, receive).body()))(scope, receive, send)


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
        stable_tools=shape.stable_tools,
        make_transport=lambda: httpx2.ASGITransport(server),
    )
    ordered = changed = 0
    transport = httpx2.ASGITransport(proxy)
    async with httpx2.AsyncClient(base_url="http://127.0.0.1", transport=transport, trust_env=False) as http:
        for passages, question in asked:
            body = shape.ask(passages, question)
            answer = await http.post(shape.path, content=body, headers={"content-type": "application/json"})
            answer.raise_for_status()
            permutation = answer.headers.get("x-ragorder-permutation")
            ordered += permutation is not None
            changed += server.body != body and not shape.orders(passages, question, server.body, permutation)
            advance()
    return ordered, changed


def _cpu_ms(shape: Shape, seed: int, *, looks: bool) -> list[float]:
    """Return the processor times of bodies of 32 KiB; the first ones are not counted."""
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
        stable_tools=shape.stable_tools,
        recogniser=PromptRecogniser(orderer.settings, lambda *_: None) if looks else None,
    )
    requests = RequestOrderer(orderer)
    parse = partial(read.parse, _ROUTES[shape.path])
    times = []
    for passages, question in _retrieved(_FIRST + _COUNTED, seed, _LARGE, _LARGE_CHARACTERS):
        body = shape.ask(passages, question)
        began = time.process_time()
        parsed = parse(body)
        if parsed is not None:
            request = requests.order(parsed)
            request.take_body()
            request.begin(200, [(b"content-type", b"application/json")])
            request.feed(b"{}")
            request.complete = True
            request.end()
        times.append(1e3 * (time.process_time() - began))
    return times[_FIRST:]


_ROUTES: dict[str, Any] = {
    "/v1/chat/completions": "chat",
    "/v2/chat": "cohere",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
