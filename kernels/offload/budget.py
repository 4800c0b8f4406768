"""Plan of a memory budget: weights, KV and workspace (RAGDoll Equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragorder.errors import RagorderError

__all__ = ["BudgetError", "MemoryNeeds", "MemoryPlan", "format_bytes", "plan_memory"]

# Tokens of a request that must fit into any budget, and of the smallest step.
_REQUEST_TOKENS = 2048
_LEAST_STEP = 64
# Minimum share for KV of the memory beside the workspace while weights stream.
_KV_SHARE = 0.25
# Share of the budget for the largest step's workspace while weights stream.
_WORKSPACE_SHARE = 0.125
# Slots of the ring in the largest step: one layer is computed, one is ready, one is read.
_SLOTS = 3
# Layers' share of the host budget: they are read in every step, KV only when documents recur.
_HOST_LAYERS_SHARE = 0.75


class BudgetError(RagorderError, ValueError):
    """A budget below one layer and one request. The message says what is missing and what to change."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model needs; `workspace` by tokens of a step, `staging` in pinned host memory."""

    outside: int
    layers: Sequence[int]
    block: int
    block_tokens: int
    workspace: Callable[[int], int]
    staging: int = 0

    @property
    def slot(self) -> int:
        return max(self.layers)

    def kv(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Tokens of the largest step, KV blocks, layers and slots on the device; layers and KV bytes in the host."""

    step_tokens: int
    blocks: int
    device_layers: int
    slots: int
    host_layers: int
    host_kv_bytes: int
    device_bytes: int

    @property
    def streams(self) -> bool:
        return self.slots > 0


def plan_memory(
    device_bytes: int,
    host_bytes: int,
    needs: MemoryNeeds,
    *,
    longest: int | None,
    device_tokens: int | None = None,
    wanted_tokens: int | None = None,
    max_batch_tokens: int = 8192,
) -> MemoryPlan:
    """Plan within the budgets: the whole model if it fits with one request, else a ring and the layers beside it.
    `longest` is the tokens of a request, `device_tokens` the exact KV, `wanted_tokens` the most useful KV. Raises
    BudgetError."""
    request = device_tokens or min(longest or _REQUEST_TOKENS, _REQUEST_TOKENS)
    least_kv, least_step = needs.kv(request), min(_LEAST_STEP, max_batch_tokens)
    least = needs.outside + needs.slot + needs.workspace(least_step) + least_kv
    if device_bytes < least:
        raise BudgetError(
            f"device_bytes is {device_bytes}, and {least - device_bytes} bytes are missing: the weights outside the "
            f"layers take {needs.outside} bytes, one layer {needs.slot}, a step of {least_step} tokens "
            f"{needs.workspace(least_step)}, the KV of one request of {request} tokens {least_kv}. Give device_bytes "
            f"{format_bytes(least)} or more, or a smaller device_tokens or max_model_len"
        )
    step = max_batch_tokens
    whole = needs.outside + sum(needs.layers) + least_kv
    if device_bytes >= whole + needs.workspace(least_step):
        while step > least_step and whole + needs.workspace(step) > device_bytes:
            step //= 2
        left = device_bytes - whole + least_kv - needs.workspace(step)
        blocks = _blocks(needs, left, least_kv, device_tokens, wanted_tokens)
        used = whole - least_kv + blocks * needs.block + needs.workspace(step)
        return MemoryPlan(step, blocks, len(needs.layers), 0, 0, host_bytes, used)
    beside = needs.outside + needs.slot + least_kv
    while step > least_step and (
        needs.workspace(step) > _WORKSPACE_SHARE * device_bytes or beside + needs.workspace(step) > device_bytes
    ):
        step = max(least_step, step // 2)
    left = device_bytes - needs.outside - needs.workspace(step)
    kv = max(least_kv, min(int(left * _KV_SHARE), left - needs.slot))
    blocks = _blocks(needs, kv, least_kv, device_tokens, wanted_tokens)
    fitting = min((left - blocks * needs.block) // needs.slot, len(needs.layers))
    slots = min(fitting, _SLOTS)
    staying = min(fitting - slots, len(needs.layers) - slots)
    used = needs.outside + needs.workspace(step) + blocks * needs.block + (slots + staying) * needs.slot
    in_host, kv_bytes = _host(host_bytes - needs.staging, needs, len(needs.layers) - staying)
    return MemoryPlan(step, blocks, staying, slots, in_host, kv_bytes, used)


def _blocks(needs: MemoryNeeds, nbytes: int, least: int, device_tokens: int | None, wanted_tokens: int | None) -> int:
    if device_tokens is not None:
        return max(1, device_tokens // needs.block_tokens)
    most = nbytes // needs.block
    if wanted_tokens is not None:
        most = min(most, -(-wanted_tokens // needs.block_tokens))
    return max(most, least // needs.block)


def _host(nbytes: int, needs: MemoryNeeds, streamed: int) -> tuple[int, int]:
    if nbytes <= 0:
        return 0, 0
    if streamed * needs.slot <= nbytes:
        return streamed, nbytes - streamed * needs.slot
    layers = min(streamed, int(nbytes * _HOST_LAYERS_SHARE) // needs.slot)
    return layers, nbytes - layers * needs.slot


def format_bytes(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 4 * size:
            return f"{-(-nbytes // size)}{unit}"
    return str(nbytes)
