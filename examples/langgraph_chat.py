"""A LangGraph chat with a checkpointer that keeps documents, so that the next turn finds them in the cache.

    pip install '.[langchain,live]' langchain-openai langgraph
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/langgraph_chat.py [http://127.0.0.1:8000/v1]

In examples/langgraph_rag.py documents come before the history and replace those of the last turn.
Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import re
from typing import Any

import click
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from openai import OpenAI

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.langchain import CacheOrderTurn

GARDEN = {
    "tomato": "Tomatoes want sun and warm soil. Water them at the root every morning, and never on the leaves.",
    "basil": "Basil grows well beside tomatoes. Pinch out its tips every week, or it will flower and turn bitter.",
    "mint": "Mint wants shade and wet soil. Keep it in a pot, or its roots will take over the whole garden.",
    "frost": "Cover tomatoes and basil with fleece before a night of frost. Mint comes back by itself in spring.",
}
QUESTIONS = [
    "How do I water tomatoes and basil?",
    "Will basil and tomatoes stand a night of frost?",
    "And does mint come back after frost?",
    "Where does mint grow, and where do tomatoes?",
]


class State(MessagesState):
    context: list[Document]
    sources: list[Document]


def retrieve(state: State) -> dict[str, Any]:
    """The two documents with most words of the question; replace it by your vector store."""
    words = set(re.findall(r"\w{4,}", str(state["messages"][-1].content).lower()))
    found = [Document(f"{text} " * 3, metadata={"source": name}) for name, text in GARDEN.items()]
    found.sort(key=lambda each: -len(words & set(re.findall(r"\w+", each.page_content.lower()))))
    return {"context": found[:2]}


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    llm = ChatOpenAI(base_url=base_url, api_key="none", model=model, max_completion_tokens=24, temperature=0)
    builder = PromptBuilder("Answer from the documents.")
    turn = CacheOrderTurn(llm, Orderer.for_vllm(base_url, builder=builder), builder=builder)
    graph = StateGraph(State).add_node("retrieve", retrieve).add_node("answer", turn)
    graph.add_edge(START, "retrieve").add_edge("retrieve", "answer").add_edge("answer", END)
    # Any checkpointer works: sent messages are in the state, and are replayed from it.
    chat = graph.compile(checkpointer=InMemorySaver())
    for question in QUESTIONS:
        state = chat.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "one"}})
        usage = state["messages"][-1].usage_metadata
        sources = ", ".join(document.metadata["source"] for document in state["sources"])
        cached = usage["input_token_details"].get("cache_read", "unknown")
        click.echo(f"{question:48} {sources:16} cached {cached} of {usage['input_tokens']} tokens")


if __name__ == "__main__":
    main()
