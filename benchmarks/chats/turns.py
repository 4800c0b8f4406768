"""Cached tokens of conversations whose turns each have documents, by how they are sent."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field

from ragorder import Document, Orderer, PromptBuilder, Turn
from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.benchmarks.chats.servers import Chats, ChatServer
from ragorder.benchmarks.chats.talks import TEMPLATE, ChatTurn
from ragorder.eval.report.declared import Block, Column, Row, TableForm
from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.load import closed_loop
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Job, Line

_COLUMNS = ("turn", "prompt_tokens", "cached_tokens", "predicted_tokens", "repeated", "rebased")
SYSTEM = "Answer the question from the documents."
Message = dict[str, Any]
Rows = dict[str, list[int | None]]
_NOTE = "Cached share of the prompt tokens (tokens computed for a turn), in the order of a conversation's turns."
_PREDICTED = "Turns whose cached tokens were predicted to within a block of those that the server reported."


class Chat(ABC):
    """A conversation, as an application keeps it."""

    predicted_tokens: int | None = None
    repeated = 0
    rebased = 0

    def __init__(self, builder: PromptBuilder, orderer: Orderer) -> None:
        self.builder = builder
        self.orderer = orderer
        self.messages: list[Message] = []

    @abstractmethod
    def ask(self, question: str, documents: Sequence[Document]) -> list[Message]:
        """The messages to send."""

    def answered(self, text: str, usage: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def failed(self) -> None:  # noqa: B027
        """The request of the last question failed."""


class SystemChat(Chat):
    """Documents in the system message, in place of those of the turn before; the history has questions and answers."""

    def ask(self, question: str, documents: Sequence[Document]) -> list[Message]:
        shown = "".join(map(self.builder.document_text, documents))
        self.messages.append({"role": "user", "content": f"Question: {question}"})
        return [{"role": "system", "content": f"{SYSTEM}\n\n{shown}"}, *self.messages]


class AppendingChat(Chat):
    """Each turn's documents in its own message as retrieved; the history is replayed."""

    def ask(self, question: str, documents: Sequence[Document]) -> list[Message]:
        content = self.builder.user_message(question, documents, range(len(documents)))
        self.messages.append({"role": "user", "content": content})
        return [{"role": "system", "content": SYSTEM}, *self.messages]


class TurnChat(Chat):
    """`PromptBuilder.turn`."""

    turn: Turn
    earlier: list[Document] | None = None
    """Documents of former turns, if they may be laid out again."""

    def ask(self, question: str, documents: Sequence[Document]) -> list[Message]:
        options: dict[str, Any] = {"orderer": self.orderer, "rebase": self.earlier}
        self.turn = self.builder.turn(question, documents, history=self.messages, **options)
        self.rebased = int(self.turn.rebased)
        self.predicted_tokens = self.turn.ordering.cached_tokens
        self.repeated = len(self.turn.repeated)
        return self.turn.messages

    def answered(self, text: str, usage: dict[str, Any]) -> None:
        prompt_tokens = usage["prompt_tokens"]
        total_tokens = prompt_tokens + usage["completion_tokens"]
        self.messages = self.turn.confirm(text, _cached(usage), total_tokens, prompt_tokens=prompt_tokens)

    def failed(self) -> None:
        self.turn.discard()


class RebasingChat(TurnChat):
    """With `rebase`."""

    def __init__(self, builder: PromptBuilder, orderer: Orderer) -> None:
        super().__init__(builder, orderer)
        self.earlier = []

    def answered(self, text: str, usage: dict[str, Any]) -> None:
        super().answered(text, usage)
        known = {document.key: document for document in [*(self.earlier or ()), *self.turn.new]}
        self.earlier = list(known.values())


CHATS: dict[str, type[Chat]] = {
    "system": SystemChat,
    "append": AppendingChat,
    "turns": TurnChat,
    "rebased": RebasingChat,
}


async def send_turns(
    server: ChatServer,
    chats: Sequence[Sequence[ChatTurn]],
    kind: type[Chat],
    tokenizer: Any,
    max_tokens: int,
    concurrency: int,
    advance: Callable[[], None] = lambda: None,
) -> Rows:
    """Send all turns, `concurrency` conversations at a time, to an empty server; return the columns of a run."""
    import httpx2

    server.reset()
    builder = PromptBuilder(
        SYSTEM,
        document_template=f"{TEMPLATE}\n",
        question_template="Question: {query}",
        tokenizer=tokenizer,
    )
    orderer = Orderer(
        capacity_tokens=server.capacity_tokens,
        block_size=server.block_size,
        prefix_tokens=builder.prefix_tokens,
        tokens=builder.document_tokens,
    )
    figures: dict[tuple[int, int], tuple[int | None, ...]] = {}
    common = {"model": server.model_name, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    transport = getattr(server, "transport", None)

    async def serve(http: Any, place: int, turns: Sequence[ChatTurn]) -> None:
        chat = kind(builder, orderer)
        for number, turn in enumerate(turns):
            documents = [Document(id, text) for id, text in turn.documents]
            try:
                body = common | {"messages": chat.ask(turn.question, documents)}
                response = await http.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                answer = response.json()
            except BaseException:
                chat.failed()
                raise
            usage = answer["usage"]
            chat.answered(answer["choices"][0]["message"]["content"] or "", usage)
            counts = usage["prompt_tokens"], _cached(usage), chat.predicted_tokens, chat.repeated, chat.rebased
            figures[number, place] = (number, *counts)
            advance()
            # A simulated server answers at once, and conversations take turns.
            await asyncio.sleep(0)

    options: dict[str, Any] = {"timeout": 600, "trust_env": False, "transport": transport}
    async with httpx2.AsyncClient(base_url=server.base_url, **options) as http:
        await closed_loop(lambda chat: serve(http, *chat), enumerate(chats), concurrency)
    # Runs are compared row by row.
    columns = zip(*(figures[key] for key in sorted(figures)), strict=True)
    return {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}


def _cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class TurnCell(SuiteCell):
    """`blocks` is the size of the cache, `concurrency` the conversations at a time."""

    blocks: int = Field(1023, ge=1)
    conversations: int = Field(40, ge=1)
    turns: int = Field(6, ge=1)
    concurrency: int = Field(8, ge=1)
    max_tokens: int = Field(24, ge=1)


def _label(block: Block, group: RecordGroup[Record]) -> str:
    return group.label or block.suite.title


def _by_turn(block: Block) -> Iterator[list[str]]:
    for group in block.groups:
        for turn in sorted({int(turn) for policy in group.policies for turn in group.values(policy, "turn")}):
            shares = (_share(group, policy, turn) for policy in block.suite.policies)
            yield [f"{_label(block, group)}, turn {turn + 1}", *shares]


def _share(group: RecordGroup[Record], policy: str, turn: int) -> str:
    at = group.values(policy, "turn") == turn
    prompt, cached = (group.values(policy, name)[at] for name in ("prompt_tokens", "cached_tokens"))
    if not prompt.sum():
        return "–"
    return f"{format_number(100 * cached.sum() / prompt.sum())} ({format_number((prompt - cached).mean(), 0)})"


def _within(row: Row) -> str:
    reported, guessed = (row.group.values(row.policy, name) for name in ("cached_tokens", "predicted_tokens"))
    return format_number(100 * float((abs(reported - guessed) <= row.group.block_size).mean()))


def _sum(row: Row, column: str) -> str:
    return format_number(row.group.values(row.policy, column).sum(), 0)


def _more(group: RecordGroup[Record], policy: str) -> str:
    """Of how many turns, those that compute a block or more on top of what appending computes."""
    if "append" not in group.policies:
        return "–"
    ours, theirs = (
        group.values(each, "prompt_tokens") - group.values(each, "cached_tokens") for each in (policy, "append")
    )
    if len(ours) != len(theirs):
        return "–"
    return f"{(ours >= theirs + group.block_size).sum():,} of {len(ours):,}"


class Turns(Chats):
    """Conversations under one policy, a row for each turn: `turn` counts from 0, `repeated` are documents named."""

    kind = "turns"
    cell = TurnCell
    policies: ClassVar[Any] = tuple(CHATS)
    longest_prompt = 16_384
    tables: ClassVar[Any] = (
        TableForm("By turn", lambda block: ["", *block.suite.policies], _NOTE, by=(), rows=_by_turn),
        TableForm(
            "Predicted",
            [
                Column("", lambda row: f"{_label(row.block, row.group)}: {row.policy}"),
                Column("within a block, %", _within),
                Column("documents named", lambda row: _sum(row, "repeated")),
                Column("turns that compute more than appended", lambda row: _more(row.group, row.policy)),
                Column("laid out again", lambda row: _sum(row, "rebased") if row.policy == "rebased" else "–"),
            ],
            _PREDICTED,
            by=(),
            policies=("turns", "rebased"),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: TurnCell = job.cell
        server, chats = self.begin(job, SYSTEM)
        tokenizer = load_tokenizer(str(self.model)) if self.model is not None else None
        for policy in job.policies:
            rows = asyncio.run(
                send_turns(server, chats, CHATS[policy], tokenizer, cell.max_tokens, cell.concurrency, advance)
            )
            yield self.line(policy, server, rows)
