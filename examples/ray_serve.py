"""Two engines on Ray Serve: questions about the same documents go to the engine that has them.

    pip install '.[ray,torch,live]'
    python examples/ray_serve.py [port]

The model has random weights, so nothing is downloaded: cached tokens are real, answers are not.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import openai
import ray
from ray import serve

from ragorder.adapters.ray import EmbeddedEngine, make_application
from ragorder.kernels.engine import EngineSettings
from ragorder.kernels.random_model import make_model

SUBJECTS = {
    "bread": ("flour", "oven", "salt", "yeast"),
    "cheese": ("milk", "cellar", "rind", "salt"),
    "wine": ("grape", "barrel", "cellar", "press"),
    "oil": ("olive", "press", "summer", "jar"),
    "honey": ("bee", "comb", "summer", "jar"),
    "soap": ("oil", "lye", "mould", "salt"),
}


def documents(subject: str) -> list[dict[str, str]]:
    """Replace it by your documents."""
    words = SUBJECTS[subject]
    return [{"id": f"{subject}-{word}", "text": f"{subject} needs {word}, and {word} is dear. " * 12} for word in words]


def ask(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    draw = random.Random(0)
    questions, cached, prompts, engines = Counter(), Counter(), Counter(), {}
    for number in range(36):
        subject = draw.choice([*SUBJECTS])
        # As if retrieved: three of the four documents, in some order.
        retrieved = {"documents": draw.sample(documents(subject), 3), "query": f"{number}. What does {subject} need?"}
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=[], max_tokens=4, extra_body={"ragorder": retrieved}
        )
        engine, usage = raw.headers["x-ragorder-replica"], raw.parse().usage
        questions[engine] += 1
        cached[engine] += usage.prompt_tokens_details.cached_tokens
        prompts[engine] += usage.prompt_tokens
        engines.setdefault(subject, Counter())[engine] += 1
    for engine, count in questions.items():
        print(f"engine {engine}: {count} questions, {cached[engine]} of {prompts[engine]} prompt tokens cached")
    for subject, counts in engines.items():
        print(f"{subject}: {max(counts.values())} of {sum(counts.values())} questions at one engine")


def main(port: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = [document["text"] for subject in SUBJECTS for document in documents(subject)]
        make_model(Path(folder), texts=texts, layers=2, hidden_size=64, vocab_size=400, max_position_embeddings=2048)
        settings = EngineSettings(device_tokens=8192, dtype="float32", device="cpu")
        application = make_application(
            EmbeddedEngine(folder, settings),
            replicas={"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}},
            ingress={"ray_actor_options": {"num_cpus": 0.5}},
        )
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(application)
            ask(f"http://127.0.0.1:{port}/v1")
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
