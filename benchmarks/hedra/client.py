"""Processor time of workflows whose engine is elsewhere, over HTTP (suite hedra-client)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.endpoint import OpenAIStreams
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptRequest
from ragorder.adapters.workflows import WorkflowPrompts, ordered_workflows
from ragorder.benchmarks.common.turns import InTurns, median_ms, ms_columns
from ragorder.benchmarks.proxy.client import instant_server
from ragorder.eval.report.declared import Column, TableForm, figure, policy_column, ratio
from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.suite import Job, Line
from ragorder.pipelining import AnswerChunk
from ragorder.pipelining.workflow import RAGraph, hyde, interpret, irg, multistep

if TYPE_CHECKING:
    import openai

_WORKFLOWS: dict[str, Callable[[], RAGraph]] = {"multistep": multistep, "hyde": hyde, "irg": irg}
_DOCUMENTS = [Document(f"d{number}", f"Passage {number} of the manual. " * 25) for number in range(64)]


class ClientCell(SeedlessCell):
    """`requests` of a workflow, all at once; answers have `tokens`, each of `token_ms`; measured `repeats` times."""

    workflow: Literal["multistep", "hyde", "irg"] = "multistep"
    requests: int = Field(12, ge=1)
    tokens: int = Field(50, ge=1)
    token_ms: float = Field(4.0, ge=0)
    repeats: int = Field(5, ge=1)


class Client(InTurns):
    """Column `ms`: processor time a request. Facts: `generations` sent, and those of them `streamed`, a request."""

    kind = "hedra-client"
    cell = ClientCell
    facts = ("generations", "streamed")
    policies: ClassVar[Any] = ("plain client", "streaming client", "stage by stage", "all")
    packages: ClassVar[Any] = {"openai": "live", "numpy": "retrieval", "uvicorn": "proxy"}
    tables = (
        TableForm(
            "Processor time of the client",
            [
                Column("workflow", lambda row: row.cell.workflow),
                policy_column("client"),
                *ms_columns("request", 1),
                figure("generations", "generations", 1),
                figure("streamed", "streamed", 1),
                ratio("÷ plain client", median_ms, "plain client"),
            ],
            note="Median, least and most of the repeats. Plain and streaming client: the openai client, one node after "
            "the other, documents in rank order; stage by stage and all: the workflow server, by its transformations.",
            labels=2,
            by=(),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ClientCell = job.cell.model_copy(update={"requests": job.requests})
        options = ("--words", str(cell.tokens), "--word-s", str(cell.token_ms / 1000))
        with instant_server(*options) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            yield from self.in_turns(job, advance, lambda policy: asyncio.run(measure(cell, policy, url)))


class _Counted:
    """An engine that knows what it was sent; `streamed` None leaves that to the request."""

    def __init__(self, client: openai.AsyncOpenAI, *, streamed: bool | None) -> None:
        self.sent: list[bool] = []
        self._client = client
        self._engine = OpenAIStreams(client, "served")
        self._streamed = streamed

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        self.sent.append(request.streamed if self._streamed is None else self._streamed)
        if self._streamed:
            # The client as it is, with its own models of each chunk.
            messages: Any = request.messages
            async with await self._client.chat.completions.create(
                model="served", messages=messages, stream=True, max_tokens=256
            ) as chunks:
                async for chunk in chunks:
                    if chunk.choices and (text := chunk.choices[0].delta.content):
                        yield AnswerChunk(text)
            return
        request = request if self._streamed is None else replace(request, streamed=False)
        async with aclosing(self._engine.stream(request)) as answer:
            async for each in answer:
                yield each


async def _embed(query: str) -> Any:
    import numpy as np

    return np.array([sum(query.encode())])


async def _search(vector: Any, k: int) -> Sequence[int]:
    return [(int(vector[0]) + rank) % len(_DOCUMENTS) for rank in range(k)]


async def _retrieve(query: str, topk: int) -> list[Document]:
    return [_DOCUMENTS[id] for id in await _search(await _embed(query), topk)]


async def measure(cell: ClientCell, policy: str, url: str) -> tuple[float, dict[str, float]]:
    """Milliseconds a request, and facts. The first two requests are not counted."""
    import openai

    builder = PromptBuilder("Answer from the documents.", question_template="{query}")
    orderer = Orderer(capacity_tokens=1 << 20, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    graph = _WORKFLOWS[cell.workflow]().compile()
    served = policy in ("stage by stage", "all")
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        engine = _Counted(client, streamed=None if served else policy == "streaming client")
        prompts = WorkflowPrompts(OrderedPrompts(orderer, builder))
        transformations = None if policy == "all" else ()
        async with ordered_workflows(
            engine,
            _search,
            _embed,
            _DOCUMENTS.__getitem__,
            orderer=orderer,
            builder=builder,
            transformations=transformations,
        ) as server:

            def run(question: str) -> Awaitable[Any]:
                if served:
                    return server.run(graph, question)
                return interpret(graph, question, engine=engine, prompts=prompts, retrieve=_retrieve)

            for number in range(2):
                await run(f"first question {number}")
            engine.sent.clear()
            began_s = time.process_time()
            await asyncio.gather(*(run(f"question {number}") for number in range(cell.requests)))
            ended_s = time.process_time()
    facts = {"generations": len(engine.sent), "streamed": sum(engine.sent)}
    shares = {name: count / cell.requests for name, count in facts.items()}
    return 1000 * (ended_s - began_s) / cell.requests, shares
