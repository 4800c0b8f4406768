"""A batch on Ray Data: planned in shards, answered by one engine per shard, and joined by id.

    pip install '.[ray,torch]'
    python examples/ray_data.py            # two embedded engines with random weights: nothing is downloaded
    python examples/ray_data.py MODEL      # Ray's vLLM processor instead, where vLLM is installed

Random weights give real cached tokens, but no real answers.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from ragorder import Document, PromptBuilder
from ragorder.adapters.ray_data import plan_dataset
from ragorder.kernels.random_model import make_model

SYSTEM = "Answer from the documents."
SUBJECTS = {
    "bread": ("flour", "oven", "salt", "yeast", "water", "crust"),
    "cheese": ("milk", "cellar", "rind", "salt", "mould", "cow"),
    "wine": ("grape", "barrel", "cellar", "press", "spring", "cork"),
    "oil": ("olive", "press", "summer", "jar", "harvest", "stone"),
    "honey": ("bee", "comb", "summer", "jar", "clover", "smoke"),
    "soap": ("lye", "mould", "salt", "fat", "ash", "water"),
    "paper": ("wood", "water", "press", "felt", "rag", "size"),
    "glass": ("sand", "ash", "oven", "pipe", "mould", "lead"),
}


def requests(count: int) -> Iterator[dict[str, Any]]:
    """Replace it by your questions, with the documents that were retrieved for each, best first."""
    draw = random.Random(0)
    for number in range(count):
        subject = draw.choice([*SUBJECTS])
        found = draw.sample(SUBJECTS[subject], 4)
        documents = [{"id": f"{subject}/{word}", "text": f"{subject} needs {word}: {word} is dear. "} for word in found]
        yield {"id": f"q{number}", "question": f"{number}. What does {subject} need?", "documents": documents}


class Engine:
    """The embedded engine in an actor, or any other engine: batches arrive in the order of the plan."""

    def __init__(self, folder: str) -> None:
        from ragorder.kernels.engine import EngineSettings, TieredEngine

        # One request at a time in a small cache: hits come from the request before.
        settings = EngineSettings(device_tokens=1024, host_bytes=0, max_requests=1, dtype="float32", device="cpu")
        self.engine = TieredEngine.load(folder, settings)
        self.builder = PromptBuilder(SYSTEM, tokenizer=self.engine.tokenizer)

    def __call__(self, batch: pa.Table) -> pa.Table:
        from ragorder.kernels.engine import Request, Sampling

        rows = batch.to_pylist()
        prompts = [self.builder.build(row["question"], documents_of(row)) for row in rows]
        asked = [
            Request(
                prompt.token_ids,
                [span.end for span in prompt.spans],
                Sampling(max_tokens=2),
                prefix_tokens=prompt.spans[0].start,
            )
            for prompt in prompts
        ]
        answers = [
            {
                "id": row["id"],
                "answer": done.text,
                # Every request has the system prompt in the cache.
                "saved_tokens": max(0, done.cached.total - request.prefix_tokens),
                "document_tokens": request.document_ends[-1] - request.prefix_tokens,
            }
            for row, request, done in zip(rows, asked, self.engine.generate(asked), strict=True)
        ]
        return pa.Table.from_pylist(answers)


def documents_of(row: dict[str, Any]) -> list[Document]:
    return [Document(**each) for each in row["documents"]]


def answer(rows: ray.data.Dataset, folder: str, engines: int) -> list[dict[str, Any]]:
    answers = rows.map_batches(
        Engine,
        fn_constructor_args=(folder,),
        batch_format="pyarrow",
        # Each batch may go to another engine and computes its first prompt again there: larger is better.
        batch_size=512,
        num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=engines),
    )
    return answers.take_all()


def answer_by_vllm(rows: ray.data.Dataset, model: str) -> list[dict[str, Any]]:
    """Ray's own processor, on a CPU; on GPUs leave `placement_group_config` out.

    Its stages wait for one another, and for what comes before: together they must leave one of the cores.
    """
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    stage = {"num_cpus": 0.1}
    config = vLLMEngineProcessorConfig(
        model_source=model,
        # The share is of the machine's memory on a CPU, and of the device's on a GPU: there leave it out as well.
        engine_kwargs={
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "gpu_memory_utilization": 0.2,
        },
        placement_group_config={"bundles": [{"CPU": 0.5}]},
        chat_template_stage=stage,
        tokenize_stage=stage,
        detokenize_stage=stage,
        concurrency=1,
        batch_size=512,
    )
    builder = PromptBuilder(SYSTEM)

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        messages = builder.build(row["question"], documents_of(row)).messages
        return {"id": row["id"], "messages": messages, "sampling_params": {"max_tokens": 2, "temperature": 0}}

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "answer": row["generated_text"]}

    return build_processor(config, preprocess=ask, postprocess=keep)(rows).take_all()


def show(label: str, answers: list[dict[str, Any]]) -> None:
    saved, tokens = (sum(row[name] for row in answers) for name in ("saved_tokens", "document_tokens"))
    print(f"{label:32} {saved:7} of {tokens} document tokens saved")


def main(model: str | None) -> None:
    asked = list(requests(800))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = ray.data.from_items(asked, override_num_blocks=8)
    planned = plan_dataset(rows, shards=4)
    if model is not None:
        answers = answer_by_vllm(planned, model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            texts = [document["text"] for row in asked[:100] for document in row["documents"]]
            make_model(Path(folder), texts=texts, layers=1, hidden_size=64, vocab_size=400)
            show("as they come, two engines:", answer(rows, folder, 2))
            show("one plan, one engine:", answer(plan_dataset(rows, shards=1), folder, 1))
            answers = answer(planned, folder, 2)
            show("planned in shards, two engines:", answers)
    # Answers come in the order of the plan, and are joined by id.
    found = {row["id"]: row["answer"] for row in answers}
    print(f"{sum(row['id'] in found for row in asked)} of {len(asked)} questions answered, {len(found)} answers")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
