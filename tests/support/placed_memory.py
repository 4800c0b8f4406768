"""Memory of a model and an index that are placed as planned: run as a program, in a process of its own.

Prints JSON: bytes planned, and the peak of the process's resident memory above what it had before, in use by
libraries alone.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

VOCABULARY = 2000
PROMPT, ANSWER = 120, 8


def make_model(folder: Path, *, layers: int, hidden: int) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_index(path: Path, *, vectors: int, dimension: int = 64) -> Path:
    import faiss
    import numpy as np

    made = faiss.index_factory(dimension, "IVF64,Flat")
    draw = np.random.default_rng(0)
    made.train(draw.random((4000, dimension), dtype=np.float32))
    for _ in range(10):
        made.add(draw.random((vectors // 10, dimension), dtype=np.float32))
    faiss.write_index(made, str(path))
    return path


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def serve(model: Path, index: Path, placement: Any) -> Any:
    """An engine and a search that are placed so, each used once; kept by the caller."""
    import numpy as np

    from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
    from ragorder.pipelining.search.partitioned import PartitionedSearch

    settings = dict(placement.engine_settings)
    engine = TieredEngine.load(model, EngineSettings(device="cpu", max_model_len=PROMPT + ANSWER, **settings))
    search = PartitionedSearch(index, len(placement.costs.index.partitions), resident=placement.partitions, nprobe=64)
    random = Random(0)
    # Documents in every block of the pool.
    count = max(placement.batch, settings["device_tokens"] // PROMPT + 1)
    for start in range(0, count, placement.batch):
        batch = [
            Request(random.choices(range(VOCABULARY), k=PROMPT), (), Sampling(ANSWER, ignore_eos=True))
            for _ in range(min(placement.batch, count - start))
        ]
        assert all(each.error is None for each in engine.generate(batch))
    dimension = 64
    queries = np.random.default_rng(1).random((placement.batch, dimension), dtype=np.float32)
    for _ in range(2):
        for _ in search.search(queries, 5):
            pass
    return engine, search


def main(folder: Path, host_bytes: int) -> None:
    from ragorder.kernels.model_sizes import model_sizes
    from ragorder.pipelining.batching import Budgets, EstimatedCosts, Rates, Workload, plan_placement
    from ragorder.pipelining.batching.index_sizes import index_sizes

    def planned(model: Path, index: Path, size: int) -> Any:
        costs = EstimatedCosts(
            model_sizes(model),
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
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = status("VmRSS")
    served = serve(model, index, placement)
    used = placement.footprint.total(placement)
    sys.stdout.write(
        json.dumps(
            {
                "planned": used.device + used.host,
                "measured": status("VmHWM") - before,
                "parts": {name: part.device + part.host for name, part in placement.footprint.parts(placement)},
                "device_layers": placement.weights.device,
                "partitions": placement.partitions,
                "batch": placement.batch,
            }
        )
    )
    for each in served:
        each.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
