"""LangGraph, LangChain and Haystack on one workflow server with shared searches and generations.

    pip install '.[torch,retrieval,proxy,langchain,haystack]' langgraph
    python examples/shared_workflows.py

The model has random weights, so nothing is downloaded: times and cached tokens are real, answers are not.
"""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import faiss
import numpy as np
from haystack import Pipeline
from langgraph.graph import END, START, StateGraph
from transformers import AutoTokenizer

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.workflows import SharedWorkflows, ordered_workflows
from ragorder.adapters.workflows.haystack import WorkflowComponent
from ragorder.adapters.workflows.langchain import WorkflowRetriever, workflow_node
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model import make_model
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.workflow import WorkflowTrace, hyde, irg, multistep

WORDS = ("bread", "cheese", "wine", "oil", "salt", "honey", "flour", "milk", "olive", "bee", "oven", "cellar")
QUESTIONS = [f"What do {one} and {other} need?" for one, other in zip(WORDS[:3], WORDS[3:6], strict=True)]


def embed(text: str) -> np.ndarray:
    """A bag of words; replace it by your embedding model."""
    vector = np.array([text.lower().count(word) for word in WORDS], np.float32) + 0.01
    return vector / np.linalg.norm(vector)


def serve(documents: list[Document], observer: Any) -> tuple[SharedWorkflows, EngineWorker]:
    index = faiss.index_factory(len(WORDS), "IVF32,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.stack([embed(document.text) for document in documents])
    index.train(vectors)
    index.add(vectors)
    with tempfile.TemporaryDirectory() as folder:
        texts = [document.text for document in documents[:100]]
        make_model(Path(folder), texts=texts, layers=2, hidden_size=64, vocab_size=400, max_position_embeddings=2048)
        builder = PromptBuilder(question_template="{query}", tokenizer=AutoTokenizer.from_pretrained(folder))
        settings = EngineSettings(device_tokens=16384, dtype="float32", device="cpu")
        worker = EngineWorker(TieredEngine.load(folder, settings))
    engine = EmbeddedStreams(worker)
    orderer = Orderer(capacity_tokens=16384, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    workflows = SharedWorkflows(
        lambda: ordered_workflows(
            engine,
            ContinuousIVF(index, nprobe=16),
            embed,
            documents.__getitem__,
            orderer=orderer,
            builder=builder,
            prompts="token_ids",
            requests=engine.requests,
            observers=[observer],
        )
    )
    return workflows, worker


class Asked(TypedDict, total=False):
    question: str
    answer: str


def langgraph(workflows: SharedWorkflows, question: str) -> str:
    builder = StateGraph(Asked)
    builder.add_node("research", workflow_node(workflows, multistep(topk=2, max_tokens=16).compile()))
    builder.add_edge(START, "research")
    builder.add_edge("research", END)
    return f"{len(builder.compile().invoke({'question': question})['answer'].split())} words"


def langchain(workflows: SharedWorkflows, question: str) -> str:
    """The retriever's documents are in rank order: order them last, with a CacheOrderRetriever around it."""
    retriever = WorkflowRetriever(workflows=workflows, graph=hyde(topk=3, max_tokens=16).compile())
    return f"{len(retriever.invoke(question))} documents"


def haystack(workflows: SharedWorkflows, question: str) -> str:
    pipeline = Pipeline()
    pipeline.add_component("research", WorkflowComponent(workflows, irg(topk=3, rounds=2, max_tokens=16).compile()))
    found = pipeline.run({"research": {"query": question}})["research"]
    return f"{len(found['replies'])} answer, {len(found['documents'])} documents"


def main() -> None:
    draw = random.Random(0)
    documents = [Document(f"d{number}", " ".join(draw.choices(WORDS, k=24))) for number in range(1500)]
    traces: list[WorkflowTrace] = []
    workflows, worker = serve(documents, traces.append)
    with workflows, ThreadPoolExecutor() as threads:
        asked = [(ask, question) for question in QUESTIONS for ask in (langgraph, langchain, haystack)]
        running = [threads.submit(ask, workflows, question) for ask, question in asked]
        for (ask, question), answer in zip(asked, running, strict=True):
            print(f"{ask.__name__:10} {question:32} {answer.result()}")
    worker.close()
    prompts = [piece for trace in traces for piece in trace.pieces if piece.prompt_tokens]
    cached = sum(piece.cached_tokens or 0 for piece in prompts)
    length = sum(piece.prompt_tokens or 0 for piece in prompts)
    print(f"{len(traces)} workflows, cached {cached} of {length} tokens")


if __name__ == "__main__":
    main()
