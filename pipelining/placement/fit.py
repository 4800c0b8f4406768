"""What fits within memory budgets (RAGDoll Eq. 2, 3)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ragorder.errors import RagorderError
from ragorder.pipelining.placement.base import KV_BUFFERS, ModelSizes, Placement, Spread, pool_spread
from ragorder.pipelining.placement.budgets import Budgets

LEAST_STEP = 64
"""Tokens of the smallest planned step."""

STAGES = 3
"""Pinned host buffers that layers pass from the disk to a GPU."""

# Share of the device for the workspace of streamed layers: a larger step leaves fewer layers on the device.
_WORKSPACE_SHARE = 0.125
# Buffers of streamed layers: one is computed, the next is ready, one more is read.
_SLOTS = 3


class PlacementError(RagorderError, ValueError):
    """A budget below one layer and one request, or a prompt above what the model can hold."""


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """What fits on the device. `slots`: buffers for the other layers; `free`: bytes left."""

    layers: int
    slots: int
    step_tokens: int
    free: int


def fit_device(
    device_bytes: int, *, fixed: int, slot: int, layers: int, workspace: Callable[[int], int], steps: Iterable[int]
) -> DeviceFit | None:
    """Fit `layers` of `slot` bytes beside `fixed` bytes and the `workspace` of a step (Eq. 2); None: not even one fits.

    Choose the largest step with room for all layers, else one with a moderate workspace, or the smallest.
    """
    best: tuple[bool, bool, int, int] | None = None
    for step in steps:
        needed = workspace(step)
        fitting = (device_bytes - fixed - needed) // slot
        if fitting >= 1:
            whole, moderate = fitting >= layers, needed <= _WORKSPACE_SHARE * device_bytes
            rank = whole, moderate, step if whole or moderate else -step, fitting
            best = rank if best is None else max(best, rank)
    if best is None:
        return None
    whole, _, step, fitting = best
    slots = 0 if whole else min(_SLOTS, fitting)
    staying = layers if whole else fitting - slots
    left = device_bytes - fixed - workspace(abs(step)) - (staying + slots) * slot
    return DeviceFit(staying, slots, abs(step), left)


def fit_pool(
    pool: int, layers: int, host_bytes: int, staging: int, fit: Callable[[int], DeviceFit | None]
) -> tuple[int, DeviceFit] | None:
    """Fit a pool of KV on the device, else the KV of the fewest `layers` in `host_bytes` that leave a whole ring of
    buffers for weights, or one. Streamed layers need `staging` there. `fit` places the rest beside the pool on the
    device. Return the layers with KV in host memory, and the fit; None if nothing fits."""
    on_device = fit(pool)
    if on_device is not None:
        return 0, on_device

    def fitted(in_host: int, ring: int) -> DeviceFit | None:
        found = fit(pool_spread(pool, layers, in_host).device)
        return found if found is not None and (not found.slots or 0 < ring <= found.slots) else None

    def fits(in_host: int, ring: int) -> bool:
        return fitted(in_host, ring) is not None

    for ring, limit in ((_SLOTS, host_bytes - staging), (1, host_bytes - staging), (0, host_bytes)):
        # So few that all of them are in buffers save nothing.
        tried = range(KV_BUFFERS + 1, min(layers, max(0, limit) // -(-pool // layers)) + 1)
        place = bisect_left(tried, True, key=partial(fits, ring=ring))
        if place < len(tried) and (found := fitted(tried[place], ring)) is not None:
            return tried[place], found
    return None


def fit_host(host_bytes: int, streamed: int, slot: int) -> tuple[int, int]:
    """Return the streamed layers in host memory (Eq. 3), and the bytes left."""
    layers = min(streamed, max(0, host_bytes) // slot)
    return layers, max(0, host_bytes) - layers * slot


def step_sizes(most: int, least: int) -> list[int]:
    """Return the tried tokens of the largest step: halves of `most`, down to `least`."""
    sizes = []
    while most > least:
        sizes.append(most)
        most //= 2
    return [*sizes, least]


def place_pool(
    budgets: Budgets, model: ModelSizes, *, device_tokens: int, batch: int, step_tokens: int, held: bool = False
) -> Placement:
    """Place a model around a given pool of KV, as `plan_placement` does around the pool that it chooses.

    `held`: steps have `step_tokens` if they fit at all. Raises PlacementError.
    """
    layers, block = len(model.layers), model.kv(1)
    pool = max(1, device_tokens // model.block_tokens) * block
    steps = step_sizes(step_tokens, min(LEAST_STEP, step_tokens))

    def place(tried: Iterable[int]) -> tuple[int, DeviceFit] | None:
        def fit(on_device: int) -> DeviceFit | None:
            return fit_device(
                budgets.device_bytes,
                fixed=model.outside + on_device,
                slot=model.slot,
                layers=layers,
                workspace=partial(model.workspace, requests=batch),
                steps=tried,
            )

        return fit_pool(pool, layers, budgets.host_bytes, model.staging, fit)

    placed = (place(steps[:1]) if held else None) or place(steps)
    if placed is None:
        in_host = min(layers, max(0, budgets.host_bytes - model.staging) // -(-pool // layers))
        kv = min(model.kv(device_tokens), pool_spread(pool, layers, in_host).device)
        least, needed = least_device(model, kv, f"one request of {device_tokens} tokens", steps[-1], batch)
        otherwise = "or a smaller device_tokens or max_model_len"
        raise PlacementError(missing("device_bytes", budgets.device_bytes, least, needed, otherwise))
    in_host, found = placed
    streamed = layers - found.layers
    host_left = budgets.host_bytes - pool_spread(pool, layers, in_host).host - (model.staging if streamed else 0)
    host_layers, host_kv = fit_host(host_left, streamed, model.slot)
    return Placement(
        weights=Spread(found.layers, host_layers, streamed - host_layers),
        kv=Spread(pool, host_kv),
        partitions=0,
        batch=min(batch, found.step_tokens),
        step_tokens=found.step_tokens,
        slots=found.slots,
        kv_host_layers=in_host,
    )


def least_device(model: ModelSizes, kv: int, of: str, step_tokens: int, requests: int) -> tuple[int, str]:
    """Return the least bytes of a device for one layer and the `kv` bytes `of` something, and their parts in words."""
    workspace = model.workspace(step_tokens, requests)
    return model.outside + model.slot + kv + workspace, (
        f"the weights outside the layers take {model.outside} bytes, one layer {model.slot}, the KV of {of} {kv}, "
        f"a step of {step_tokens} tokens {workspace}"
    )


def missing(name: str, given: int, least: int, needed: str, otherwise: str) -> str:
    return (
        f"{name} is {given}, and {least - given} bytes are missing: {needed}. Give {name} {least} or more, {otherwise}"
    )
