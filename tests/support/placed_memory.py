"""Memory of a model and an index that are placed as planned: run as a program, in a process of its own.

With a folder alone it measures the model's workspace. With a budget it prints JSON: bytes planned, the peak of the
process's resident memory above what libraries alone had taken before, the plan, and the engine's and search's own
account of their placement.
"""

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

from support import families

VOCABULARY = 2000
PROMPT, ANSWER = 120, 8


def make_model(folder: Path, *, layers: int, hidden: int) -> Path:
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), hidden // 64)
    model = families.make_model("Llama", vocab_size=VOCABULARY, max_position_embeddings=2048, **sizes, **heads)
    model.save_pretrained(folder)
    return folder


def make_index(path: Path, *, vectors: int) -> Path:
    import faiss
    import numpy as np

    made = faiss.index_factory(64, "IVF64,Flat")
    draw = np.random.default_rng(0)
    made.train(draw.random((4000, 64), dtype=np.float32))
    for _ in range(10):
        made.add(draw.random((vectors // 10, 64), dtype=np.float32))
    faiss.write_index(made, str(path))
    return path


def serve(model: Path, index: Path, placement: Any) -> Any:
    """An engine and a search that are placed so, both used; kept by the caller."""
    import numpy as np

    from ragorder.kernels.engine import EngineSettings, TieredEngine
    from ragorder.pipelining.batching.partitioned import PartitionedSearch

    settings = dict(placement.engine_settings)
    engine = TieredEngine.load(model, EngineSettings(device="cpu", max_model_len=PROMPT + ANSWER, **settings))
    search = PartitionedSearch(index, len(placement.costs.index.partitions), resident=placement.partitions, nprobe=64)
    queries = np.random.default_rng(1).random((placement.batch, 64), dtype=np.float32)
    done = Event()

    def retrieve() -> None:
        while not done.is_set():
            for _ in search.search(queries, 5):
                pass

    # Both at once, as decoupled workers do: their peaks add up.
    with ThreadPoolExecutor(1) as other:
        searched = other.submit(retrieve)
        try:
            _generate(engine, placement, settings["device_tokens"])
        finally:
            done.set()
        searched.result()
    return engine, search


def _generate(engine: Any, placement: Any, device_tokens: int) -> None:
    """Documents in every block of the pool."""
    from ragorder.kernels.engine import Request, Sampling

    random = Random(0)
    count = max(placement.batch, device_tokens // PROMPT + 1)
    for start in range(0, count, placement.batch):
        batch = [
            Request(random.choices(range(VOCABULARY), k=PROMPT), (), Sampling(ANSWER, ignore_eos=True))
            for _ in range(min(placement.batch, count - start))
        ]
        assert all(each.error is None for each in engine.generate(batch))


def measure(folder: Path) -> None:
    """Write the sizes of the model, with its measured workspace, beside it."""
    from ragorder.eval.suites.profiling.placement_engine import PlacedEngine
    from ragorder.pipelining.batching import Budgets, Workload

    workload = Workload(prompt_tokens=PROMPT, answer_tokens=ANSWER)
    engine = PlacedEngine(folder / "model", Budgets("900MiB", 0), workload, batch=4, device="cpu")
    (folder / "model.json").write_text(engine.sizes.model_dump_json(), "utf-8")
    engine.close()


def main(folder: Path, host_bytes: int) -> None:
    from ragorder.eval.suites.profiling.placement_engine import MemoryPeak
    from ragorder.kernels.model_sizes import model_sizes
    from ragorder.pipelining.batching import Budgets, EstimatedCosts, ModelSizes, Rates, Workload, plan_placement
    from ragorder.pipelining.placement.base import Placement
    from ragorder.pipelining.placement.profile import index_sizes

    def planned(model: Path, index: Path, size: int) -> Any:
        measured = model.with_suffix(".json")
        costs = EstimatedCosts(
            ModelSizes.model_validate_json(measured.read_text("utf-8")) if measured.exists() else model_sizes(model),
            Rates.of_a_cpu(),
            index_sizes(index, 16),
            Workload(prompt_tokens=PROMPT, answer_tokens=ANSWER),
            batches=(1, 2, 4),
        )
        return plan_placement(Budgets(size, size, unified=True), costs)

    # Libraries and their threads are there before it counts.
    tiny = make_model(folder / "tiny", layers=2, hidden=64), make_index(folder / "tiny.faiss", vectors=5000)
    for each in serve(*tiny, planned(*tiny, 16 << 20)):
        each.close()
    model, index = folder / "model", folder / "index.faiss"
    placement = planned(model, index, host_bytes)
    gc.collect()
    peak = MemoryPeak(cuda=False)
    engine, search = serve(model, index, placement)
    used = placement.footprint.total(placement)
    sys.stdout.write(
        json.dumps(
            {
                "planned": used.device + used.host,
                "measured": peak.taken(),
                "plan": {each.name: asdict(placement)[each.name] for each in fields(Placement)},
                "placed": asdict(replace(engine.placement, partitions=search.resident)),
            }
        )
    )
    engine.close()
    search.close()


if __name__ == "__main__":
    if sys.argv[2:]:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        measure(Path(sys.argv[1]))
