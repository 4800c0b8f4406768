"""A LangChain chat with Claude, with cache breakpoints (cache_control) where they pay off.

    pip install '.[langchain]' langchain-anthropic
    ANTHROPIC_API_KEY=… python examples/langchain_cloud.py [https://api.anthropic.com]

It starts five conversations about the same documents, and asks a second question in the last one.
"""

from __future__ import annotations

import os

import click
from langchain_anthropic import ChatAnthropic
from langchain_core.documents import Document

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.langchain import CacheOrderTurn

MODEL = "claude-opus-5-5"
CONTRACTS = [
    Document(f"Paragraph {number} of the contract of carriage. The carrier delivers within {number} days. " * 40)
    for number in range(2, 7)
]
QUESTIONS = ["Within how many days is it delivered?", "Who delivers?", "What is paragraph 3?", "Of what?", "Is it so?"]


@click.command()
@click.argument("base_url", default="https://api.anthropic.com")
def main(base_url: str) -> None:
    llm = ChatAnthropic(
        model=MODEL, base_url=base_url, api_key=os.environ.get("ANTHROPIC_API_KEY", "none"), max_tokens=64
    )
    builder = PromptBuilder("Answer from the documents.")
    orderer = Orderer.for_cloud("anthropic", model=MODEL, ttl="5m", builder=builder)
    turn = CacheOrderTurn(llm, orderer, builder=builder, marks=True)

    for question in QUESTIONS:
        result = turn.invoke({"input": question, "context": CONTRACTS})
        details = result["answer"].usage_metadata["input_token_details"]
        click.echo(f"{question:40} cached {details.get('cache_read', 'unknown')} tokens")
    history = result["messages"]
    result = turn.invoke({"input": "And on Sundays?", "chat_history": history, "context": CONTRACTS[:2]})
    click.echo("".join(part["text"] for part in result["messages"][0].content))


if __name__ == "__main__":
    main()
