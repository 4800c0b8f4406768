"""Multi-step questions on the embedded engine: searches and generations of all requests share their time.

    pip install '.[torch,retrieval,proxy]'
    python examples/workflow.py [trace.jsonl]
    ragorder workflow trace trace.jsonl --plot wavefront.png

The model has random weights, so that nothing is downloaded: times and cached tokens are real, answers are not.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import faiss
import numpy as np
from transformers import AutoTokenizer

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.workflows import TraceLog, ordered_workflows
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.workflow import hyde, irg, multistep

WORDS = (
    *("bread", "cheese", "wine", "oil", "salt", "honey", "flour", "milk"),
    *("grape", "olive", "sea", "bee", "oven", "barrel", "cellar", "summer"),
)
GRAPHS = [make(topk=3, max_tokens=16).compile() for make in (hyde, irg, multistep)]


def embed(text: str) -> np.ndarray:
    """A bag of words; replace it by your embedding model."""
    vector = np.array([text.lower().count(word) for word in WORDS], np.float32) + 0.01
    return vector / np.linalg.norm(vector)


def corpus(count: int = 3000) -> list[Document]:
    draw = random.Random(0)
    return [Document(f"d{number}", " ".join(draw.choices(WORDS, k=24))) for number in range(count)]


async def main(trace: Path) -> None:
    documents = corpus()
    index = faiss.index_factory(len(WORDS), "IVF64,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.stack([embed(document.text) for document in documents])
    index.train(vectors)
    index.add(vectors)
    with tempfile.TemporaryDirectory() as folder:
        texts = [document.text for document in documents[:100]]
        make_model(Path(folder), texts=texts, layers=2, hidden_size=64, vocab_size=400, max_position_embeddings=2048)
        builder = PromptBuilder(question_template="{query}", tokenizer=AutoTokenizer.from_pretrained(folder))
        settings = EngineSettings(device_tokens=16384, dtype="float32", device="cpu")
        worker = EngineWorker(TieredEngine.load(folder, settings))
    orderer = Orderer(capacity_tokens=16384, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    engine = EmbeddedStreams(worker)
    trace.unlink(missing_ok=True)
    with TraceLog(trace) as log:
        async with ordered_workflows(
            engine,
            ContinuousIVF(index, nprobe=32),
            embed,
            documents.__getitem__,
            orderer=orderer,
            builder=builder,
            prompts="token_ids",
            requests=engine.requests,
            observers=[log],
        ) as server:
            for graph in GRAPHS:
                questions = [f"What do {' and '.join(pair)} need?" for pair in zip(WORDS[:4], WORDS[4:], strict=False)]
                async for number, result in server.batch(graph, questions):
                    if isinstance(result, Exception):
                        raise result
                    prompts = [piece for piece in result.trace.pieces if piece.prompt_tokens]
                    cached = sum(piece.cached_tokens or 0 for piece in prompts)
                    length = sum(piece.prompt_tokens or 0 for piece in prompts)
                    print(f"{graph.name:10} {questions[number]:32} cached {cached} of {length} tokens")
    worker.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "trace.jsonl")))
