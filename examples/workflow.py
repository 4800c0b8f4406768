"""Multi-step questions on the embedded engine, with searches and generations of all requests in parallel.

    pip install '.[torch,retrieval,proxy]'
    python examples/workflow.py [trace.jsonl]
    ragorder workflow trace trace.jsonl --plot wavefront.png

The documents are Python's standard library. The model has random weights, so nothing is downloaded: times and cached
tokens are real, answers are not. With `--model smollm2` (docs/vllm.md) or a folder they are, which takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import zlib
from pathlib import Path

import faiss
import numpy as np

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.workflows import TraceLog, ordered_workflows
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model, standard_texts
from ragorder.kernels.smollm2 import smollm2
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.workflow import hyde, irg, multistep

WIDTH = 256
GRAPHS = [
    hyde(topk=2, guess_tokens=32, max_tokens=24).compile(),
    irg(topk=2, rounds=2, max_tokens=24).compile(),
    multistep(topk=2, rounds=3, plan_tokens=48, max_tokens=24).compile(),
]
QUESTIONS = (
    "What does textwrap.dedent do, and when is it of use?",
    "How do shutil.copy and shutil.copytree differ?",
    "Which functions of heapq add an item to a heap?",
    "How is a temporary directory made and removed?",
)


def embed(text: str) -> np.ndarray:
    """A bag of words; replace it by your embedding model."""
    vector = np.full(WIDTH, 0.01, np.float32)
    for word in re.findall(r"[a-z]{4,}", text.lower()):
        vector[zlib.crc32(word.encode()) % WIDTH] += 1
    return vector / np.linalg.norm(vector)


def load(model: str, texts: list[str]) -> TieredEngine:
    settings = EngineSettings(device_tokens=8192, host_bytes=0, dtype="float32", device="cpu")
    if model != "random":
        return TieredEngine.load(smollm2(print) if model == "smollm2" else model, settings)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), texts=texts, layers=2, hidden_size=64, vocab_size=2048, max_position_embeddings=4096)
        return TieredEngine.load(folder, settings)


async def main(model: str, trace: Path) -> None:
    documents = [Document(f"d{number}", text[:400]) for number, text in enumerate(standard_texts())]
    index = faiss.index_factory(WIDTH, "IVF32,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.stack([embed(document.text) for document in documents])
    index.train(vectors)
    index.add(vectors)
    loaded = load(model, [document.text for document in documents[:200]])
    builder = PromptBuilder("Answer briefly.", question_template="{query}", tokenizer=loaded.tokenizer)
    worker = EngineWorker(loaded)
    orderer = Orderer(capacity_tokens=8192, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    engine = EmbeddedStreams(worker)
    trace.unlink(missing_ok=True)
    with TraceLog(trace) as log:
        async with ordered_workflows(
            engine,
            ContinuousIVF(index, nprobe=16),
            embed,
            documents.__getitem__,
            orderer=orderer,
            builder=builder,
            prompts="token_ids",
            requests=engine.requests,
            observers=[log],
        ) as server:
            for graph in GRAPHS:
                async for number, result in server.batch(graph, QUESTIONS):
                    if isinstance(result, Exception):
                        raise result
                    prompts = [piece for piece in result.trace.pieces if piece.prompt_tokens]
                    cached = sum(piece.cached_tokens or 0 for piece in prompts)
                    length = sum(piece.prompt_tokens or 0 for piece in prompts)
                    print(f"{graph.name:10} {QUESTIONS[number]:52} cached {cached} of {length} tokens")
                    if model != "random":
                        print(f"    {result.text.strip()!r}")
    worker.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", nargs="?", type=Path, default=Path("trace.jsonl"))
    parser.add_argument("--model", default="random", metavar="FOLDER|smollm2|random")
    given = parser.parse_args()
    asyncio.run(main(given.model, given.trace))
