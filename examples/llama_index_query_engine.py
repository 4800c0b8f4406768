"""A LlamaIndex query engine whose prompts reuse the server's prefix cache.

    pip install '.[llama-index,live]' llama-index-llms-openai-like
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/llama_index_query_engine.py [http://127.0.0.1:8000/v1]

Any server with OpenAI's API works. Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import re
import sys
from typing import Any
from zlib import crc32

import click
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

from ragorder import Orderer
from ragorder.adapters.llama_index import CacheOrderPostprocessor, FeedbackHandler

TEXTS = [
    "A lighthouse keeper trims the wick and polishes the lens of the lamp before every night.",
    "The lens of a lighthouse is cut in rings, so that a large lens stays thin and light.",
    "A lighthouse on a reef is built of granite blocks that lock into one another.",
    "Fog signals take over where the light of the lighthouse cannot be seen: bells, horns, whistles.",
    "Every lighthouse has a rhythm of flashes of its own, by which ships know where they are.",
    "The last lighthouse keeper left when the lamp was switched over to electricity.",
]
QUESTIONS = [
    "Who looks after the lamp and the lens of a lighthouse?",
    "How large is the lens of the lighthouse lamp, and how is it cut?",
    "Which lens and which lamp did the last lighthouse keeper have?",
    "When did the keeper of the lighthouse leave the lamp and its lens?",
]


class HashedWords(BaseEmbedding):
    """Hashed word counts: enough for six sentences."""

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
            click.echo(f"   {cached} of {usage.prompt_tokens} prompt tokens cached")


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0]
    llm = OpenAILike(
        model=model.id,
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        max_tokens=48,
        context_window=getattr(model, "max_model_len", 4096),
    )
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=HashedWords())

    # The whole integration: an orderer with a model of the server's cache, the postprocessor that uses it, and, if the
    # server reports cached tokens, the feedback that corrects it.
    orderer = Orderer.for_vllm(base_url)
    engine = index.as_query_engine(llm=llm, similarity_top_k=4, node_postprocessors=[CacheOrderPostprocessor(orderer)])
    get_dispatcher().add_span_handler(FeedbackHandler())
    get_dispatcher().add_event_handler(CachedTokens())

    for question in QUESTIONS:
        click.echo(f"Q: {question}")
        click.echo(f"A: {engine.query(question)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
