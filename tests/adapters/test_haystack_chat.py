"""Conversations in Haystack's pipelines."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("haystack")
pytest.importorskip("starlette")

from haystack import Document, Pipeline
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent, ToolCall
from haystack.utils import Secret
from support.chat_server import BLOCK, ChatServer
from support.conversation_contract import SYSTEM, ConversationContract, FrameworkChat, text_of

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.haystack import CacheOrderChatPromptBuilder, CacheOrderFeedback


def documents(names: str) -> list[Document]:
    return [Document(id=name, content=text_of(name)) for name in names]


def source(document: Document) -> str:
    return f"source {document.id}"


class PipelineChat(FrameworkChat):
    """An application that keeps the messages that its pipeline sends and gets."""

    def __init__(self, server: ChatServer, made: CacheOrderChatPromptBuilder) -> None:
        self.made = made
        self.pipeline = Pipeline()
        self.pipeline.add_component("prompt", made)
        key = Secret.from_token("none")
        llm = OpenAIChatGenerator(api_key=key, api_base_url=f"{server.url}/v1", model="served", max_retries=0)
        self.pipeline.add_component("llm", llm)
        self.pipeline.connect("prompt.prompt", "llm.messages")
        if made.feedback:
            self.pipeline.add_component("feedback", CacheOrderFeedback())
            self.pipeline.connect("llm.replies", "feedback.replies")
            self.pipeline.connect("prompt.turn", "feedback.turn")
        self.messages: list[ChatMessage] = []
        self.found: list[Document] = []

    def input(self, question: str, names: str) -> dict[str, Any]:
        return {"prompt": {"question": question, "documents": documents(names), "history": self.messages}}

    def store(self, done: dict[str, Any]) -> str:
        replies = done["feedback" if self.made.feedback else "llm"]["replies"]
        self.messages = done["feedback"]["history"] if self.made.feedback else [*done["prompt"]["prompt"], *replies]
        self.found = done["prompt"]["documents"]
        return str(replies[0].text)

    def ask(self, question: str, names: str) -> str:
        return self.store(self.pipeline.run(self.input(question, names), include_outputs_from={"prompt"}))

    async def aask(self, question: str, names: str) -> str:
        return self.store(await self.pipeline.run_async(self.input(question, names), include_outputs_from={"prompt"}))

    @property
    def sources(self) -> list[Any]:
        return self.found

    def label(self, document: Any) -> str:
        return self.made.label(document)

    def history(self) -> list[Any]:
        return self.messages

    def cut(self, messages: int) -> None:
        self.messages = self.messages[-messages:]


class TestFeedback(ConversationContract):
    # A component's scope is a string.
    functions = ("label",)

    def chat(self, server: ChatServer, orderer: Any, builder: PromptBuilder, **options: Any) -> FrameworkChat:
        made = CacheOrderChatPromptBuilder(orderer, builder=builder, feedback=self.reports, **options)
        return PipelineChat(server, made)


class TestWithoutFeedback(TestFeedback):
    reports = False


def test_a_pipeline_is_loaded_with_the_same_options() -> None:
    made = CacheOrderChatPromptBuilder(
        Orderer(block_size=8), builder=PromptBuilder(SYSTEM), label=source, repeat="send", scope="tenant", feedback=True
    )
    pipeline = Pipeline()
    pipeline.add_component("prompt", made)
    pipeline.add_component("feedback", CacheOrderFeedback())
    pipeline.connect("prompt.turn", "feedback.turn")
    loaded = Pipeline.loads(pipeline.dumps(), allowed_modules=["ragorder", "test_haystack_chat", "tests"])
    again = loaded.get_component("prompt")
    assert again.to_dict() == made.to_dict()
    assert again.orderer.settings == made.orderer.settings
    prompt = again.run("One?", documents("a"))["prompt"]
    assert [each.text for each in prompt] == [SYSTEM, f"[source a]\n{text_of('a')}\n\nQuestion: One?"]


def test_two_answers_to_one_option_are_refused() -> None:
    with pytest.raises(ValueError, match="either an orderer or settings"):
        CacheOrderChatPromptBuilder(Orderer(), settings={})
    with pytest.raises(ValueError, match="either a builder or prompt"):
        CacheOrderChatPromptBuilder(builder=PromptBuilder(), prompt={})


def test_what_is_no_turn_of_ours_is_passed_on_as_it_is() -> None:
    call = ToolCall("search", {"query": "x"}, id="call1")
    image = ImageContent(base64_image="aGVsbG8=", mime_type="image/png", validation=False)
    history = [
        ChatMessage.from_system("Another system prompt."),
        ChatMessage.from_user(content_parts=["See?", image]),
        ChatMessage.from_assistant(tool_calls=[call]),
        ChatMessage.from_tool("found", origin=call),
        ChatMessage.from_tool("found twice", origin=call),
    ]
    orderer = Orderer(block_size=BLOCK, strict=True)
    made = CacheOrderChatPromptBuilder(orderer, builder=PromptBuilder(SYSTEM))
    prompt = made.run("One?", documents("a"), history)["prompt"]
    assert all(one is other for one, other in zip(prompt, history, strict=False)) and len(prompt) == 6
    assert any("another system prompt" in reason for reason in orderer.degraded)
