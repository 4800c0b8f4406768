"""Conversations in LlamaIndex: a chat engine and its memories."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llama_index.core")
pytest.importorskip("llama_index.llms.openai_like")
pytest.importorskip("starlette")

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike
from support.chat_server import BLOCK, ChatServer, chat_server
from support.conversation_contract import SYSTEM, TURNS, ConversationContract, FrameworkChat, text_of
from support.framework_contract import Recorder

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.llama_index import CacheOrderChatEngine


class Finder(BaseRetriever):
    """Finds the nodes that it is told to, and remembers the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.names = ""
        self.asked: list[str] = []

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.asked.append(query_bundle.query_str)
        return [NodeWithScore(node=TextNode(text=text_of(name), id_=name), score=1.0) for name in self.names]


def llm(server: ChatServer) -> OpenAILike:
    usage = {"stream_options": {"include_usage": True}}
    return OpenAILike(
        model="served",
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=True,
        context_window=32_000,
        max_retries=0,
        additional_kwargs=usage,
    )


class EngineChat(FrameworkChat):
    def __init__(self, server: ChatServer, orderer: Any, **options: Any) -> None:
        self.finder = Finder()
        self.engine = CacheOrderChatEngine(self.finder, orderer, llm=options.pop("llm", None) or llm(server), **options)
        self.response: Any = None
        self.kept: list[ChatMessage] | None = None

    def ask(self, question: str, names: str) -> str:
        self.finder.names = names
        self.response = self.engine.chat(question, self.kept)
        self.kept = None
        return str(self.response)

    async def aask(self, question: str, names: str) -> str:
        self.finder.names = names
        self.response = await self.engine.achat(question)
        return str(self.response)

    @property
    def sources(self) -> list[Any]:
        return list(self.response.source_nodes)

    def label(self, document: Any) -> str:
        return self.engine.label(document)

    def history(self) -> list[Any]:
        return self.engine.chat_history

    def cut(self, messages: int) -> None:
        self.kept = self.engine.chat_history[-messages:]


class TestMemory(ConversationContract):
    """LlamaIndex's default memory."""

    def chat(self, server: ChatServer, orderer: Any, builder: PromptBuilder, **options: Any) -> FrameworkChat:
        return EngineChat(server, orderer, builder=builder, **options)


@pytest.mark.slow
class TestChatMemoryBuffer(ConversationContract):
    def chat(self, server: ChatServer, orderer: Any, builder: PromptBuilder, **options: Any) -> FrameworkChat:
        memory = ChatMemoryBuffer.from_defaults(token_limit=32_000, tokenizer_fn=str.split)
        return EngineChat(server, orderer, builder=builder, memory=memory, **options)


@pytest.fixture
def server() -> Any:
    with chat_server() as server:
        yield server


async def test_streams_are_turns_once_they_have_been_read(server: ChatServer) -> None:
    recorder = Recorder(Orderer(block_size=BLOCK, strict=True))
    chat = EngineChat(server, recorder, builder=PromptBuilder(SYSTEM))
    for number, names in enumerate(TURNS[:4]):
        chat.finder.names = names
        if number % 2:
            streamed = await chat.engine.astream_chat(f"{number}?")
            text = "".join([token async for token in streamed.async_response_gen()])
        else:
            streamed = chat.engine.stream_chat(f"{number}?")
            assert len(chat.history()) == 2 * number
            text = "".join(streamed.response_gen)
        assert text == server.answers[-1]["content"]
        assert sorted(each.node_id for each in streamed.source_nodes) == sorted(names)
        assert len(chat.history()) == 2 * number + 2
    server.check_replay()
    assert [outcome.cached_tokens for outcome in recorder.finished] == server.cached


def test_a_stream_that_is_left_is_no_turn(server: ChatServer) -> None:
    recorder = Recorder(Orderer(block_size=BLOCK, strict=True))
    chat = EngineChat(server, recorder, builder=PromptBuilder(SYSTEM))
    for tokens, served in ((0, False), (3, True)):
        chat.finder.names = "ab"
        streamed = chat.engine.stream_chat("One?")
        stream = streamed.response_gen
        for _ in range(tokens):
            next(stream)
        stream.close()
        streamed.chat_stream.close()
        del streamed, stream
        assert recorder.finished[-1].served == served
    assert chat.history() == []


def test_condensing_sees_questions_without_their_documents(server: ChatServer) -> None:
    chat = EngineChat(server, Orderer(block_size=BLOCK, strict=True), builder=PromptBuilder(SYSTEM), condense=True)
    chat.ask("One?", "ab")
    chat.ask("Two?", "bc")
    condensing = server.sent[1][-1]["content"]
    assert "user: One?" in condensing and "Two?" in condensing and "The text of" not in condensing
    assert chat.finder.asked == ["One?", server.answers[1]["content"]]
    assert server.sent[2][:2] == server.sent[0]
    assert server.sent[2][-1]["content"].endswith("Question: Two?")


def test_what_is_no_turn_of_ours_is_passed_on_as_it_is(server: ChatServer) -> None:
    given = [
        ChatMessage(role=MessageRole.USER, content="Hello", additional_kwargs={"odd": object()}),
        ChatMessage(role=MessageRole.CHATBOT, content="Hm."),
        ChatMessage(role=MessageRole.TOOL, content="found", additional_kwargs={"tool_call_id": "x"}),
    ]

    class Echo(OpenAILike):
        def chat(self, messages: Any, **_: Any) -> Any:
            sent.extend(messages)
            return type("Answer", (), {"message": ChatMessage(role="assistant", content="Yes."), "raw": None})()

    sent: list[ChatMessage] = []
    memory = ChatMemoryBuffer.from_defaults(token_limit=32_000, tokenizer_fn=str.split, chat_history=list(given))
    echo = Echo(model="served", is_chat_model=True, context_window=32_000)
    chat = EngineChat(server, Orderer(strict=True), builder=PromptBuilder(SYSTEM), llm=echo, memory=memory)
    assert chat.ask("One?", "a") == "Yes."
    assert sent[1:4] == given and len(sent) == 5


def test_a_condense_prompt_names_what_it_must_have() -> None:
    with pytest.raises(ValueError, match="chat_history"):
        CacheOrderChatEngine(Finder(), Orderer(), llm=OpenAILike(model="x"), condense=True, condense_prompt="{history}")
