"""A conversation with documents: each turn adds to the messages, and what stands there is named.

    python examples/conversation.py http://127.0.0.1:8000

Needs `pip install '.[live]'`. vLLM reports cached tokens with --enable-prompt-tokens-details. Without a server:
`ragorder serve --engine torch --model smollm2` (docs/vllm.md), and http://127.0.0.1:8100.
"""

from __future__ import annotations

import sys

import openai

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import OrderedClient

DOCUMENTS = [
    Document("hours", "The shop is open from nine to six, and on Saturdays until noon. " * 4),
    Document("orders", "Orders are shipped on the next working day, and come in a box. " * 4),
    Document("returns", "Goods can be returned within thirty days, in the box they came in. " * 4),
]


def main(url: str) -> None:
    server = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = server.models.list().data[0].id
    builder = PromptBuilder("Answer briefly, from the documents.")
    rag = OrderedClient(server, model=model, orderer=Orderer.for_vllm(url, builder=builder), builder=builder)
    chat = rag.conversation()
    for question, documents in [
        ("When are orders shipped?", DOCUMENTS[:2]),
        ("And if I order on a Saturday?", DOCUMENTS[1::-1]),
        ("Can I send it back?", DOCUMENTS[1:]),
    ]:
        answer = chat.ask(question, documents, max_tokens=16)
        new, named = ([document.id for document in part] for part in (chat.turn.new, chat.turn.repeated))
        print(
            f"{question:30} sent {new}, named {named}, cached {answer.cached_tokens} of {answer.prompt_tokens} tokens"
        )
        print(f"    {answer.text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
