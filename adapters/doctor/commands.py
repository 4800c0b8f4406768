"""Commands that serve a placement: ragorder's engine, vLLM and llama.cpp."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ragorder.pipelining.placement.budgets import format_bytes
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


def _ragorder(placement: PlannedPlacement, model: str, dtype: str | None) -> ServingCommand:
    options: dict[str, object] = {"model": model, "dtype": dtype, **placement.engine_settings}
    if "disk_bytes" in options:
        options["disk_path"] = "FOLDER"
    return ServingCommand(("ragorder", "engine", *_words(options)))


def _vllm(placement: PlannedPlacement, model: str, dtype: str | None) -> ServingCommand:
    placement = _on_device(placement)
    costs, weights = placement.costs, placement.weights
    options: dict[str, object] = {
        "dtype": dtype,
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
    return ServingCommand(("vllm", "serve", model, *_words(options)), tuple(notes))


def _llama_cpp(placement: PlannedPlacement, model: str, dtype: str | None) -> ServingCommand:
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
        f"Convert {model} to MODEL.gguf first (convert_hf_to_gguf.py). A quantised file is smaller than planned: more "
        "layers fit.",
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


COMMANDS: Mapping[str, Callable[[PlannedPlacement, str, str | None], ServingCommand]] = {
    "ragorder": _ragorder,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
}
"""From a placement, a model (folder or name) and its dtype."""
