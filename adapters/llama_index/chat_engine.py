"""Chat engine with retrieved nodes after the history."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.generic_utils import messages_to_history_str
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONDENSE_PROMPT_TEMPLATE
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.tools import ToolOutput

from ragorder.adapters.llama_index.retriever import node_text
from ragorder.adapters.reorder import ScopeOf
from ragorder.adapters.turns import FrameworkTurns, Label, NextTurn, off_loop, plain_message
from ragorder.adapters.usage import member, read_usage
from ragorder.conversation import REFERENCE, Repeat
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike


@dataclass(slots=True, eq=False)
class _Asked:
    turn: NextTurn[NodeWithScore]
    messages: list[ChatMessage]
    sources: list[ToolOutput]

    @property
    def shown(self) -> dict[str, Any]:
        return {"sources": self.sources, "source_nodes": self.turn.sources}


class CacheOrderChatEngine(BaseChatEngine):
    """Chat engine with nodes after the history, instead of `ContextChatEngine`, or with `condense` of
    `CondensePlusContextChatEngine`. It serves one conversation.

        engine = CacheOrderChatEngine(index.as_retriever(), orderer, builder=PromptBuilder("Answer briefly."))
        response = engine.chat("When are orders shipped?")
        sources = cited(response.response, response.source_nodes, engine.label)

    The memory stores each answered question with its nodes, as sent; a failed turn does not change it. `source_nodes`
    are the sent nodes, in prompt order, then those only named.

    - `llm`: a chat model; it needs no `FeedbackHandler`.
    - `memory`: each truncation of the history costs its reuse.
    - `builder`: has the system prompt.
    - `condense`: search by a question that the model rephrases from the history, by `condense_prompt`.
    - `node_postprocessors`: rerankers and filters, without `CacheOrderPostprocessor`.
    - `repeat`, `reference`: as for `PromptBuilder.turn`.
    - `label`: cites and names a NodeWithScore (default: `number_label` of its text).
    - `scope`: the tenant, or a function of the QueryBundle.

    Errors in `label` and `scope` are counted and leave retrieval order. Raises ValueError.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        orderer: OrdererLike,
        *,
        llm: LLM | None = None,
        memory: BaseMemory | None = None,
        builder: PromptBuilder | None = None,
        condense: bool = False,
        condense_prompt: str = DEFAULT_CONDENSE_PROMPT_TEMPLATE,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        repeat: Repeat = "name",
        reference: str = REFERENCE,
        label: Label | None = None,
        scope: ScopeOf = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._retriever = retriever
        self._llm: LLM = llm or Settings.llm
        self._memory = memory or _default_memory(self._llm)
        self._condense = condense
        self._condense_prompt = condense_prompt
        if not all(f"{{{name}}}" in condense_prompt for name in ("chat_history", "question")):
            raise ValueError(f"condense_prompt is {condense_prompt!r}: give one with {{chat_history}} and {{question}}")
        self._node_postprocessors = list(node_postprocessors)
        self.callback_manager = callback_manager or Settings.callback_manager
        self._turns: FrameworkTurns[ChatMessage, NodeWithScore] = FrameworkTurns(
            orderer,
            builder,
            read=_read,
            text=node_text,
            metadata=attrgetter("metadata"),
            label=label,
            scope=scope,
            repeat=repeat,
            reference=reference,
        )

    def label(self, node: NodeWithScore) -> str:
        """Return a node's label, as `cited` calls it."""
        return self._turns.label(node)

    @trace_method("chat")
    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        asked = self._ask(message, chat_history)
        with asked.turn.asking():
            answer = self._llm.chat(asked.messages)
        self._store(asked, answer)
        return AgentChatResponse(response=str(answer.message.content or ""), **asked.shown)

    @trace_method("chat")
    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        asked = await self._aask(message, chat_history)
        with asked.turn.asking():
            answer = await self._llm.achat(asked.messages)
        await self._astore(asked, answer)
        return AgentChatResponse(response=str(answer.message.content or ""), **asked.shown)

    @trace_method("chat")
    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> StreamingAgentChatResponse:
        """Stream the answer, which is a turn once it is read to its end."""
        asked = self._ask(message, chat_history)

        def chunks() -> Generator[ChatResponse, None, None]:
            answer: ChatResponse | None = None
            with asked.turn.asking():
                for answer in self._llm.stream_chat(asked.messages):
                    if answer.delta:
                        asked.turn.begin()
                    yield answer
            if answer is not None:
                self._store(asked, answer)

        return StreamingAgentChatResponse(chat_stream=chunks(), is_writing_to_memory=False, **asked.shown)

    @trace_method("chat")
    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        asked = await self._aask(message, chat_history)

        async def chunks() -> AsyncGenerator[ChatResponse, None]:
            answer: ChatResponse | None = None
            with asked.turn.asking():
                async for answer in await self._llm.astream_chat(asked.messages):
                    if answer.delta:
                        asked.turn.begin()
                    yield answer
            if answer is not None:
                await self._astore(asked, answer)

        return StreamingAgentChatResponse(achat_stream=chunks(), is_writing_to_memory=False, **asked.shown)

    def reset(self) -> None:
        self._memory.reset()

    @property
    def chat_history(self) -> list[ChatMessage]:
        return self._memory.get_all()

    def _ask(self, message: str, chat_history: list[ChatMessage] | None) -> _Asked:
        if chat_history is not None:
            self._memory.set(chat_history)
        history = self._memory.get(input=message)
        asked = self._condensing(message, history)
        query = QueryBundle(message if asked is None else str(self._llm.complete(asked)))
        nodes = self._retriever.retrieve(query)
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query)
        return self._next(message, query, nodes, history)

    async def _aask(self, message: str, chat_history: list[ChatMessage] | None) -> _Asked:
        if chat_history is not None:
            await self._memory.aset(chat_history)
        history = await self._memory.aget(input=message)
        asked = self._condensing(message, history)
        query = QueryBundle(message if asked is None else str(await self._llm.acomplete(asked)))
        nodes = await self._retriever.aretrieve(query)
        for postprocessor in self._node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query)
        texts = [message, *(each.content for each in history), *(getattr(each.node, "text", "") for each in nodes)]
        return await off_loop(partial(self._next, message, query, nodes, history), texts)

    def _condensing(self, message: str, history: Sequence[ChatMessage]) -> str | None:
        if not self._condense or not history:
            return None
        users = MessageRole.USER
        asked = [
            ChatMessage(role=users, content=self._turns.question_in(each.content or "")) if each.role == users else each
            for each in history
        ]
        return self._condense_prompt.format(chat_history=messages_to_history_str(asked), question=message)

    def _next(
        self, message: str, query: QueryBundle, nodes: list[NodeWithScore], history: Sequence[ChatMessage]
    ) -> _Asked:
        before = list(history)
        if text := self._turns.system:
            system = ChatMessage(role=self._llm.metadata.system_role, content=text)
            if not history or (history[0].role, history[0].content) != (system.role, text):
                before.insert(0, system)
        turn = self._turns.next(message, nodes, before, query)
        found = ToolOutput(
            tool_name="retriever", content=str(nodes), raw_input={"message": query.query_str}, raw_output=nodes
        )
        return _Asked(turn, [*before, ChatMessage(role=MessageRole.USER, content=turn.text)], [found])

    def _store(self, asked: _Asked, answer: ChatResponse) -> None:
        for each in (asked.messages[-1], answer.message):
            self._memory.put(each)
        self._confirm(asked, answer)

    async def _astore(self, asked: _Asked, answer: ChatResponse) -> None:
        for each in (asked.messages[-1], answer.message):
            await self._memory.aput(each)
        self._confirm(asked, answer)

    def _confirm(self, asked: _Asked, answer: ChatResponse) -> None:
        usage = read_usage(member(answer.raw, "usage"))
        self._turns.confirm(asked.turn, asked.messages[-1], answer.message, usage)


def _default_memory(llm: LLM) -> BaseMemory:
    limit = llm.metadata.context_window - 256
    try:
        from llama_index.core.memory import Memory
    except ImportError:
        return ChatMemoryBuffer.from_defaults(token_limit=limit)
    return Memory.from_defaults(token_limit=limit)


def _read(message: ChatMessage) -> dict[str, Any]:
    content: Any = message.content or ""
    # The first versions have no blocks.
    others = [block for block in getattr(message, "blocks", ()) if block.block_type != "text"]
    if others:
        content = [{"type": "text", "text": content}, *others]
    known = message.additional_kwargs
    return plain_message(
        getattr(message.role, "value", message.role),
        content,
        tool_calls=known.get("tool_calls"),
        tool_call_id=known.get("tool_call_id"),
    )
