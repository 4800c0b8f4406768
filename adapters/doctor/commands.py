"""Commands that serve a placement: ragorder's engine, vLLM and llama.cpp."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ragorder.pipelining.placement.base import PARTITIONS
from ragorder.pipelining.placement.budgets import format_bytes
from ragorder.pipelining.placement.costs import PlacementCosts
from ragorder.pipelining.placement.plan import PlannedPlacement, plan_placement

_GIB = 1 << 30
# llama.cpp's default for the tokens of one computation.
_UBATCH = 512


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """`notes`: what the engine cannot do, or names otherwise."""

    words: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((shlex.join(self.words), *self.notes))


@dataclass(frozen=True, slots=True)
class Served:
    """What a placement is of: a model (folder or name), the engine's `dtype` and `device`, and an index file."""

    model: str
    dtype: str | None = None
    device: str | None = None
    index: str | None = None


def _ragorder(placement: PlannedPlacement, served: Served) -> ServingCommand:
    options: dict[str, object] = {"model": served.model, "dtype": served.dtype, "device": served.device}
    notes = []
    if served.index is None:
        options |= placement.engine_settings
    else:
        options |= {"corpus": "CORPUS", "index": served.index, **_budgets(placement)}
        notes = list(_notes_on_questions(placement.costs))
    if "disk_bytes" in options:
        options["disk_path"] = "FOLDER"
    return ServingCommand(("ragorder", "engine", *_words(options)), tuple(notes))


def _notes_on_questions(costs: PlacementCosts) -> Iterator[str]:
    prompt, answer, parts = costs.workload.prompt_tokens, costs.workload.answer_tokens, len(costs.index.partitions)
    yield (
        "CORPUS is the folder of the index's documents. The engine divides the budgets in the same way, but for the "
        f"longest prompt of the corpus instead of {prompt:,} tokens and {answer:,} of an answer, and again as the load "
        "changes."
    )
    if not costs.estimated:
        yield "It plans with usual rates, corrected by the times that it measures, and not with this profile."
    if parts > PARTITIONS:
        yield f"It cuts the index into {PARTITIONS} partitions."


def _budgets(placement: PlannedPlacement) -> dict[str, int]:
    budgets, used = placement.budgets, placement.footprint.total(placement)
    device, host = (used.device, used.host) if budgets.unified else (budgets.device_bytes, budgets.host_bytes)
    return {"device_bytes": device, "host_bytes": host} | ({"disk_bytes": budgets.disk_bytes} if used.disk else {})


def _vllm(placement: PlannedPlacement, served: Served) -> ServingCommand:
    placement = _on_device(placement)
    costs, weights = placement.costs, placement.weights
    options: dict[str, object] = {
        "dtype": served.dtype,
        "max_model_len": costs.workload.prompt_tokens + costs.workload.answer_tokens,
        "max_num_seqs": placement.batch,
        "max_num_batched_tokens": placement.step_tokens,
        "kv_cache_memory_bytes": placement.kv.device,
        "cpu_offload_gb": _gib(placement.streamed * costs.model.slot),
        "kv_offloading_size": _gib(placement.kv.host),
    }
    notes = ["vLLM has CUDA graphs and buffers of its own: if memory is short, lower --kv-cache-memory-bytes."]
    if weights.disk:
        missing = format_bytes(weights.disk * costs.model.slot)
        notes.append(f"vLLM streams no weights from the disk: {missing} more of host memory are needed.")
    return ServingCommand(("vllm", "serve", served.model, *_words(options)), tuple(notes))


def _llama_cpp(placement: PlannedPlacement, served: Served) -> ServingCommand:
    placement = _on_device(placement)
    costs, weights = placement.costs, placement.weights
    tokens = placement.kv.device // costs.model.kv_token
    options: dict[str, object] = {
        "model": "MODEL.gguf",
        "n_gpu_layers": weights.device + (not placement.streamed),
        "ctx_size": tokens,
        "parallel": placement.batch,
        "batch_size": placement.step_tokens,
        "ubatch_size": min(placement.step_tokens, _UBATCH),
    }
    notes = [
        f"Convert {served.model} to MODEL.gguf first (convert_hf_to_gguf.py). A quantised file is smaller than "
        "planned: more layers fit.",
        "Layers that are not on the GPU are computed by the CPU. The file is mapped, so that layers beyond host memory "
        "are read from the disk.",
    ]
    return ServingCommand(("llama-server", *_words(options)), tuple(notes))


def _on_device(placement: PlannedPlacement) -> PlannedPlacement:
    if not placement.kv_host_layers:
        return placement
    return plan_placement(placement.budgets, placement.costs, backlog=placement.backlog, host_kv=False)


def _words(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))


def _gib(size: int) -> str | None:
    # Rounded up, so that all of it has room.
    return f"{-(-100 * size // _GIB) / 100:.2f}" if size else None


COMMANDS: Mapping[str, Callable[[PlannedPlacement, Served], ServingCommand]] = {
    "ragorder": _ragorder,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
}
