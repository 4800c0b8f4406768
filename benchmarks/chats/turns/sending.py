"""Ways to send a conversation whose turns each have documents."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ragorder import Document, Orderer, PromptBuilder, Turn
from ragorder.benchmarks.chats.conversations.layouts import TEMPLATE, ChatTurn

if TYPE_CHECKING:
    from ragorder.benchmarks.chats.conversations.server import SimulatedServer
    from ragorder.eval.engines.server import VLLMServer

    ChatServer = VLLMServer | SimulatedServer

__all__ = ["CHATS", "SYSTEM", "Chat", "send_turns"]

_COLUMNS = ("turn", "prompt_tokens", "cached_tokens", "predicted_tokens", "repeated", "rebased")

SYSTEM = "Answer the question from the documents."

Message = dict[str, Any]
Rows = dict[str, list[int | None]]


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

    @abstractmethod
    def answered(self, text: str, usage: dict[str, Any]) -> None: ...

    def failed(self) -> None:  # noqa: B027
        """The request of the last question failed."""


class SystemChat(Chat):
    """Documents in the system message, in place of those of the turn before; the history has questions and answers."""

    def ask(self, question: str, documents: Sequence[Document]) -> list[Message]:
        shown = "".join(map(self.builder.document_text, documents))
        self.messages.append({"role": "user", "content": f"Question: {question}"})
        return [{"role": "system", "content": f"{SYSTEM}\n\n{shown}"}, *self.messages]

    def answered(self, text: str, usage: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": text})


class AppendingChat(Chat):
    """Each turn's documents in its own message as retrieved; the history is replayed."""

    def ask(self, question: str, documents: Sequence[Document]) -> list[Message]:
        content = self.builder.user_message(question, documents, range(len(documents)))
        self.messages.append({"role": "user", "content": content})
        return [{"role": "system", "content": SYSTEM}, *self.messages]

    def answered(self, text: str, usage: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": text})


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
    """All turns of the conversations, so many conversations at a time, to an empty server; returns the columns of a
    run, turn by turn."""
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
    waiting = iter(enumerate(chats))

    async def serve(http: Any) -> None:
        for place, turns in waiting:
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
                # A simulated server answers at once: conversations take turns all the same.
                await asyncio.sleep(0)

    options: dict[str, Any] = {"timeout": 600, "trust_env": False, "transport": transport}
    async with httpx2.AsyncClient(base_url=server.base_url, **options) as http, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(serve(http))
    # Runs are compared row by row.
    columns = zip(*(figures[key] for key in sorted(figures)), strict=True)
    return {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}


def _cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
