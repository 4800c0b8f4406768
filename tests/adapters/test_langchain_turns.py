"""Conversations in LangChain: chains with a history, history-aware retrieval, nodes of LangGraph, marks."""

from __future__ import annotations

import importlib
import json
from operator import itemgetter
from threading import get_ident
from typing import Any

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("langchain_openai")
pytest.importorskip("starlette")

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from support.chat_server import BLOCK, ChatServer, chat_server
from support.conversation_contract import SYSTEM, TURNS, ConversationContract, FrameworkChat, text_of
from support.framework_contract import Recorder

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.langchain import CacheOrderRetriever, CacheOrderTransformer, CacheOrderTurn, content_parts
from ragorder.citations import number_label
from ragorder.clouds import CacheRules


def documents(names: str) -> list[Document]:
    return [Document(text_of(name), id=name, metadata={"source": name}) for name in names]


def model(server: ChatServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="served", max_retries=0, **options)


class ChainChat(FrameworkChat):
    """An application that keeps a list of messages."""

    def __init__(self, turn: CacheOrderTurn) -> None:
        self.turn = turn
        self.messages: list[Any] = []
        self.result: dict[str, Any] = {}

    def input(self, question: str, names: str) -> dict[str, Any]:
        return {"input": question, "chat_history": self.messages, "context": documents(names)}

    def store(self, result: dict[str, Any]) -> str:
        self.result = result
        self.messages = [*self.messages, *result["messages"]]
        assert result["messages"][-1] is result["answer"]
        return str(result["answer"].content)

    def ask(self, question: str, names: str) -> str:
        return self.store(self.turn.invoke(self.input(question, names)))

    async def aask(self, question: str, names: str) -> str:
        return self.store(await self.turn.ainvoke(self.input(question, names)))

    @property
    def sources(self) -> list[Any]:
        return list(self.result["sources"])

    def label(self, document: Any) -> str:
        return self.turn.label(document)

    def history(self) -> list[Any]:
        return list(self.messages)

    def cut(self, messages: int) -> None:
        self.messages = self.messages[-messages:]


class TestChains(ConversationContract):
    def chat(self, server: ChatServer, orderer: Any, builder: PromptBuilder, **options: Any) -> FrameworkChat:
        return ChainChat(CacheOrderTurn(model(server), orderer, builder=builder, **options))


@pytest.fixture
def server() -> Any:
    with chat_server() as server:
        yield server


async def test_in_a_node_of_langgraph_question_and_history_are_its_messages(server: ChatServer) -> None:
    """A graph with a checkpointer: each turn gives it a question only."""
    graph = pytest.importorskip("langgraph.graph")
    memory = importlib.import_module("langgraph.checkpoint.memory").InMemorySaver()

    class State(graph.MessagesState):  # type: ignore[name-defined, misc]
        context: list[Document]
        sources: list[Document]

    recorder = Recorder(Orderer(block_size=BLOCK, strict=True))
    nodes = graph.StateGraph(State)
    nodes.add_node("retrieve", lambda state: {"context": documents(state["messages"][-1].content.split("|")[1])})
    nodes.add_node("answer", CacheOrderTurn(model(server), recorder, builder=PromptBuilder(SYSTEM)))
    nodes.add_edge(graph.START, "retrieve").add_edge("retrieve", "answer").add_edge("answer", graph.END)
    app, config = nodes.compile(checkpointer=memory), {"configurable": {"thread_id": "one"}}
    for number, names in enumerate(TURNS):
        asked = {"messages": [HumanMessage(f"Question {number}?|{names}")]}
        state = await app.ainvoke(asked, config) if number % 2 else app.invoke(asked, config)
        assert state["messages"][-1].content == server.answers[-1]["content"]
    assert sorted(each.id for each in state["sources"]) == [*"abcd"]
    assert len(server.sent) == 6 and server.sent[0][0] == {"role": "system", "content": SYSTEM}
    server.check_replay()
    assert [outcome.cached_tokens for outcome in recorder.finished] == server.cached

    gone = [RemoveMessage(message.id) for message in state["messages"][:-2]]
    app.update_state(config, {"messages": gone}, as_node="answer")
    app.invoke({"messages": [HumanMessage("And?|b")]}, config)
    assert text_of("b") in server.sent[-1][-1]["content"], "what was cut off is sent again"


REPHRASE = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])


class TestHistoryAwareRetrieval:
    def chain(self, server: ChatServer, turn: CacheOrderTurn) -> Any:
        chains = pytest.importorskip("langchain_classic.chains")
        searched = RunnableLambda(lambda query: documents("ab" if query.startswith("One") else "bc"))
        aware = chains.create_history_aware_retriever(model(server), searched, REPHRASE)
        plain = RunnablePassthrough.assign(chat_history=lambda given: turn.questions(given["chat_history"]))
        return plain | aware

    def test_in_langchains_own_retrieval_chain_its_documents_follow_the_history(self, server: ChatServer) -> None:
        chains = pytest.importorskip("langchain_classic.chains")
        turn = CacheOrderTurn(model(server), Orderer(block_size=BLOCK, strict=True), builder=PromptBuilder(SYSTEM))
        chain = chains.create_retrieval_chain(self.chain(server, turn), turn)
        history: list[Any] = []
        for question in ("One?", "And two?", "And three?"):
            result = chain.invoke({"input": question, "chat_history": history})["answer"]
            assert result["answer"].content == server.answers[-1]["content"]
            history += result["messages"]
        assert [each.id for each in result["sources"]] == ["b", "c"]
        rephrased = server.sent[1::2]
        server.forget(lambda body: body["messages"] in rephrased)
        server.check_replay()
        assert [each["content"] for each in server.sent[-1] if each["role"] == "system"] == [SYSTEM]
        # What rephrases the question sees no documents.
        assert all("The text of" not in json.dumps(messages) for messages in rephrased)
        assert rephrased[0][0]["content"] == "One?"


class TestStreams:
    async def test_a_stream_ends_with_what_is_to_be_stored(self, server: ChatServer) -> None:
        recorder = Recorder(Orderer(block_size=BLOCK, strict=True))
        turn = CacheOrderTurn(model(server, stream_usage=True), recorder, builder=PromptBuilder(SYSTEM))
        history: list[Any] = []
        for number, names in enumerate(TURNS[:4]):
            given = {"input": f"{number}?", "chat_history": history, "context": documents(names)}
            chunks = [chunk async for chunk in turn.astream(given)] if number % 2 else list(turn.stream(given))
            text = "".join(chunk["answer"].content for chunk in chunks[:-1])
            assert len(chunks) > 4 and text == server.answers[-1]["content"]
            assert type(chunks[-1]["messages"][-1]) is AIMessage
            history += chunks[-1]["messages"]
        server.check_replay()
        assert [outcome.cached_tokens for outcome in recorder.finished] == server.cached

    def test_a_stream_that_is_left_counts_as_served_once_it_has_begun(self, server: ChatServer) -> None:
        recorder = Recorder(Orderer(block_size=BLOCK, strict=True))
        turn = CacheOrderTurn(model(server), recorder, builder=PromptBuilder(SYSTEM))
        for chunks, served in ((0, False), (4, True)):
            stream = turn.stream({"input": "One?", "context": documents("ab")})
            for _ in range(chunks):
                next(stream)
            stream.close()
            assert [outcome.served for outcome in recorder.finished] == [True] * served

    def test_in_a_chain(self, server: ChatServer) -> None:
        turn = CacheOrderTurn(model(server), Orderer(block_size=BLOCK, strict=True))
        chain = RunnablePassthrough.assign(context=itemgetter("names") | RunnableLambda(documents)) | turn
        chunks = list(chain.stream({"input": "One?", "names": "ab"}))
        assert "".join(chunk["answer"].content for chunk in chunks[:-1]) == server.answers[-1]["content"]


class Listening:
    """A model that keeps what it was sent last."""

    def __init__(self, usage: Any = None) -> None:
        self.usage = usage
        self.sent: list[Any] = []
        self.given: dict[str, Any] = {}
        self.runnable = RunnableLambda(self.answer)

    def answer(self, messages: list[Any], **arguments: Any) -> AIMessage:
        self.sent, self.given = list(messages), arguments
        return AIMessage("So it is.", usage_metadata=self.usage)


class TestHistories:
    def test_what_is_no_turn_of_ours_is_passed_on_as_it_is(self) -> None:
        """Unknown roles, content parts, calls without results, what cannot be sent as JSON."""

        class Opaque:
            pass

        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        call = {"name": "search", "args": {"query": "x"}, "id": "call1", "type": "tool_call"}
        history = [
            SystemMessage("Another system prompt."),
            HumanMessage([{"type": "text", "text": "See?"}, image]),
            AIMessage("", tool_calls=[call]),
            ChatMessage("Thinking.", role="critic"),
            ToolMessage("found", tool_call_id="call1", artifact=Opaque()),
            HumanMessage("", additional_kwargs={"odd": Opaque()}),
        ]
        orderer, model = Orderer(block_size=BLOCK, strict=True), Listening()
        turn = CacheOrderTurn(model.runnable, orderer, builder=PromptBuilder(SYSTEM))
        result = turn.invoke({"input": "One?", "chat_history": history, "context": documents("a")})
        assert all(one is other for one, other in zip(model.sent, history, strict=False))
        assert len(model.sent) == len(history) + 1 == len(history) + len(result["messages"]) - 1
        assert any("another system prompt" in reason for reason in orderer.degraded)

    def test_a_question_with_an_image_keeps_it(self) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        model = Listening()
        question = HumanMessage([{"type": "text", "text": "What is it?"}, image], id="q")
        result = CacheOrderTurn(model.runnable, Orderer()).invoke({"messages": [question], "context": documents("a")})
        text, other = model.sent[-1].content
        assert text_of("a") in text["text"] and text["text"].endswith("What is it?") and other == image
        assert [each.id for each in result["messages"][:-1]] == ["q"]

    def test_wrong_options_are_refused_at_once(self) -> None:
        with pytest.raises(TypeError, match="chat model"):
            CacheOrderTurn("gpt-5", Orderer())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="marks is 'gemini'"):
            CacheOrderTurn(Listening().runnable, Orderer(), marks="gemini")  # type: ignore[arg-type]

    def test_an_answer_of_langchains_own_cache_was_not_served(self) -> None:
        recorder = Recorder(Orderer(block_size=BLOCK, strict=True))
        cached = AIMessage("Yes.", usage_metadata={"input_tokens": 1, "output_tokens": 1, "total_tokens": 2})
        cached.usage_metadata["total_cost"] = 0  # type: ignore[index, typeddict-unknown-key]
        CacheOrderTurn(RunnableLambda(lambda _: cached), recorder).invoke({"input": "?", "context": documents("a")})
        assert [outcome.served for outcome in recorder.finished] == [False]


class TestMarks:
    """The content parts of a cloud."""

    RULES = CacheRules(
        "mine", minimum_tokens=16, marks=3, lookback_parts=20, ttl_s=3600, ttl="1h", write=1.25, read=0.1
    )

    @pytest.mark.parametrize("form", [True, "openai", "bedrock"])
    def test_marks_are_those_of_the_orderer_in_the_form_of_the_model(self, form: Any) -> None:
        builder = PromptBuilder(SYSTEM)
        orderer = Orderer.for_rules(self.RULES, model="mine", builder=builder, clock=lambda: 0.0)
        details = {"cache_read": 0, "cache_creation": 0, "ephemeral_1h_input_tokens": 0}
        model = Listening(
            {"input_tokens": 500, "output_tokens": 5, "total_tokens": 505, "input_token_details": details}
        )
        turn = CacheOrderTurn(model.runnable, orderer, builder=builder, marks=form)
        texts = [f"[{number_label(text_of(name))}]\n{text_of(name)}\n\n" for name in "abc"]
        plain = [{"type": "text", "text": text} for text in (*texts, "Question: One?")]
        for _ in range(6):
            result = turn.invoke({"input": "One?", "context": documents("abc")})
            assert result["messages"][0].content == plain, "without marks"
        sent = model.sent[-1].content
        assert [{"type": "text", "text": part["text"]} for part in sent if "text" in part] == plain
        places = [place for place, part in enumerate(sent) if part not in plain]
        assert places and len(places) <= 3
        marked = [sent[place] for place in places]
        if form == "bedrock":
            assert places[0] > 0
            assert all(part == {"cachePoint": {"type": "default", "ttl": "1h"}} for part in marked)
        elif form == "openai":
            assert all(part["prompt_cache_breakpoint"] == {"mode": "explicit"} for part in marked)
        else:
            assert {"type": "ephemeral", "ttl": "1h"} in [part["cache_control"] for part in marked]
        options = {"prompt_cache_options": {"mode": "explicit", "ttl": "1h"}} if form == "openai" else {}
        assert model.given == options
        # A later turn replays the parts, without their marks.
        turn.invoke({"input": "Two?", "chat_history": result["messages"], "context": documents("d")})
        assert [part["text"] for part in model.sent[1].content if "text" in part] == [part["text"] for part in plain]
        assert result["messages"][0].content == plain

    def test_without_them_content_is_a_text(self) -> None:
        orderer = Orderer.for_rules(self.RULES, model="mine")
        turn = CacheOrderTurn(Listening().runnable, orderer)
        assert isinstance(turn.invoke({"input": "?", "context": documents("ab")})["messages"][0].content, str)
        (reason,) = orderer.degraded
        assert "marks=" in reason
        turn.invoke({"input": "?", "context": documents("ab")})
        assert len(orderer.degraded) == 1


def found(names: str) -> list[Document]:
    return [Document(f"{name} is a document. " * 40, id=name, metadata={"source": name}) for name in names]


class TestContentParts:
    """Messages with a content part for each document, and marks after those that a cache should keep."""

    @pytest.fixture
    def orderer(self) -> Orderer:
        return Orderer(block_size=16, strict=True, feedback=False)

    def beginnings(self, parts: list[dict[str, Any]]) -> str:
        return "".join(part["text"][0] for part in parts)

    def marked(self, parts: list[dict[str, Any]]) -> list[int]:
        return [place for place, part in enumerate(parts) if part.get("cache_control") == {"type": "ephemeral"}]

    def test_a_part_for_each_document_and_the_question(self) -> None:
        parts = content_parts(found("ab"), "Which?")
        assert [part["text"] for part in parts] == [*(f"{each.page_content}\n\n" for each in found("ab")), "Which?"]
        assert {part["type"] for part in parts} == {"text"}
        assert self.marked(parts) == []
        assert HumanMessage(parts).content == parts

    def test_marks_follow_what_earlier_requests_began_with(self, orderer: Orderer) -> None:
        asked = {"one": found("abc"), "two": found("dba")}
        retriever = CacheOrderRetriever(retriever=RunnableLambda(asked.__getitem__), orderer=orderer, mark_key="mark")
        first, second = (content_parts(retriever.invoke(name), "Which?", mark_key="mark") for name in asked)
        assert (self.beginnings(first), self.beginnings(second)) == ("abcW", "abdW")
        assert self.marked(first) == []
        assert self.marked(second) == [1]

    def test_documents_themselves_stay_as_they_are(self, orderer: Orderer) -> None:
        documents = found("abc")
        reorder = CacheOrderTransformer(orderer, mark_key="mark", rank_key="rank")
        for _ in range(2):
            ordered = reorder.invoke(documents)
        assert [each.metadata for each in documents] == [{"source": name} for name in "abc"]
        assert [each.metadata["rank"] for each in ordered] == [{"rank": rank} for rank in range(3)]
        assert any(each.metadata.get("mark") for each in ordered)

    def test_marks_of_an_earlier_request_are_gone(self, orderer: Orderer) -> None:
        marked = [Document(each.page_content, id=each.id, metadata={"mark": True}) for each in found("abcdef")]
        ordered = CacheOrderTransformer(orderer, mark_key="mark").invoke(marked)
        assert [each.metadata for each in ordered] == [{}] * 6
        assert all(each.metadata == {"mark": True} for each in marked)

    def test_a_choice_that_fails_sets_none_and_says_so(self, orderer: Orderer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.adapters.langchain.retriever.marked_documents", lambda ordering: 1 / 0)
        ordered = CacheOrderTransformer(orderer, mark_key="mark").invoke(found("ab"))
        assert [each.id for each in ordered] == ["a", "b"]
        assert "ZeroDivisionError" in orderer.degraded[0]

    def test_the_form_of_a_document_can_be_given(self) -> None:
        parts = content_parts(found("a"), "Which?", show=lambda document: f"<{document.id}>")
        assert [part["text"] for part in parts] == ["<a>", "Which?"]


@pytest.mark.parametrize(("length", "elsewhere"), [(100, False), (20_000, True)])
async def test_long_texts_are_read_off_the_event_loop(length: int, elsewhere: bool) -> None:
    threads: set[int] = set()

    def label(document: Document) -> str:
        threads.add(get_ident())
        return "a"

    turn = CacheOrderTurn(Listening().runnable, Orderer(strict=True), label=label)
    await turn.ainvoke({"input": "One?", "context": [Document("x" * length)]})
    assert (get_ident() not in threads) == elsewhere and len(threads) == 1
