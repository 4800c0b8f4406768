"""Answer a dataset with Ray Data, planned in shards so that engines reuse their prefix cache.

    pip install '.[ray,eval]'
    python examples/ray_data.py

Runs on this machine. The engine is a simulated one, which counts the cached tokens as vLLM does: put
`ray.data.llm.build_processor` or an actor with your own in its place. The dataset is served as it comes, and planned.
"""

from __future__ import annotations

import random
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset

from ragorder.adapters.ray_data import plan_dataset
from ragorder.eval.engines.sim import SimEngine

REQUESTS = 2000
DOCUMENT_TOKENS = 200


def requests() -> list[dict[str, Any]]:
    """Questions on 100 topics: five of the ten documents of one, best first."""
    rng = random.Random(0)
    topics = [rng.randrange(100) for _ in range(REQUESTS)]
    return [
        {"id": f"q{number}", "documents": [f"d{topic * 10 + each}" for each in rng.sample(range(10), 5)]}
        for number, topic in enumerate(topics)
    ]


class Engine:
    """An engine with room for about eight prompts."""

    def __init__(self) -> None:
        self._engine = SimEngine(block_size=16, capacity_tokens=8192)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        cached, prompt = [], []
        for id, documents in zip(batch["id"], batch["documents"], strict=True):
            tokens = list(range(64))
            for document in documents:
                first = 1000 * (1 + int(document[1:]))
                tokens += range(first, first + DOCUMENT_TOKENS)
            question = 10_000_000 + 100 * int(id[1:])
            done = self._engine.generate([*tokens, *range(question, question + 20)])
            cached.append(done.cached_tokens)
            prompt.append(done.prompt_tokens)
        return {"id": batch["id"], "cached": cached, "prompt": prompt}


def serve(dataset: Dataset) -> tuple[int, float]:
    """The number of answers, and the cached share of the prompt tokens."""
    answers = dataset.map_batches(
        Engine, batch_format="numpy", batch_size=256, compute=ActorPoolStrategy(size=2), num_cpus=0.25
    ).take_all()
    return len({answer["id"] for answer in answers}), sum(answer["cached"] for answer in answers) / sum(
        answer["prompt"] for answer in answers
    )


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items(requests(), override_num_blocks=8)
    for label, dataset in (
        ("as it comes", rows),
        ("planned", plan_dataset(rows, shards=4, document_tokens=DOCUMENT_TOKENS)),
    ):
        answered, cached = serve(dataset)
        print(f"{label}: {answered} answers, cached {100 * cached:.0f} % of the prompt tokens")


if __name__ == "__main__":
    main()
