"""Multi-step questions on a vector database: known subquestions are searched for together, while answers are written.

    pip install '.[torch,proxy]' qdrant-client
    python examples/vector_database.py [QUESTION …]

Qdrant runs in this process; for a server give AsyncQdrantClient its URL. The documents are Python's standard library.
The model has random weights, so nothing is downloaded and answers make no sense: `OpenAIStreams` is the engine for real
ones (docs/workflows.md).
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import zlib
from pathlib import Path

from qdrant_client import AsyncQdrantClient, models

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.workflows import ordered_workflows
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model, standard_texts
from ragorder.pipelining.workflow import irg, multistep

WIDTH = 256
COLLECTION = "documents"
GRAPHS = [
    multistep(topk=2, rounds=3, plan_tokens=48, max_tokens=24).compile(),
    irg(topk=2, rounds=2, max_tokens=24).compile(),
]
QUESTIONS = ["How do shutil.copy and shutil.copytree differ?", "How is a temporary directory made and removed?"]


def embed(text: str) -> list[float]:
    """A bag of words; replace it by your embedding model."""
    vector = [0.01] * WIDTH
    for word in re.findall(r"[a-z]{4,}", text.lower()):
        vector[zlib.crc32(word.encode()) % WIDTH] += 1
    return vector


async def filled(texts: list[str]) -> AsyncQdrantClient:
    client = AsyncQdrantClient(":memory:")
    vectors = models.VectorParams(size=WIDTH, distance=models.Distance.COSINE)
    await client.create_collection(COLLECTION, vectors_config=vectors)
    points = [
        models.PointStruct(id=number, vector=embed(text), payload={"text": text}) for number, text in enumerate(texts)
    ]
    await client.upsert(COLLECTION, points)
    return client


def load(texts: list[str]) -> TieredEngine:
    settings = EngineSettings(device_tokens=8192, host_bytes=0, dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), texts=texts, layers=2, hidden_size=64, vocab_size=2048, max_position_embeddings=4096)
        return TieredEngine.load(folder, settings)


async def main(questions: list[str]) -> None:
    texts = [text[:400] for text in standard_texts()]
    client = await filled(texts)

    async def search(query: str, k: int) -> list[Document]:
        found = await client.query_points(COLLECTION, query=embed(query), limit=k)
        return [Document(str(point.id), point.payload["text"]) for point in found.points]

    loaded = load(texts[:200])
    builder = PromptBuilder("Answer briefly.", question_template="{query}", tokenizer=loaded.tokenizer)
    worker = EngineWorker(loaded)
    orderer = Orderer(capacity_tokens=8192, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    engine = EmbeddedStreams(worker)
    async with ordered_workflows(
        engine, search, None, None, orderer=orderer, builder=builder, prompts="token_ids", requests=engine.requests
    ) as server:
        for graph in GRAPHS:
            for question in questions:
                trace = (await server.run(graph, question)).trace
                searches = [piece for piece in trace.pieces if piece.worker == "search"]
                early = sum(piece.kind == "speculative" and piece.outcome == "used" for piece in searches)
                due = sum(piece.kind == "due" for piece in searches)
                print(f"{graph.name:10} {question:52} {early} of {due} searches started early")
        spent = server.spending
        print(f"{spent.tokens.wasted} tokens wasted, {spent.tokens.due} used")
    await client.close()
    worker.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or QUESTIONS))
