"""Multi-step questions on an OpenAI-compatible server, with a search function of your own.

    pip install '.[live]' numpy
    python examples/workflow_server.py http://127.0.0.1:8000

vLLM reports cached tokens with --enable-prompt-tokens-details.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import openai

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.endpoint import OpenAIStreams
from ragorder.adapters.workflows import ordered_workflows
from ragorder.pipelining.workflow import END, START, CompiledGraph, RAGraph, irg

WORDS = ("bread", "cheese", "wine", "oil", "salt", "yeast", "press", "milk", "ripen", "sea")
DOCUMENTS = [
    Document(text.split()[0].lower(), f"{text} " * 8)
    for text in (
        "Bread is baked from flour, water, salt and yeast, until its crust is brown.",
        "Cheese is made of milk that is curdled, drained, salted, and left to ripen.",
        "Wine is pressed from grapes, fermented by yeast in barrels, and bottled in the spring.",
        "Oil is pressed from olives within a day of the harvest, and kept in the dark.",
        "Salt is won from the sea in shallow pans, where the sun takes the water away.",
    )
]
QUESTIONS = ("What needs yeast?", "What ripens, and what is pressed?", "What comes from the sea?")


def embed(text: str) -> np.ndarray:
    """A bag of words; replace it by your embedding model."""
    return np.array([text.lower().count(word) for word in WORDS], np.float32)


VECTORS = np.stack([embed(document.text) for document in DOCUMENTS])


async def search(vector: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of the nearest; replace it by your vector database."""
    return np.argsort(-(VECTORS @ vector), kind="stable")[:k]


def checked() -> CompiledGraph:
    """Answer, and search for what the answer lacks, at most three times."""
    graph = RAGraph("checked", max_rounds=3)
    graph.add_retrieval("search", query=lambda state: state.get("missing", state["query"]), topk=2)
    graph.add_generation("answer", prompt="Answer the question using {docs}: {query}", max_tokens=32)
    graph.add_generation(
        "check",
        prompt="Does “{answer}” follow from {docs}? Say yes, or what to search for.",
        output="missing",
        max_tokens=16,
    )
    graph.add_edge(START, "search").add_edge("search", "answer").add_edge("answer", "check")
    graph.add_edge("check", lambda state: END if "yes" in state["missing"].lower() else "search", to=("search", END))
    return graph.compile(answer="answer")


async def main(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        builder = PromptBuilder("Answer from the documents.", question_template="{query}")
        orderer = Orderer.for_vllm(url, builder=builder)
        try:
            async with ordered_workflows(
                OpenAIStreams(client, model), search, embed, DOCUMENTS.__getitem__, orderer=orderer, builder=builder
            ) as server:
                for graph in (irg(topk=2, rounds=2, max_tokens=32).compile(), checked()):
                    async for number, result in server.batch(graph, QUESTIONS, deadline_s=60):
                        if isinstance(result, Exception):
                            raise result
                        pieces = [piece for piece in result.trace.pieces if piece.worker == "engine"]
                        known = sum(piece.from_memory for piece in pieces)
                        print(f"{graph.name:8} {QUESTIONS[number]:36} {len(pieces)} answers, {known} from memory")
                        print(f"    {result.text!r}")
        finally:
            orderer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
