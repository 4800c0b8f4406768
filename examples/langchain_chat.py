"""A LangChain chat with documents after the history, so that each turn finds the whole history in the cache.

    pip install '.[langchain,live]' langchain-classic langchain-openai
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/langchain_chat.py [http://127.0.0.1:8000/v1]

Search is history-aware: the model rephrases a question from the conversation, without its documents.
Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import re
from typing import Any

import click
from langchain_classic.chains import create_history_aware_retriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from openai import OpenAI

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.langchain import CacheOrderTurn

MANUAL = {
    "clean": "Rinse the tank every week, and descale the boiler every month: hard water clogs the valve and the pump.",
    "lamp": "The lamp blinks when the tank is empty, and stays red when the boiler wants to be descaled.",
    "coffee": "For stronger coffee set a finer grind; use fresh beans, and never more than two spoons for a cup.",
    "guarantee": "The guarantee covers the pump and the boiler for two years, but not a valve clogged by hard water.",
}
QUESTIONS = [
    "When is the boiler to be descaled?",
    "And what about the pump and the tank, in hard water?",
    "Does the guarantee cover the boiler and the pump?",
    "Which lamp tells me about the tank?",
]
REPHRASE = ChatPromptTemplate.from_messages(
    [MessagesPlaceholder("chat_history"), ("human", "Rephrase as a question that stands alone: {input}")]
)


def search(question: str) -> list[Document]:
    """The two documents with most words of the question; replace it by your vector store."""
    words = set(re.findall(r"\w{4,}", question.lower()))
    found = [Document(f"{text} " * 3, metadata={"source": name}) for name, text in MANUAL.items()]
    return sorted(found, key=lambda each: -len(words & set(re.findall(r"\w+", each.page_content.lower()))))[:2]


def build(llm: ChatOpenAI, orderer: Orderer, builder: PromptBuilder) -> Any:
    turn = CacheOrderTurn(llm, orderer, builder=builder, label=lambda document: document.metadata["source"])
    questions = RunnablePassthrough.assign(chat_history=lambda given: turn.questions(given["chat_history"]))
    found = questions | create_history_aware_retriever(llm, RunnableLambda(search), REPHRASE)
    return RunnablePassthrough.assign(context=found) | turn


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    llm = ChatOpenAI(base_url=base_url, api_key="none", model=model, max_completion_tokens=24, temperature=0)
    builder = PromptBuilder("Answer from the manual. Cite it as [name].")
    chain = build(llm, Orderer.for_vllm(base_url, builder=builder), builder)
    history: list[Any] = []
    for question in QUESTIONS:
        result = chain.invoke({"input": question, "chat_history": history})
        # The message as it was sent, with documents, not only question and answer.
        history += result["messages"]
        usage = result["answer"].usage_metadata
        sources = ", ".join(document.metadata["source"] for document in result["sources"])
        cached = usage["input_token_details"].get("cache_read", "unknown")
        click.echo(f"{question:52} {sources:18} cached {cached} of {usage['input_tokens']} tokens")


if __name__ == "__main__":
    main()
