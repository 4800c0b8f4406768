"""A Haystack pipeline whose prompts reuse the server's prefix cache.

    pip install '.[haystack,live]'
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/haystack_pipeline.py [http://127.0.0.1:8000/v1]

Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import click
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from openai import OpenAI

from ragorder import Orderer
from ragorder.adapters.haystack import CacheOrderRanker

TEXTS = {
    "loom": "On a loom the warp threads are stretched, and the weft thread is passed over and under them.",
    "wool": "Wool is shorn from sheep in spring, washed, combed, and spun into thread before it is dyed.",
    "dye": "Wool thread is dyed red with madder and blue with indigo, which needs no mordant to stay in the wool.",
    "silk": "Silk thread is unwound from cocoons in hot water, and is stronger than a wool thread of that size.",
    "felt": "Felt is made of wool without any thread or loom: the wool is wetted, soaped, and rolled.",
}
QUESTIONS = [
    "How is wool thread dyed?",
    "Which thread is stronger, silk or wool?",
    "How is wool spun into thread and dyed with indigo?",
    "Is felt made of wool thread on a loom?",
]
PROMPT = """{% for document in documents %}[{{ loop.index }}] {{ document.content }}

{% endfor %}Question: {{ question }}"""


def build(base_url: str, model: str, orderer: Orderer) -> Pipeline:
    store = InMemoryDocumentStore()
    store.write_documents([Document(id=name, content=text) for name, text in TEXTS.items()])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=3))
    # The last component before the prompt: a later one that sorts documents would undo the order.
    pipeline.add_component("order", CacheOrderRanker(orderer))
    messages = [ChatMessage.from_system("Answer from the documents."), ChatMessage.from_user(PROMPT)]
    pipeline.add_component("prompt", ChatPromptBuilder(messages, required_variables="*"))
    generation = {"max_tokens": 24, "temperature": 0}
    llm = OpenAIChatGenerator(
        api_key=Secret.from_token("none"), api_base_url=base_url, model=model, generation_kwargs=generation
    )
    pipeline.add_component("llm", llm)
    pipeline.connect("retriever.documents", "order.documents")
    pipeline.connect("order.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "llm.messages")
    return pipeline


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    pipeline = build(base_url, model, Orderer.for_vllm(base_url))
    for question in QUESTIONS:
        asked = {"retriever": {"query": question}, "prompt": {"question": question}}
        done = pipeline.run(asked, include_outputs_from={"order"})
        order = ", ".join(document.id for document in done["order"]["documents"])
        usage = done["llm"]["replies"][0].meta["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", "unknown")
        click.echo(f"{question:52} {order:20} cached {cached} of {usage['prompt_tokens']} tokens")


if __name__ == "__main__":
    main()
