"""Plan of a memory budget (RAGDoll Equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ragorder.errors import RagorderError
from ragorder.pipelining.placement.base import pool_spread
from ragorder.pipelining.placement.plan import LEAST_STEP, DeviceFit, fit_device, fit_host, fit_pool, step_sizes

# Tokens of a request that must fit into any budget.
_REQUEST_TOKENS = 2048
# Minimum share for KV of the memory beside the workspace while weights stream.
_KV_SHARE = 0.25


class BudgetError(RagorderError, ValueError):
    """A budget below one layer and one request. The message says what is missing and what to change."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model needs; `workspace` by a step's tokens, `staging` in pinned host memory."""

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
    """`step_tokens` of the largest step; in the host, `host_kv_bytes` of documents and `kv_host_layers` with the
    running batch's KV."""

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
) -> MemoryPlan:
    """Plan within the budgets, as `plan_placement` does: the whole model if it fits with one request (up to `longest`
    tokens), else a ring and layers beside it. `device_tokens` are the exact KV, which goes to the host where it does
    not fit, `wanted_tokens` the most useful. `held`: steps have `max_batch_tokens` if they fit at all. Raises
    BudgetError."""
    layers = len(needs.layers)
    request = device_tokens or min(longest or _REQUEST_TOKENS, _REQUEST_TOKENS)
    least_kv, least_step = needs.kv(request), min(LEAST_STEP, max_batch_tokens)
    kv = least_kv if device_tokens is None else max(1, device_tokens // needs.block_tokens) * needs.block
    steps = step_sizes(max_batch_tokens, least_step)

    def fit(on_device: int, tried: Sequence[int] = steps) -> DeviceFit | None:
        return fit_device(
            device_bytes,
            fixed=needs.outside + on_device,
            slot=needs.slot,
            layers=layers,
            workspace=needs.workspace,
            steps=tried,
        )

    place = partial(fit_pool, kv, layers, 0 if device_tokens is None else host_bytes, needs.staging)
    placed = (place(partial(fit, tried=steps[:1])) if held else None) or place(fit)
    if placed is None:
        in_host = 0 if device_tokens is None else max(0, host_bytes - needs.staging) // -(-kv // layers)
        least_kv = min(least_kv, pool_spread(kv, layers, min(layers, in_host)).device)
        least = needs.outside + needs.slot + needs.workspace(least_step) + least_kv
        raise BudgetError(
            f"device_bytes is {device_bytes}, and {least - device_bytes} bytes are missing: the weights outside the "
            f"layers take {needs.outside} bytes, one layer {needs.slot}, a step of {least_step} tokens "
            f"{needs.workspace(least_step)}, the KV of one request of {request} tokens {least_kv}. Give device_bytes "
            f"{format_bytes(least)} or more, or a smaller device_tokens or max_model_len"
        )
    in_host, found = placed
    if device_tokens is None:
        most = device_bytes if wanted_tokens is None else max(least_kv, needs.kv(wanted_tokens))
        if found.layers < layers:
            left = device_bytes - needs.outside - needs.workspace(found.step_tokens)
            kv = max(least_kv, min(int(left * _KV_SHARE), left - needs.slot, most)) // needs.block * needs.block
            again = fit(kv, [found.step_tokens])
            assert again is not None
            found = again
        more = max(0, min(found.free, most - kv)) // needs.block * needs.block
        kv, found = kv + more, replace(found, free=found.free - more)
    streamed = layers - found.layers
    host_left = host_bytes - (needs.staging if streamed else 0) - pool_spread(kv, layers, in_host).host
    host_layers, host_kv = fit_host(host_left, streamed, needs.slot)
    used = device_bytes - found.free
    return MemoryPlan(
        found.step_tokens, kv // needs.block, found.layers, found.slots, host_layers, host_kv, used, in_host
    )


def format_bytes(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 4 * size:
            return f"{-(-nbytes // size)}{unit}"
    return str(nbytes)
