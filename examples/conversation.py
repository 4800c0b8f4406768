"""A conversation with documents: later turns only name documents that earlier messages contain.

    python examples/conversation.py http://127.0.0.1:8000

Needs `pip install '.[live]'`. vLLM reports cached tokens with --enable-prompt-tokens-details. Without a server:
`ragorder engine --model smollm2` (docs/vllm.md), and http://127.0.0.1:8100.
"""

from __future__ import annotations

import sys

import openai

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import OrderedClient

DOCUMENTS = [
    Document(
        "hours",
        "The shop is open from nine in the morning to six in the evening, Monday to Friday. On Saturdays it closes at "
        "noon. On Sundays and on public holidays it is closed all day. In December it stays open until eight. The "
        "telephone is answered while the shop is open, and messages are read at nine on the next working day. Whoever "
        "wants to see the workshop asks for an appointment, which takes about an hour.",
    ),
    Document(
        "orders",
        "An order is shipped on the next working day after it was placed, in a cardboard box. Parcels take two days "
        "within the country, and five days abroad. Shipping costs four euros, and nothing for orders above fifty "
        "euros. A number with which the parcel can be followed is sent by mail. An order can be cancelled until it has "
        "been shipped. Gifts are wrapped in paper for two euros, and a card is added on request.",
    ),
    Document(
        "returns",
        "Goods can be sent back within thirty days, in the box in which they came. The money is paid back within a "
        "week after the parcel has arrived. The customer pays for the parcel, unless the goods were broken or wrong. "
        "Goods that were made to measure cannot be sent back. Repairs are free for two years, and take three weeks.",
    ),
]


def main(url: str) -> None:
    server = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = server.models.list().data[0].id
    builder = PromptBuilder("Answer briefly, from the documents.")
    rag = OrderedClient(server, model=model, orderer=Orderer.for_vllm(url, builder=builder), builder=builder)
    chat = rag.conversation()
    for question, documents in [
        ("When are orders shipped?", DOCUMENTS[:2]),
        ("What does shipping cost?", DOCUMENTS[1::-1]),
        ("How many days do I have to send it back?", DOCUMENTS[1:]),
    ]:
        answer = chat.ask(question, documents, max_tokens=32)
        new, named = ([document.id for document in part] for part in (chat.turn.new, chat.turn.repeated))
        print(
            f"{question:40} sent {new}, named {named}, cached {answer.cached_tokens} of {answer.prompt_tokens} tokens"
        )
        print(f"    {answer.text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
