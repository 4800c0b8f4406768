"""A LangChain agent with a search tool: documents already in the conversation are named, not sent again.

    pip install '.[langchain,live]' langchain langchain-openai
    vllm serve MODEL --enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes
    python examples/langchain_agent.py [http://127.0.0.1:8000/v1]

The model must support tool calls.
"""

from __future__ import annotations

import re

import click
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from openai import OpenAI

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.langchain.middleware import CacheOrderMiddleware

SYSTEM = "Search the notes, then answer."
NOTES = {
    "loom": "On a loom the warp threads are stretched, and the weft thread is passed over and under them.",
    "wool": "Wool is shorn from sheep in spring, washed, combed, and spun into thread before it is dyed.",
    "dye": "Wool thread is dyed red with madder and blue with indigo, which needs no mordant to stay in the wool.",
    "felt": "Felt is made of wool without any thread or loom: the wool is wetted, soaped, and rolled.",
}
QUESTIONS = ["How is wool thread dyed?", "How is wool spun into thread?", "Is felt made of wool thread on a loom?"]


@tool(response_format="content_and_artifact")
def search(query: str) -> tuple[str, list[Document]]:
    """Search the notes."""
    words = set(re.findall(r"\w{4,}", query.lower()))
    found = [Document(f"{text} " * 3, metadata={"source": name}) for name, text in NOTES.items()]
    found.sort(key=lambda each: -len(words & set(re.findall(r"\w+", each.page_content.lower()))))
    # The middleware reads the artifact: the content alone does not show where a document ends.
    return "\n\n".join(document.page_content for document in found[:2]), found[:2]


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    llm = ChatOpenAI(base_url=base_url, api_key="none", model=model, max_completion_tokens=64, temperature=0)
    builder = PromptBuilder(SYSTEM)
    orderer = Orderer.for_vllm(base_url, builder=builder)
    middleware = CacheOrderMiddleware(
        orderer, builder=builder, repeat="name", label=lambda document: document.metadata["source"]
    )
    agent = create_agent(llm, [search], system_prompt=SYSTEM, middleware=[middleware], checkpointer=InMemorySaver())
    seen = 0
    for question in QUESTIONS:
        state = agent.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "one"}})
        for message in state["messages"][seen:]:
            if isinstance(message, AIMessage):
                usage = message.usage_metadata
                cached = usage["input_token_details"].get("cache_read", "unknown")
                what = "searches" if message.tool_calls else "answers"
                click.echo(f"{question:40} {what:8} cached {cached} of {usage['input_tokens']} tokens")
        named = re.findall(r"\[(\w+)\] is above", " ".join(str(each.content) for each in state["messages"][seen:]))
        click.echo(f"{question:40} named {', '.join(named) or 'nothing'}")
        seen = len(state["messages"])


if __name__ == "__main__":
    main()
