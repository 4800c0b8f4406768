"""A LangGraph chat with documents before the history.

    pip install '.[langchain,live]' langchain-openai langgraph
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/langgraph_rag.py [http://127.0.0.1:8000/v1]

The documents are in the system message, before history and question. After them, as the result of an agent's tool,
no order could help. Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypedDict

import click
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from openai import OpenAI

from ragorder import Orderer
from ragorder.adapters.langchain import CacheOrderRetriever, FeedbackHandler

GARDEN = {
    "tomato": "Tomatoes want sun and warm soil. Water them at the root every morning, and never on the leaves.",
    "basil": "Basil grows well beside tomatoes. Pinch out its tips every week, or it will flower and turn bitter.",
    "mint": "Mint wants shade and wet soil. Keep it in a pot, or its roots will take over the whole garden.",
    "frost": "Cover tomatoes and basil with fleece before a night of frost. Mint comes back by itself in spring.",
    "slugs": "Slugs eat basil first. Water in the morning instead of the evening, and put copper around the pots.",
}
CONVERSATIONS = [
    ["How do I water tomatoes and basil?", "Will basil and tomatoes stand a night of frost?"],
    ["Does frost harm tomatoes, basil and their leaves?", "When do I water basil?"],
]


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    documents: list[Document]


def search(question: str) -> list[Document]:
    """The three documents with most words of the question; replace it by your vector store."""
    words = set(re.findall(r"\w{4,}", question.lower()))
    found = [Document(f"{text} " * 2, id=name) for name, text in GARDEN.items()]
    return sorted(found, key=lambda each: -len(words & set(re.findall(r"\w+", each.page_content.lower()))))[:3]


def build(llm: ChatOpenAI, orderer: Orderer) -> Any:
    retriever = CacheOrderRetriever(retriever=RunnableLambda(search), orderer=orderer)

    def retrieve(state: State) -> dict[str, Any]:
        return {"documents": retriever.invoke(str(state["messages"][-1].content))}

    def answer(state: State) -> dict[str, Any]:
        context = "\n\n".join(document.page_content for document in state["documents"])
        system = SystemMessage(f"Answer from these documents.\n\n{context}")
        return {"messages": [llm.invoke([system, *state["messages"]])]}

    graph = StateGraph(State)
    graph.add_node("retrieve", retrieve)
    graph.add_node("answer", answer)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "answer")
    graph.add_edge("answer", END)
    return graph.compile()


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    llm = ChatOpenAI(
        base_url=base_url, api_key="none", model=model, max_completion_tokens=24, temperature=0, stream_usage=True
    )
    orderer = Orderer.for_vllm(base_url)
    graph, handler = build(llm, orderer), FeedbackHandler()
    for questions in CONVERSATIONS:
        messages: list[Any] = []
        for question in questions:
            state = graph.invoke({"messages": [*messages, HumanMessage(question)]}, config={"callbacks": [handler]})
            messages, usage = state["messages"], state["messages"][-1].usage_metadata
            order = ", ".join(document.id for document in state["documents"])
            cached = usage["input_token_details"].get("cache_read", "unknown")
            click.echo(f"{question:48} {order:24} cached {cached} of {usage['input_tokens']} tokens")


if __name__ == "__main__":
    main()
