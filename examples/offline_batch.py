"""Answer many questions offline with vLLM in this process, in the order with most cache hits.

    pip install '.[vllm]'
    python examples/offline_batch.py MODEL

`order_batch` orders each request's documents, and the requests: those that share documents are served one after
another. Answers are put back in the order of the questions. Retrieval order is served too, to compare cached tokens.
"""

from __future__ import annotations

import os
import sys

from ragorder import Document, Orderer, PromptBuilder

DOCUMENTS = {
    name: Document(name, f"{text} " * 6)
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
    "What is pressed?": ["oil", "wine"],
    "What goes well with wine?": ["wine", "cheese", "bread"],
    "What is kept in the dark?": ["wine", "oil"],
    "What ripens?": ["cheese", "wine", "bread", "oil"],
    "What needs salt?": ["bread", "cheese", "salt"],
    "Where does salt come from?": ["salt", "cheese", "bread"],
    "What is eaten with cheese?": ["cheese", "bread", "wine"],
}


def main(model: str) -> None:
    # One process, so that the guard below is enough.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    # A small cache and no compilation, for a quick start: omit both in your program.
    llm = LLM(model, enable_prefix_caching=True, block_size=32, kv_cache_memory_bytes=1 << 27, enforce_eager=True)
    cache = llm.llm_engine.vllm_config.cache_config
    builder = PromptBuilder("Answer the question from the documents below.", tokenizer=llm.get_tokenizer())
    orderer = Orderer(
        capacity_tokens=cache.num_gpu_blocks * cache.block_size,
        block_size=cache.block_size,
        prefix_tokens=builder.prefix_tokens,
        tokens=builder.document_tokens,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0)

    questions = list(QUESTIONS)
    requests = [[DOCUMENTS[name] for name in found] for found in QUESTIONS.values()]

    plain = [builder.build(question, documents) for question, documents in zip(questions, requests, strict=True)]
    served = llm.generate([{"prompt_token_ids": prompt.token_ids} for prompt in plain], sampling, use_tqdm=False)
    retrieval = sum(output.num_cached_tokens or 0 for output in served)
    llm.reset_prefix_cache()

    # The four lines: plan, build, serve, and assign each answer to its question.
    orderings = list(orderer.order_batch(requests))
    prompts = [builder.build(questions[ordering.index], ordering) for ordering in orderings]
    served = llm.generate([{"prompt_token_ids": prompt.token_ids} for prompt in prompts], sampling, use_tqdm=False)
    answers = {ordering.index: output for ordering, output in zip(orderings, served, strict=True)}

    for ordering, output in zip(orderings, served, strict=True):
        ordering.confirm(cached_tokens=output.num_cached_tokens)
    for index, question in enumerate(questions):
        output = answers[index]
        print(f"{question:28} {output.outputs[0].text!r:.40} cached {output.num_cached_tokens} tokens")
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    cached = sum(output.num_cached_tokens or 0 for output in served)
    print(f"Cached {100 * cached / tokens:.0f} %; in retrieval order {100 * retrieval / tokens:.0f} %.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Name a model, by folder or as on the Hugging Face Hub: python examples/offline_batch.py MODEL")
    main(sys.argv[1])
