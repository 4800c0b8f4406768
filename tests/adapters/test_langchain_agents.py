"""Agents of LangChain whose tools find documents: what was sent is replayed from the checkpointer, and a document that
is in it already is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain.agents.middleware")
pytest.importorskip("langchain_openai")
pytest.importorskip("starlette")

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from support.chat_server import BLOCK, ChatServer, chat_server
from support.conversation_contract import SYSTEM, text_of
from support.framework_contract import Recorder, broken

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.langchain.conversation import artifact_documents
from ragorder.adapters.langchain.middleware import CacheOrderMiddleware
from ragorder.citations import number_label
from ragorder.clouds import CacheRules

CONFIG: Any = {"configurable": {"thread_id": "one"}}


def finding(query: str) -> tuple[str, list[Document]]:
    """The documents whose names follow the bar."""
    found = [Document(text_of(name), id=name) for name in query.rpartition("|")[2]]
    return "\n\n".join(each.page_content for each in found), found


def reporting(query: str) -> tuple[str, list[Document]]:
    text, found = finding(query)
    return f"Warehouse report, {len(found)} found:\n{text}", found


def excerpting(query: str) -> tuple[str, list[Document]]:
    text, found = reporting(query)
    return text[:-3], found


def tool_of(function: Any) -> Any:
    return tool("search", function, description="Search.", response_format="content_and_artifact")


search = tool_of(finding)
RETRIEVER = RunnableLambda(lambda question: finding(question)[1])


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(Orderer(block_size=BLOCK, strict=True))


def make_agent(
    server: ChatServer,
    orderer: Any = None,
    *others: AgentMiddleware,
    tools: Any = (search,),
    checkpointer: Any = True,
    **options: Any,
) -> Any:
    model = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="served", max_retries=0)
    orderer = orderer or Orderer(block_size=BLOCK, strict=True)
    ours = CacheOrderMiddleware(orderer, builder=PromptBuilder(SYSTEM), **options)
    keeping = InMemorySaver() if checkpointer else None
    return create_agent(model, list(tools), system_prompt=SYSTEM, middleware=[*others, ours], checkpointer=keeping)


def ask(agent: Any, question: str) -> list[Any]:
    return list(agent.invoke({"messages": [HumanMessage(question)]}, CONFIG)["messages"])


async def aask(agent: Any, question: str) -> list[Any]:
    return list((await agent.ainvoke({"messages": [HumanMessage(question)]}, CONFIG))["messages"])


def results(server: ChatServer) -> list[str]:
    return [each["content"] for each in server.sent[-1] if each["role"] == "tool"]


def is_named(name: str) -> str:
    return f"[{number_label(text_of(name))}] is above.\n"


@pytest.mark.parametrize("repeat", ["send", "name"])
def test_each_call_extends_what_was_sent(server: ChatServer, recorder: Recorder, repeat: Any) -> None:
    agent = make_agent(server, recorder, repeat=repeat)
    for number, names in enumerate(("ab", "bc", "cab")):
        ask(agent, f"Question {number}|{names}")
    assert len(server.sent) == 6 and server.sent[0][0]["content"] == SYSTEM
    server.check_replay()
    assert [outcome.cached_tokens for outcome in recorder.finished] == server.cached
    assert recorder.degraded == []


async def test_a_document_that_was_sent_before_is_named_if_asked_for(server: ChatServer) -> None:
    agent = make_agent(server, repeat="name")
    ask(agent, "One|ab")
    messages = await aask(agent, "Two|bc")
    first, second = results(server)
    assert text_of("a") in first and text_of("b") in first
    assert second.startswith(f"[{number_label(text_of('c'))}]\n{text_of('c')}") and second.endswith(is_named("b"))
    assert text_of("b") not in second
    # So it is in the state, with the documents for citations.
    stored = [each for each in messages if isinstance(each, ToolMessage)]
    assert [each.content for each in stored] == [first, second]
    assert [[document.id for document in artifact_documents(each)] for each in stored] == [["a", "b"], ["b", "c"]]


def test_by_default_results_stay_as_the_tools_wrote_them(server: ChatServer) -> None:
    agent = make_agent(server)
    ask(agent, "One|ab")
    ask(agent, "Two|bc")
    assert results(server) == [f"{text_of('a')}\n\n{text_of('b')}", f"{text_of('b')}\n\n{text_of('c')}"]


def test_only_what_is_really_sent_counts(server: ChatServer) -> None:
    """Another middleware leaves out old results; an application removes messages."""

    class Forgetting(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            old = [place for place, each in enumerate(request.messages) if isinstance(each, ToolMessage)][:-1]
            messages = [
                each.model_copy(update={"content": "[cleared]"}) if place in old else each
                for place, each in enumerate(request.messages)
            ]
            return handler(request.override(messages=messages))

    agent = make_agent(server, None, Forgetting(), repeat="name")
    ask(agent, "One|ab")
    ask(agent, "Two|b")
    assert results(server)[0] == "[cleared]" and text_of("b") in results(server)[1]

    agent = make_agent(server, repeat="name")
    messages = ask(agent, "One|ab")
    agent.update_state(CONFIG, {"messages": [RemoveMessage(id=each.id) for each in messages[:-1]]})
    ask(agent, "Two|b")
    assert text_of("b") in results(server)[0]


class Adding(AgentMiddleware):
    """Adds a message to each call of the model, and to no state."""

    def __init__(self, message: Any) -> None:
        self.message = message

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(messages=[*request.messages, self.message]))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(messages=[*request.messages, self.message]))


NOTES = "Open file: notes.txt"


@pytest.mark.parametrize(
    "message",
    [{"role": "user", "content": NOTES}, ("user", NOTES), HumanMessage(NOTES), HumanMessage(NOTES, id="its own")],
    ids=["a dict", "a tuple", "a message", "a message with an id"],
)
async def test_a_message_of_another_middleware_is_sent_and_not_stored(
    server: ChatServer, recorder: Recorder, message: Any
) -> None:
    agent = make_agent(server, recorder, Adding(message), tools=(), retriever=RETRIEVER)
    ask(agent, "One|ab")
    messages = await aask(agent, "Two|c")
    assert [each.content for each in messages if isinstance(each, HumanMessage)] == ["One|ab", "Two|c"]
    contents = [each["content"] for each in server.sent[-1] if each["role"] == "user"]
    assert contents[:2] == ["One|ab", "Two|c"] and contents[2].endswith(NOTES) and len(contents) == 3
    assert [outcome.cached_tokens for outcome in recorder.finished] == server.cached


async def test_a_message_that_langchain_cannot_read_is_the_models_to_refuse(server: ChatServer) -> None:
    orderer = Orderer(block_size=BLOCK)
    agent = make_agent(server, orderer, Adding({"no": "message"}), tools=(), retriever=RETRIEVER)
    for refused in (lambda: asyncio.to_thread(ask, agent, "One|ab"), lambda: aask(agent, "Two|c")):
        with pytest.raises(ValueError, match="Message dict must contain"):
            await refused()
    assert orderer.fallbacks == 2 and not server.sent


def test_results_of_several_calls_at_once(server: ChatServer, recorder: Recorder) -> None:
    calls = [{"name": "search", "args": {"query": f"|{names}"}, "id": names} for names in ("ab", "ba")]
    messages = [HumanMessage("One"), AIMessage("", tool_calls=calls)]
    agent = make_agent(server, recorder, repeat="name")
    found = [search.invoke({**call, "type": "tool_call"}) for call in calls]
    agent.invoke({"messages": [*messages, *found]}, CONFIG)
    first, second = results(server)
    assert first.index(text_of("a")) < first.index(text_of("b"))
    assert second == is_named("b") + is_named("a")
    assert len(recorder.finished) == 1


async def test_documents_of_a_retriever_are_in_the_question(server: ChatServer, recorder: Recorder) -> None:
    agent = make_agent(server, recorder, tools=(), retriever=RETRIEVER)
    ask(agent, "One|abc")
    messages = await aask(agent, "Two|d")
    server.check_replay()
    contents = [each["content"] for each in server.sent[-1] if each["role"] == "user"]
    assert contents == [each.content for each in messages if isinstance(each, HumanMessage)]
    assert text_of("a") in contents[0] and contents[0].endswith("Question: One|abc")
    # Another conversation shares the documents.
    other = make_agent(server, recorder, tools=(), retriever=RETRIEVER)
    ask(other, "Three|cba")
    assert server.sent[-1][1]["content"].startswith(contents[0].removesuffix("Question: One|abc"))
    assert server.cached[-1] > 3 * len(text_of("a")) // 4 - BLOCK


def test_a_run_that_goes_on_from_a_checkpoint_names_all_the_same(server: ChatServer, recorder: Recorder) -> None:
    agent = make_agent(server, recorder, repeat="name")
    ask(agent, "One|ab")
    server.breaks = lambda body: body["messages"][-1]["role"] == "tool"
    with pytest.raises(Exception, match="broken"):
        ask(agent, "Two|bc")
    server.breaks = None
    agent.invoke(None, CONFIG)
    server.check_replay()
    assert results(server)[1].endswith(is_named("b"))
    assert [outcome.served for outcome in recorder.finished] == [True, True, True, False, True]


@pytest.mark.parametrize("options", [{"label": broken}, {"scope": broken}, {"documents": broken}])
def test_a_broken_function_drops_nothing(server: ChatServer, options: dict[str, Any]) -> None:
    orderer = Orderer(block_size=BLOCK)
    agent = make_agent(server, orderer, repeat="name", **options)
    ask(agent, "One|ba")
    (result,) = results(server)
    assert 0 <= result.index(text_of("b")) < result.index(text_of("a"))
    assert orderer.fallbacks > 0


def test_what_is_no_turn_of_ours_is_passed_on_as_it_is(server: ChatServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    call = {"name": "unknown", "args": {}, "id": "lost", "type": "tool_call"}
    given = [
        HumanMessage([{"type": "text", "text": "See?"}, image]),
        AIMessage("", tool_calls=[call]),
        ToolMessage("nothing", tool_call_id="other", artifact=object),
        HumanMessage("And|a"),
    ]
    # An artifact that cannot be stored: without a checkpointer.
    agent = make_agent(server, tools=(), checkpointer=None, repeat="name")
    agent.invoke({"messages": given})
    assert server.sent[-1][1]["content"][1] == image
    assert [each["role"] for each in server.sent[-1]] == ["system", "user", "assistant", "tool", "user"]
    assert server.sent[-1][3]["content"] == "nothing"


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="give a Runnable"):
        CacheOrderMiddleware(Orderer(), retriever=finding)
    with pytest.raises(ValueError, match="repeat must be"):
        CacheOrderMiddleware(Orderer(), repeat="never")  # type: ignore[arg-type]


def test_other_text_of_a_tool_stays_when_documents_are_named(server: ChatServer, recorder: Recorder) -> None:
    agent = make_agent(server, recorder, tools=[tool_of(reporting)], repeat="name")
    ask(agent, "One|ab")
    ask(agent, "Two|bc")
    server.check_replay()
    first, second = results(server)
    shown = {name: f"[{number_label(text_of(name))}]\n{text_of(name)}\n\n" for name in "abc"}
    assert first == f"Warehouse report, 2 found:\n{shown['a']}{shown['b']}"
    assert second == f"Warehouse report, 2 found:\n{is_named('b')}{shown['c']}"
    assert [outcome.cached_tokens for outcome in recorder.finished] == server.cached


def test_a_result_that_does_not_hold_its_documents_whole_is_sent_as_it_is(server: ChatServer) -> None:
    agent = make_agent(server, tools=[tool_of(excerpting)], repeat="name")
    ask(agent, "One|ab")
    ask(agent, "Two|ab")
    assert results(server) == [excerpting("|ab")[0]] * 2


def test_marks_are_in_what_is_sent_and_not_in_the_state(server: ChatServer) -> None:
    """At OpenAI, in the parts and in the body's options."""
    rules = CacheRules("mine", minimum_tokens=16, marks=4, ttl_s=1800, ttl="30m", write=1.25, read=0.1)
    orderer = Orderer.for_rules(rules, builder=PromptBuilder(SYSTEM), clock=lambda: 0.0)
    agent = make_agent(server, orderer, tools=(), retriever=RETRIEVER, marks="openai", checkpointer=False)
    for _ in range(6):
        messages = ask(agent, "One|abc")
    contents = [each["content"] for sent in server.sent for each in sent if isinstance(each["content"], list)]
    marked = [part for content in contents for part in content if "prompt_cache_breakpoint" in part]
    assert marked and all(part["prompt_cache_breakpoint"] == {"mode": "explicit"} for part in marked)
    assert contents[-1][0]["text"] == f"[{number_label(text_of('a'))}]\n{text_of('a')}\n\n"
    assert server.bodies[-1]["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert all("prompt_cache_breakpoint" not in part for part in messages[0].content)
    assert orderer.degraded == ()
