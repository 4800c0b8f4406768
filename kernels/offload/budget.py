"""Plan of a memory budget: weights, KV and workspace (RAGDoll Equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ragorder.errors import RagorderError
from ragorder.pipelining.placement.base import pool_spread
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

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Tokens of the largest step, KV blocks, layers and slots on the device; layers, KV bytes of documents, and layers
    with the running batch's KV in the host."""

    step_tokens: int
    blocks: int
    device_layers: int
    slots: int
    host_layers: int
    host_kv_bytes: int
    device_bytes: int
    kv_host_layers: int = 0

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
    kv_host_share: float = 0.0,
) -> MemoryPlan:
    """Plan within the budgets, as `plan_placement` does: the whole model if it fits with one request, else a ring and
    the layers beside it. `longest` is the tokens of a request, `device_tokens` the exact KV, `wanted_tokens` the most
    useful KV, `kv_host_share` the share of layers with KV in the host. Steps of `max_batch_tokens` are `held` if they
    fit at all, and smaller otherwise. Raises BudgetError."""
    in_host = round(kv_host_share * len(needs.layers))
    # The bytes of a block of the pool.
    block = pool_spread(needs.block, len(needs.layers), in_host)
    request = device_tokens or min(longest or _REQUEST_TOKENS, _REQUEST_TOKENS)
    least_kv, least_step = needs.blocks(request) * block.device, min(LEAST_STEP, max_batch_tokens)
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
    kv = least_kv if device_tokens is None else max(1, device_tokens // needs.block_tokens) * block.device
    found = (fit(fixed=needs.outside + kv, steps=steps[:1]) if held else None) or fit(
        fixed=needs.outside + kv, steps=steps
    )
    assert found is not None
    if device_tokens is None:
        most = device_bytes if wanted_tokens is None else max(least_kv, needs.blocks(wanted_tokens) * block.device)
        if in_host:
            most = max(least_kv, min(most, (host_bytes - needs.staging) // block.host * block.device))
        if found.layers < len(needs.layers):
            left = device_bytes - needs.outside - needs.workspace(found.step_tokens)
            kv = max(least_kv, min(int(left * _KV_SHARE), left - needs.slot, most)) // block.device * block.device
            found = fit(fixed=needs.outside + kv, steps=[found.step_tokens])
            assert found is not None
        more = max(0, min(found.free, most - kv)) // block.device * block.device
        kv, found = kv + more, replace(found, free=found.free - more)
    streamed, blocks = len(needs.layers) - found.layers, kv // block.device
    host_left = host_bytes - (needs.staging if streamed else 0) - blocks * block.host
    if in_host and host_left < 0:
        raise BudgetError(
            f"host_bytes is {host_bytes}, and {-host_left} bytes are missing: the KV of {blocks * needs.block_tokens} "
            f"tokens takes {blocks * block.host} bytes there in {in_host} layers. Give host_bytes "
            f"{format_bytes(host_bytes - host_left)} or more, or a smaller kv_host_share or device_tokens"
        )
    host_layers, host_kv = fit_host(host_left, streamed, needs.slot)
    used = device_bytes - found.free
    return MemoryPlan(found.step_tokens, blocks, found.layers, found.slots, host_layers, host_kv, used, in_host)


def format_bytes(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 4 * size:
            return f"{-(-nbytes // size)}{unit}"
    return str(nbytes)
