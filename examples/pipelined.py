"""Answers that start during the search, with the documents found so far.

    python examples/pipelined.py http://127.0.0.1:8000 [FOLDER OF THE SERVED MODEL]

Needs `pip install '.[live]'`. vLLM reports cached tokens with --enable-prompt-tokens-details. Without a server:
`ragorder engine --model smollm2` (docs/vllm.md), and http://127.0.0.1:8100. With the folder lengths are
exact instead of estimated, and that engine is told where documents end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

import openai

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.pipelined import PipelinedClient, Question
from ragorder.pipelining import Provisional

TEXTS = {
    "bread": "Bread is baked from flour, water, salt and yeast, at 230 degrees, until its crust is brown.",
    "cheese": "Cheese is made of milk that is curdled, drained, salted, and left to ripen for weeks or years.",
    "wine": "Wine is pressed from grapes, fermented by yeast in barrels, and bottled in the spring.",
    "oil": "Olive oil is pressed from olives within a day of the harvest, and kept in the dark.",
    "salt": "Salt is won from the sea in shallow pans, where the sun takes the water away.",
    "honey": "Honey is made by bees from nectar, thickened in the comb, and spun out of it in summer.",
}
# An index in three parts, searched one after another.
SHELVES = (("bread", "wine"), ("cheese", "oil"), ("salt", "honey"))
QUESTIONS = ("What needs yeast?", "What is pressed?", "What is made of milk, and left to ripen?", "What needs salt?")


async def search(question: Question) -> AsyncGenerator[Provisional[Document], None]:
    """The two documents with most words of the question, among those searched so far."""
    words = set(question.query.lower().strip("?").split())
    seen: list[Document] = []
    for number, shelf in enumerate(SHELVES, 1):
        await asyncio.sleep(0.1)  # so long does a part take
        seen += [Document(name, f"{TEXTS[name]} " * 4) for name in shelf]
        best = sorted(seen, key=lambda document: -len(words & set(document.text.lower().split())))
        yield Provisional(best[:2], final=number == len(SHELVES))


async def main(url: str, folder: str | None = None) -> None:
    server = openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none")
    model = (await server.models.list()).data[0].id
    tokenizer = None
    if folder is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    system = "You are a grocer. Answer each question from the documents below, and from nothing else. " * 4
    builder = PromptBuilder(system, tokenizer=tokenizer)
    orderer = Orderer.for_vllm(url, builder=builder)
    client = PipelinedClient(
        server, model=model, orderer=orderer, builder=builder, retrieval=search, send_facts=tokenizer is not None
    )
    async with server, client:
        for question in QUESTIONS:
            stream = await client.answer(question, max_tokens=24)
            trace, usage = stream.trace, stream.usage
            began = f"after stage {trace.speculated_stage} of {trace.stages}" if trace.right else "after the search"
            cached = "?" if usage is None else f"{usage.cached_tokens} of {usage.prompt_tokens}"
            warmed = ", warmed up" if trace.warmed_up else ""
            print(f"{question:42} begun {began}, cached {cached} tokens{warmed}")
            print(f"    {stream.text!r}")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["http://127.0.0.1:8000"])))
