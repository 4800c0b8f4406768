"""A Haystack chat with documents after the history, so that each turn finds the whole history in the cache.

    pip install '.[haystack,live]'
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/haystack_chat.py [http://127.0.0.1:8000/v1]

Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import click
from haystack import Document, Pipeline
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from openai import OpenAI

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.haystack import CacheOrderChatPromptBuilder, CacheOrderFeedback

TEXTS = {
    "loom": "On a loom the warp threads are stretched, and the weft thread is passed over and under them. ",
    "wool": "Wool is shorn from sheep in spring, washed, combed, and spun into thread before it is dyed. ",
    "dye": "Wool thread is dyed red with madder and blue with indigo, which needs no mordant to stay in the wool. ",
    "silk": "Silk thread is unwound from cocoons in hot water, and is stronger than a wool thread of that size. ",
}
QUESTIONS = [
    "How is wool thread dyed?",
    "Which thread is stronger, silk or wool?",
    "How is wool spun into thread and dyed with indigo?",
    "Is silk thread stretched on a loom?",
]


def name(document: Document) -> str:
    return str(document.id)


def build(base_url: str, model: str, orderer: Orderer, builder: PromptBuilder) -> Pipeline:
    store = InMemoryDocumentStore()
    store.write_documents([Document(id=name, content=text * 3) for name, text in TEXTS.items()])
    generation = {"max_tokens": 24, "temperature": 0}
    llm = OpenAIChatGenerator(
        api_key=Secret.from_token("none"), api_base_url=base_url, model=model, generation_kwargs=generation
    )
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    pipeline.add_component("prompt", CacheOrderChatPromptBuilder(orderer, builder=builder, label=name, feedback=True))
    pipeline.add_component("llm", llm)
    pipeline.add_component("feedback", CacheOrderFeedback())
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "llm.messages")
    pipeline.connect("prompt.turn", "feedback.turn")
    pipeline.connect("llm.replies", "feedback.replies")
    return pipeline


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    builder = PromptBuilder("Answer from the documents. Cite them as [name].")
    pipeline = build(base_url, model, Orderer.for_vllm(base_url, builder=builder), builder)
    history: list[ChatMessage] = []
    for question in QUESTIONS:
        asked = {"retriever": {"query": question}, "prompt": {"question": question, "history": history}}
        done = pipeline.run(asked, include_outputs_from={"prompt"})
        history = done["feedback"]["history"]
        sources = ", ".join(map(name, done["prompt"]["documents"]))
        usage = done["feedback"]["replies"][0].meta["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", "unknown")
        click.echo(f"{question:52} {sources:12} cached {cached} of {usage['prompt_tokens']} tokens")


if __name__ == "__main__":
    main()
