"""A LlamaIndex chat engine with nodes after the history, so that each turn finds the whole history in the cache.

    pip install '.[llama-index,live]' llama-index-llms-openai-like
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/llama_index_chat.py [http://127.0.0.1:8000/v1]

Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

import click
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.llama_index import CacheOrderChatEngine
from ragorder.citations import cited

TEXTS = [
    "A lighthouse keeper trims the wick and polishes the lens of the lamp before every night. ",
    "The lens of a lighthouse is cut in rings, so that a large lens stays thin and light. ",
    "A lighthouse on a reef is built of granite blocks that lock into one another. ",
    "The last lighthouse keeper left when the lamp was switched over to electricity. ",
]
QUESTIONS = [
    "Who looks after the lamp and the lens of a lighthouse?",
    "How is the lens of the lamp cut?",
    "When did the keeper leave the lamp?",
    "Of what is a lighthouse on a reef built?",
]


class HashedWords(BaseEmbedding):
    """Hashed word counts: enough for four sentences."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 256
        for word in re.findall(r"\w{3,}", text.lower()):
            vector[crc32(word.encode()) % 256] += 1
        return vector

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class CachedTokens(BaseEventHandler):
    """Prints each answer's usage."""

    def handle(self, event: Any, **_: Any) -> None:
        usage = getattr(event.response.raw, "usage", None) if isinstance(event, LLMChatEndEvent) else None
        if usage is not None:
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            click.echo(f"  cached {cached} of {usage.prompt_tokens} tokens")


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0]
    window = getattr(model, "max_model_len", 4096)
    llm = OpenAILike(
        model=model.id, api_base=base_url, api_key="none", is_chat_model=True, max_tokens=24, context_window=window
    )
    index = VectorStoreIndex([TextNode(text=text * 3) for text in TEXTS], embed_model=HashedWords())
    builder = PromptBuilder("Answer from the documents. Cite them as [number].")
    engine = CacheOrderChatEngine(
        index.as_retriever(similarity_top_k=2),
        Orderer.for_vllm(base_url, builder=builder),
        llm=llm,
        # Any memory works. This one counts words and needs no tokenizer.
        memory=ChatMemoryBuffer.from_defaults(token_limit=window // 2, tokenizer_fn=str.split),
        builder=builder,
    )
    get_dispatcher().add_event_handler(CachedTokens())
    for question in QUESTIONS:
        click.echo(question)
        response = engine.chat(question)
        labels = ", ".join(map(engine.label, response.source_nodes))
        sources = cited(response.response, response.source_nodes, engine.label)
        click.echo(f"  sources {labels}, cites {len(sources)} of them")


if __name__ == "__main__":
    main()
