"""A workflow with more model than memory: layers are streamed, and documents reused at any position.

    pip install '.[torch,retrieval,proxy]'
    python examples/small_machine.py [device_bytes]

The model has random weights, so nothing is downloaded: bytes and tokens are real, answers are not.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import faiss
import numpy as np
from transformers import AutoTokenizer

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.workflows import ordered_workflows
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.workflow import irg

WORDS = (
    *("bread", "cheese", "wine", "oil", "salt", "honey", "flour", "milk"),
    *("grape", "olive", "sea", "bee", "oven", "barrel", "cellar", "summer"),
)


def embed(text: str) -> np.ndarray:
    """A bag of words; replace it by your embedding model."""
    vector = np.array([text.lower().count(word) for word in WORDS], np.float32) + 0.01
    return vector / np.linalg.norm(vector)


def corpus(count: int = 200) -> list[Document]:
    draw = random.Random(0)
    return [Document(f"d{number}", " ".join(draw.choices(WORDS, k=24))) for number in range(count)]


async def main(device_bytes: str) -> None:
    documents = corpus()
    index = faiss.index_factory(len(WORDS), "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.stack([embed(document.text) for document in documents])
    index.train(vectors)
    index.add(vectors)
    settings = EngineSettings(
        # The only memory setting: layers that do not fit are streamed.
        device_bytes=device_bytes,
        device_tokens=4096,
        dtype="float32",
        device="cpu",
        reuse="fused",
        recompute=0.15,
    )
    with tempfile.TemporaryDirectory() as folder:
        texts = [document.text for document in documents[:100]]
        make_model(Path(folder), texts=texts, layers=12, hidden_size=256, vocab_size=400, max_position_embeddings=2048)
        builder = PromptBuilder(question_template="{query}", tokenizer=AutoTokenizer.from_pretrained(folder))
        # Each step reads layers from this folder.
        with TieredEngine.load(folder, settings) as model:
            await answer(model, builder, documents, index)


async def answer(model: TieredEngine, builder: PromptBuilder, documents: list[Document], index: faiss.Index) -> None:
    worker = EngineWorker(model)
    engine = EmbeddedStreams(worker)
    orderer = Orderer(
        capacity_tokens=model.device_tokens,
        prefix_tokens=builder.prefix_tokens,
        tokens=builder.document_tokens,
        reuse="fused",
        recompute=0.15,
    )
    search, parts = ContinuousIVF(index, nprobe=4), {"orderer": orderer, "builder": builder}
    graph = irg(topk=5, rounds=2, max_tokens=4).compile()
    questions = [f"What do {' and '.join(pair)} need?" for pair in combinations(WORDS[:5], 2)]
    async with ordered_workflows(engine, search, embed, documents.__getitem__, prompts="token_ids", **parts) as server:
        async for number, result in server.batch(graph, questions):
            if isinstance(result, Exception):
                raise result
            print(f"{questions[number]:32} answered in {len(result.trace.pieces)} pieces")
    stats = model.stats()
    worker.close()
    streamed = stats.stream.bytes if stats.stream else 0
    print(f"{stats.prompt_tokens} prompt tokens: {stats.cached.total} exact, {stats.fused.total} copied")
    print(
        f"{stats.steps} steps read {streamed / 1e6:.0f} MB of weights, {streamed / max(1, stats.steps) / 1e6:.1f} each"
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "64MiB"))
