"""Cached tokens of conversations, in retrieval order and through the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.benchmarks.chats.servers import Chats, ChatServer
from ragorder.benchmarks.chats.talks import TEMPLATE, ChatTurn
from ragorder.eval.report.declared import Column, Row, TableForm
from ragorder.eval.report.metrics import CACHED
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.suite import Job, Line, Suite

if TYPE_CHECKING:
    import httpx2

_SYSTEM = {"role": "system", "content": "Answer the question from the documents."}
Message = dict[str, Any]
_CHAT = "/v1/chat/completions"
_PREDICTED = "x-ragorder-predicted-cached-tokens"
Body = Callable[[Sequence[ChatTurn]], dict[str, Any]]


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _chat(turns: Sequence[ChatTurn], shown: Sequence[Any], system: str = _SYSTEM["content"]) -> dict[str, Any]:
    messages: list[Message] = [{"role": "system", "content": system}]
    for turn, content in zip(turns, shown, strict=True):
        messages += [_user(content), {"role": "assistant", "content": turn.answer}]
    return {"messages": messages[:-1]}


def _each_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns, [turn.shown() for turn in turns])


def _first_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns, [turns[0].shown(), *(turn.question for turn in turns[1:])])


def _system(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    documents = "\n".join([_SYSTEM["content"], *turns[-1].written()])
    return _chat(turns, [turn.question for turn in turns], documents)


def _last_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns, [*(turn.question for turn in turns[:-1]), turns[-1].shown()])


def _one_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns[-1:], [turns[-1].shown()])


def _parts(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    texts = [*turns[-1].written(), turns[-1].question]
    return _chat(turns[-1:], [[{"type": "text", "text": text} for text in texts]])


def _ranks(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns[-1:], [turns[-1].shown(ranks=True)])


def _tagged(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    documents = [{"id": id, "text": text} for id, text in turns[-1].documents]
    return {"messages": [_SYSTEM], "ragorder": {"documents": documents, "query": turns[-1].question}}


class ChatLayout(NamedTuple):
    """Request bodies in retrieval order and for the proxy, and the proxy's options."""

    retrieval: Body
    proxied: Body
    options: dict[str, Any] = {}  # noqa: RUF012


LAYOUTS = {
    "each turn": ChatLayout(_each_turn, _each_turn),
    "first turn only": ChatLayout(_first_turn, _first_turn),
    "system message replaced": ChatLayout(_system, _system),
    "last turn after history": ChatLayout(_last_turn, _last_turn),
    "one turn": ChatLayout(_one_turn, _one_turn),
    "one turn tagged": ChatLayout(_one_turn, _tagged),
    "one turn in parts": ChatLayout(_parts, _parts),
    "one turn ids are ranks": ChatLayout(_ranks, _ranks),
    "the same --number-by-place": ChatLayout(_ranks, _ranks, {"number_by_place": True}),
}


class ConversationCell(SuiteCell):
    """`blocks` is the size of the cache. With `tokenizer` the proxy has that of the served model."""

    layout: Annotated[str, one_of("layout", LAYOUTS)]
    conversations: int = Field(15, ge=1)
    turns: int = Field(3, ge=1)
    blocks: int = Field(511, ge=1)
    max_tokens: int = Field(24, ge=1)
    tokenizer: bool = False


def _predicted(row: Row) -> str:
    import numpy as np

    tokens, predicted = (row.group.values(row.policy, name) for name in ("prompt_tokens", "predicted_tokens"))
    return format_number(100 * np.nansum(predicted) / tokens.sum())


class Conversations(Chats):
    """Conversations in retrieval order or by the proxy, a row for each turn."""

    kind = "conversations"
    cell = ConversationCell
    policies: ClassVar[Any] = ("retrieval", "ragorder")
    longest_prompt = 8192
    tables: ClassVar[Any] = [
        TableForm(
            "Predicted by the proxy",
            [
                Column("", lambda row: row.group.label or row.block.suite.title),
                Column(
                    "prompt tokens", lambda row: format_number(row.group.values(row.policy, "prompt_tokens").sum(), 0)
                ),
                Column("cached, %", lambda row: format_number(row.group.value(row.policy, CACHED))),
                Column("predicted, %", _predicted),
            ],
            by=(),
            policies=("ragorder",),
        )
    ]

    def obstacle(self, suite: Suite, cell: ConversationCell, policy: str) -> str | None:
        if cell.tokenizer and self.options.engine == "sim":
            return "the simulated server has no tokenizer: use --engine openai"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ConversationCell = job.cell
        layout = LAYOUTS[cell.layout]
        server, chats = self.begin(job)
        tokenizer = load_tokenizer(str(self.model)) if cell.tokenizer else None
        for policy in job.policies:
            proxied = policy == "ragorder"
            body = layout.proxied if proxied else layout.retrieval
            proxy = make_proxy(server, tokenizer, **layout.options) if proxied else None
            rows = asyncio.run(send_conversations(server, chats, body, cell.max_tokens, proxy, advance))
            yield self.line(policy, server, rows)


async def send_conversations(
    server: ChatServer,
    chats: Sequence[Sequence[ChatTurn]],
    body: Body,
    max_tokens: int,
    proxy: Any = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[int | None]]:
    """Send the first turns, then the second ones, and so on; return the columns of a run. Turns keep their answers."""
    import httpx2

    server.reset()
    rows: dict[str, list[int | None]] = {"prompt_tokens": [], "cached_tokens": [], "predicted_tokens": []}
    transport = _transport(server) if proxy is None else httpx2.ASGITransport(proxy)
    common = {"model": server.model_name, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=server.base_url, timeout=600, trust_env=False, transport=transport) as http:
        for number in range(len(chats[0])):
            for turns in chats:
                response = await http.post(_CHAT, json=body(turns[: number + 1]) | common)
                response.raise_for_status()
                answer = response.json()
                turns[number].answer = answer["choices"][0]["message"]["content"]
                usage, predicted = answer["usage"], response.headers.get(_PREDICTED)
                rows["prompt_tokens"].append(usage["prompt_tokens"])
                rows["cached_tokens"].append((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
                rows["predicted_tokens"].append(None if predicted is None else int(predicted))
                advance()
    return rows


def make_proxy(server: ChatServer, tokenizer: Any = None, **options: Any) -> Any:
    """The proxy's application for a server, with the template of the layouts."""
    from ragorder.adapters.proxy import DocumentTemplate, make_app
    from ragorder.orderer import Orderer

    orderer = Orderer(capacity_tokens=server.capacity_tokens, block_size=server.block_size)
    transport = _transport(server)
    if transport is not None:
        options["make_transport"] = lambda: transport
    return make_app(
        orderer, upstream=server.base_url, template=DocumentTemplate(TEMPLATE), tokenizer=tokenizer, **options
    )


def _transport(server: ChatServer) -> httpx2.AsyncBaseTransport | None:
    return getattr(server, "transport", None)
