"""A backlog of questions on one machine, with the index on disk and batches by backlog.

    pip install '.[torch,retrieval,proxy]'
    python examples/batching.py

The model has random weights, so nothing is downloaded: batches and cached tokens are real, answers are not.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np
from transformers import AutoTokenizer

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.batching import ordered_batches
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.prompts import Question
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model
from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import PartitionedRetrieval

WORDS = (
    *("bread", "cheese", "wine", "oil", "salt", "honey", "flour", "milk"),
    *("grape", "olive", "sea", "bee", "oven", "barrel", "cellar", "summer"),
)


def embed(text: str) -> np.ndarray:
    """A bag of words; replace it by your embedding model."""
    vector = np.array([text.lower().count(word) for word in WORDS], np.float32) + 0.01
    return vector / np.linalg.norm(vector)


def embed_all(questions: Sequence[Question]) -> np.ndarray:
    return np.stack([embed(question.query) for question in questions])


def write_index(path: Path, documents: list[Document]) -> None:
    index = faiss.index_factory(len(WORDS), "IVF64,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.stack([embed(document.text) for document in documents])
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 32
    faiss.write_index(index, str(path))


async def main(folder: Path) -> None:
    draw = random.Random(0)
    documents = [Document(f"d{number}", " ".join(draw.choices(WORDS, k=24))) for number in range(3000)]
    write_index(folder / "index.faiss", documents)
    make_model(
        folder / "model",
        texts=[document.text for document in documents[:100]],
        layers=2,
        hidden_size=64,
        vocab_size=400,
        max_position_embeddings=2048,
    )
    builder = PromptBuilder(question_template="{query}", tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    settings = EngineSettings(device_tokens=16384, dtype="float32", device="cpu")
    worker = EngineWorker(TieredEngine.load(str(folder / "model"), settings))
    orderer = Orderer(capacity_tokens=16384, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    questions = [Question(f"What do {' and '.join(draw.sample(WORDS, 2))} need?", max_tokens=8) for _ in range(40)]
    with PartitionedSearch(folder / "index.faiss", partitions=8, resident=2) as search:
        server = ordered_batches(
            EmbeddedStreams(worker),
            PartitionedRetrieval(search, embed_all, documents.__getitem__, top_k=4),
            orderer=orderer,
            builder=builder,
            prompts="token_ids",
            kv_limit=8192,
        )
        async with server:
            async for _, answer in server.batch(questions):
                if isinstance(answer, Exception):
                    raise answer
        for event in server.trace:
            if event.worker == "retrieval" and event.event == "ended":
                print(f"searched in a batch of {event.batch:3}, {event.partitions} partitions in memory")
        chosen = [event.batch for event in server.trace if event.worker == "generation" and event.event == "began"]
        print(f"generated at most {max(chosen)} at once, {chosen[-1]} at the end")
        answers = sum(event.worker == "generation" and event.event == "ended" for event in server.trace)
        print(f"answered {answers} questions, {search.read_bytes:,} bytes of the index read")
    worker.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
