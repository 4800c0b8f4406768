"""Questions about documents to an OpenAI-compatible server, in the order with most cache hits.

    python examples/openai_client.py http://127.0.0.1:8000

Needs `pip install '.[live]'`. vLLM reports cached tokens with --enable-prompt-tokens-details.
"""

from __future__ import annotations

import sys

import openai

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.observing import Metrics, ObservedOrderer, Stats
from ragorder.adapters.openai import OrderedClient

DOCUMENTS = {
    name: Document(name, f"{text} " * 4)
    for name, text in {
        "bread": "Bread is baked from flour, water, salt and yeast, at 230 degrees, until its crust is brown.",
        "cheese": "Cheese is made of milk that is curdled, drained, salted, and left to ripen for weeks or years.",
        "wine": "Wine is pressed from grapes, fermented by yeast in barrels, and bottled in the spring.",
        "oil": "Olive oil is pressed from olives within a day of the harvest, and kept in the dark.",
        "salt": "Salt is won from the sea in shallow pans, where the sun takes the water away.",
    }.items()
}
# Retrieved documents of each question, best first.
QUESTIONS = {
    "What needs yeast?": ["bread", "wine", "cheese"],
    "What goes well with wine?": ["wine", "cheese", "bread"],
    "What ripens?": ["cheese", "wine", "bread", "oil"],
    "What needs salt?": ["bread", "cheese", "salt"],
    "What is pressed?": ["oil", "wine"],
    "What is eaten with cheese?": ["cheese", "bread", "wine"],
}


def main(url: str) -> None:
    server = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = server.models.list().data[0].id
    # With tokenizer=AutoTokenizer.from_pretrained(model) lengths are exact instead of estimated.
    builder = PromptBuilder("Answer the question from the documents below.")
    metrics = Metrics()
    orderer = ObservedOrderer(Orderer.for_vllm(url, builder=builder), [metrics])
    rag = OrderedClient(server, model=model, orderer=orderer, builder=builder)

    for question, found in QUESTIONS.items():
        answer = rag.generate(question, [DOCUMENTS[name] for name in found], max_tokens=16)
        order = ", ".join(document.id for document in answer.ordering.documents)
        print(f"{question:28} {order:28} cached {answer.cached_tokens} of {answer.prompt_tokens} tokens")

    stats = Stats.of(metrics.registry.collect())
    cached = f"Cached {100 * stats.cached_share:.0f} %"
    # Hits in retrieval order are predicted: a few requests cannot correct this yet (stats.cannot_compare).
    other = stats.predicted_other_share if stats.other_cached_share is None else stats.other_cached_share
    print(f"{cached}; in retrieval order " + ("is not known." if other is None else f"about {100 * other:.0f} %."))
    orderer.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
