"""Plan of a memory budget: weights, KV and workspace (RAGDoll Equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ragorder.errors import RagorderError
from ragorder.pipelining.placement.plan import LEAST_STEP, fit_device, fit_host, step_sizes

# Tokens of a request that must fit into any budget.
_REQUEST_TOKENS = 2048
# Minimum share for KV of the memory beside the workspace while weights stream.
_KV_SHARE = 0.25


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
    held: bool = False,
) -> MemoryPlan:
    """Plan within the budgets, as `plan_placement` does: the whole model if it fits with one request, else a ring and
    the layers beside it. `longest` is the tokens of a request, `device_tokens` the exact KV, `wanted_tokens` the most
    useful KV. Steps of `max_batch_tokens` are `held` if they fit at all, and smaller otherwise. Raises BudgetError."""
    request = device_tokens or min(longest or _REQUEST_TOKENS, _REQUEST_TOKENS)
    least_kv, least_step = needs.kv(request), min(LEAST_STEP, max_batch_tokens)
    least = needs.outside + needs.slot + needs.workspace(least_step) + least_kv
    if device_bytes < least:
        raise BudgetError(
            f"device_bytes is {device_bytes}, and {least - device_bytes} bytes are missing: the weights outside the "
            f"layers take {needs.outside} bytes, one layer {needs.slot}, a step of {least_step} tokens "
            f"{needs.workspace(least_step)}, the KV of one request of {request} tokens {least_kv}. Give device_bytes "
            f"{format_bytes(least)} or more, or a smaller device_tokens or max_model_len"
        )
    fit = partial(fit_device, device_bytes, slot=needs.slot, layers=len(needs.layers), workspace=needs.workspace)
    steps = step_sizes(max_batch_tokens, least_step)
    kv = least_kv if device_tokens is None else max(1, device_tokens // needs.block_tokens) * needs.block
    found = (fit(fixed=needs.outside + kv, steps=steps[:1]) if held else None) or fit(
        fixed=needs.outside + kv, steps=steps
    )
    assert found is not None
    if device_tokens is None:
        most = device_bytes if wanted_tokens is None else max(least_kv, needs.kv(wanted_tokens))
        if found.layers < len(needs.layers):
            left = device_bytes - needs.outside - needs.workspace(found.step_tokens)
            kv = max(least_kv, min(int(left * _KV_SHARE), left - needs.slot, most)) // needs.block * needs.block
            found = fit(fixed=needs.outside + kv, steps=[found.step_tokens])
            assert found is not None
        more = max(0, min(found.free, most - kv)) // needs.block * needs.block
        kv, found = kv + more, replace(found, free=found.free - more)
    streamed = len(needs.layers) - found.layers
    in_host, host_kv = fit_host(host_bytes - (needs.staging if streamed else 0), streamed, needs.slot)
    return MemoryPlan(
        found.step_tokens, kv // needs.block, found.layers, found.slots, in_host, host_kv, device_bytes - found.free
    )


def format_bytes(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 4 * size:
            return f"{-(-nbytes // size)}{unit}"
    return str(nbytes)
