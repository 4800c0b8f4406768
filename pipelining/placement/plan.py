"""Plan of a placement within memory budgets (RAGDoll Eq. 1, 4.2, 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from ragorder.pipelining.placement.base import KV_BUFFERS, Placement, Spread, pool_spread
from ragorder.pipelining.placement.budgets import Budgets, format_bytes
from ragorder.pipelining.placement.costs import Footprint, PlacementCosts, mean_latency_s
from ragorder.pipelining.placement.fit import (
    LEAST_STEP,
    DeviceFit,
    PlacementError,
    fit_device,
    fit_host,
    fit_pool,
    least_device,
    missing,
    step_sizes,
)

WORTHWHILE = 0.01
"""Least gain, as a share of the latency, worth mentioning, or a move."""


def bottleneck(placement: Placement, retrieval_s: float, generation_s: float, partitions: int) -> str:
    if retrieval_s > generation_s:
        absent = partitions - placement.partitions
        if absent:
            return f"the disk, from which retrieval reads {absent} partitions for each batch"
        return "the processor, on which retrieval scans the index"
    if placement.weights.disk:
        return f"the disk, from which generation reads {placement.weights.disk} layers in each step"
    if placement.weights.host or placement.kv_host_layers:
        copied = [f"{placement.weights.host} layers"] * (placement.weights.host > 0)
        copied += [f"the KV of {placement.kv_host_layers}"] * (placement.kv_host_layers > 0)
        return f"the bus from host memory, over which {' and '.join(copied)} are copied in each step"
    return "the device's computation: all layers are on it"


def _table(placement: Placement, budgets: Budgets, footprint: Footprint) -> list[str]:
    parts = [(name, spread) for name, spread in footprint.parts(placement) if spread.total]
    used = footprint.total(placement)
    rows = [("", "device", "host", "disk"), *((name, *_cells(spread)) for name, spread in parts)]
    rows.append(("used", *_cells(used)))
    rows.append(("budget", *_cells(Spread(budgets.device_bytes, budgets.host_bytes, budgets.disk_bytes))))
    if budgets.unified:
        rows.append(("device and host are one", "", format_bytes(used.device + used.host), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in (1, 2, 3))]).rstrip()
        for row in rows
    ]


def _cells(spread: Spread) -> tuple[str, str, str]:
    device, host, disk = (format_bytes(size) if size else "-" for size in (spread.device, spread.host, spread.disk))
    return device, host, disk


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# Increase of memory that `explain` tries.
_MORE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPlacement(Placement):
    """A placement with the inputs of its plan."""

    budgets: Budgets
    costs: PlacementCosts
    backlog: int

    @property
    def footprint(self) -> Footprint:
        return Footprint(self.costs.model, self.costs.index)

    @property
    def generation_s(self) -> float:
        return self.costs.generation_s(self.batch, self.weights, self.step_tokens, self.kv_host_layers)

    @property
    def retrieval_s(self) -> float:
        return self.costs.retrieval_s(self.partitions)

    @property
    def latency_s(self) -> float:
        seconds = partial(
            self.costs.generation_s,
            weights=self.weights,
            step_tokens=self.step_tokens,
            kv_host_layers=self.kv_host_layers,
        )
        return mean_latency_s(self.backlog, self.batch, self.retrieval_s, seconds)

    @property
    def engine_settings(self) -> Mapping[str, int]:
        model, total = self.costs.model, self.footprint.total(self)
        index = self.costs.index
        in_index = index.fixed + index.resident(self.partitions) + index.reading(self.partitions)
        settings = {
            "device_bytes": total.device,
            "host_bytes": total.host - in_index,
            "device_tokens": self.kv.device // model.kv_token,
            "max_requests": self.batch,
            "max_batch_tokens": self.step_tokens,
        }
        return settings | ({"disk_bytes": self.kv.disk} if self.kv.disk else {})

    def with_requests(self, most: int) -> Placement:
        """Return the placement with room for up to `most` requests, if they turn out shorter than planned ones.

        Logits of more requests take unused memory of the device, then KV that is there, up to that of one request.
        Where that is short, the batch is as many as fit.
        """
        model, block = self.costs.model, self.costs.model.kv(1)
        unused = self.budgets.device_bytes - self.footprint.total(self).device
        beyond = 0 if self.kv_host_layers else self.kv.device - model.kv(self.costs.workload.kv_tokens(1))
        more = min(most, self.step_tokens) - self.batch
        if model.row_bytes:
            more = min(more, (unused + beyond // block * block) // model.row_bytes)
        blocks = -(-max(0, more * model.row_bytes - unused) // block)
        return replace(self, batch=self.batch + more, kv=replace(self.kv, device=self.kv.device - blocks * block))

    def explain(self) -> str:
        costs, weights, partitions = self.costs, self.weights, len(self.costs.index.partitions)
        index = f"; of {partitions} partitions of the index {self.partitions} stay in host memory" if partitions else ""
        kv = f"; the KV of {self.kv_host_layers} layers is in host memory" if self.kv_host_layers else ""
        lines = [
            f"Batches of {self.batch} requests, in steps of up to {self.step_tokens:,} tokens. Of {weights.total} "
            f"layers {weights.device} stay on the device, {weights.host} in host memory, {weights.disk} on the disk"
            f"{kv}{index}.",
            "",
            *_table(self, self.budgets, self.footprint),
            "",
            f"Expected: {self.backlog} waiting requests are answered after {_seconds(self.latency_s)} on average; a "
            f"batch takes {_seconds(self.retrieval_s)} of retrieval beside {_seconds(self.generation_s)} of "
            "generation.",
        ]
        if costs.estimated:
            lines.append(
                "These times are estimates from sizes and usual rates, not measurements: "
                "`ragorder profile --placement` measures."
            )
        elif self.step_tokens < min(costs.step_tokens, self.batch * costs.workload.prompt_tokens):
            lines.append(
                f"Times were measured with steps of {costs.step_tokens:,} tokens: with shorter ones prefill takes "
                "longer."
            )
        limit = bottleneck(self, self.retrieval_s, self.generation_s, partitions)
        return "\n".join([*lines, f"Bottleneck: {limit}.", self._what_helps()])

    def _what_helps(self) -> str:
        name, size, shorter_s = min(self._with_more(), key=lambda each: each[2])
        if self.latency_s - shorter_s < WORTHWHILE * self.latency_s:
            return "More memory would not help."
        return f"What would help: {name} of {format_bytes(size)} instead, with which it is {_seconds(shorter_s)}."

    def _with_more(self) -> Iterator[tuple[str, int, float]]:
        budgets = self.budgets
        names = ["host_bytes"] if budgets.unified else ["device_bytes", "host_bytes"]
        for name in names:
            size = int(getattr(budgets, name) * (1 + _MORE))
            # In unified memory the device may use all that the host has.
            sizes: dict[str, Any] = {"device_bytes": size, "host_bytes": size} if budgets.unified else {name: size}
            larger = replace(budgets, **sizes)
            yield name, size, plan_placement(larger, self.costs, backlog=self.backlog).latency_s


def plan_placement(
    budgets: Budgets, costs: PlacementCosts, *, backlog: int | None = None, host_kv: bool = True, held: bool = False
) -> PlannedPlacement:
    """Return the placement within the budgets with the lowest mean latency of `backlog` waiting requests.

    `backlog` defaults to the largest measured batch. All batches and numbers of resident partitions are tried; the
    paper stops where retrieval and generation take equally long (4.4). Remaining memory is for KV of documents. Without
    `host_kv` the running batch's KV stays on the device. `held`: the largest step is that of `costs` if it fits.
    Raises PlacementError.
    """
    backlog = max(costs.batches) if backlog is None else backlog
    if backlog < 1:
        raise ValueError(f"backlog is 1 or more waiting requests, got {backlog}")
    batches = sorted({min(size, backlog, costs.step_tokens) for size in costs.batches})
    placements = (
        placement
        for batch in batches
        for placement in _walk(budgets, costs, batch, backlog, host_kv, [costs.step_tokens] if held else None)
    )
    # Among equals the smaller batch with fewer partitions, which leaves most room for KV of documents.
    by_latency = sorted(placements, key=attrgetter("latency_s"))
    if not by_latency:
        if held:
            return plan_placement(budgets, costs, backlog=backlog, host_kv=host_kv)
        raise PlacementError(_missing(budgets, costs))
    best = by_latency[0]
    on_device = next((each for each in by_latency if not each.kv_host_layers), best)
    # Copies of KV in each step have to be worth it.
    worthwhile = on_device.latency_s - best.latency_s > WORTHWHILE * on_device.latency_s
    return best if worthwhile else on_device


def _walk(
    budgets: Budgets, costs: PlacementCosts, batch: int, backlog: int, host_kv: bool, steps: Sequence[int] | None
) -> Iterator[PlannedPlacement]:
    """`steps`: those that are tried, instead of all that are of use for the batch."""
    model, index = costs.model, costs.index
    layers, pool = len(model.layers), model.kv(costs.workload.kv_tokens(batch), batch)
    for partitions in range(len(index.partitions) + 1):
        host = budgets.host_bytes - index.fixed - index.resident(partitions) - index.reading(partitions)
        if host < 0:
            return
        device = min(budgets.device_bytes, host) if budgets.unified else budgets.device_bytes
        # In unified memory there is nothing beside the device.
        beside = host if host_kv and not budgets.unified else 0
        placed = fit_pool(pool, layers, beside, model.staging, partial(_on_device, device, costs, batch, steps=steps))
        if placed is not None and placed[0]:
            # As `place_pool` does, which is told the step.
            fit = partial(_on_device, device, costs, batch, steps=[placed[1].step_tokens])
            placed = fit_pool(pool, layers, beside, model.staging, fit)
        if budgets.unified and placed is not None and placed[1].layers < layers:
            # In unified memory staging is taken from the layers.
            fit = partial(_on_device, min(device, host - model.staging), costs, batch, steps=steps)
            placed = fit_pool(pool, layers, beside, model.staging, fit)
        if placed is None:
            return
        in_host, found = placed
        streamed = layers - found.layers
        host_left = host - pool_spread(pool, layers, in_host).host - (model.staging if streamed else 0)
        if host_left < 0 and not budgets.unified:
            return
        weights_in_host, host_free = fit_host(0 if budgets.unified else host_left, streamed, model.slot)
        block = model.kv(1)
        yield PlannedPlacement(
            weights=Spread(found.layers, weights_in_host, streamed - weights_in_host),
            kv=Spread(
                pool + (0 if in_host else found.free // block * block),
                host_free // block * block,
                budgets.disk_bytes // block * block,
            ),
            partitions=partitions,
            batch=batch,
            step_tokens=found.step_tokens,
            slots=found.slots,
            kv_host_layers=in_host,
            budgets=budgets,
            costs=costs,
            backlog=backlog,
        )


def _on_device(
    device_bytes: int, costs: PlacementCosts, batch: int, kv: int, *, steps: Sequence[int] | None
) -> DeviceFit | None:
    model = costs.model
    return fit_device(
        device_bytes,
        fixed=model.outside + kv,
        slot=model.slot,
        layers=len(model.layers),
        workspace=partial(model.workspace, requests=batch),
        steps=steps or _steps(costs, batch),
    )


def _steps(costs: PlacementCosts, batch: int) -> list[int]:
    most = min(costs.step_tokens, batch * costs.workload.prompt_tokens)
    return step_sizes(most, max(batch, min(LEAST_STEP, most)))


def _missing(budgets: Budgets, costs: PlacementCosts) -> str:
    model, index = costs.model, costs.index
    batch = min(costs.batches)
    tokens, step = costs.workload.kv_tokens(batch), min(_steps(costs, batch))
    pool = model.kv(tokens, batch)
    host = index.fixed + index.reading(0) + (model.staging if len(model.layers) > 1 else 0)
    kv = pool_spread(pool, len(model.layers), len(model.layers))
    if budgets.unified or len(model.layers) <= KV_BUFFERS or kv.host + host > budgets.host_bytes:
        kv = Spread(pool)
    of = f"a batch of {batch} ({tokens} tokens)"
    device, on_device = least_device(model, kv.device, of, step, batch)
    in_host = (
        f"the index takes {index.fixed} bytes beside its partitions, partitions in transit "
        f"{index.reading(0)}, layers in transit {host - index.fixed - index.reading(0)}"
    )
    shorter = "or shorter prompts and answers"
    if budgets.unified and budgets.device_bytes >= device:
        return missing("host_bytes", budgets.host_bytes, device + host, f"{on_device}; {in_host}", shorter)
    if budgets.device_bytes < device:
        return missing("device_bytes", budgets.device_bytes, device, on_device, shorter)
    return missing("host_bytes", budgets.host_bytes, host, in_host, "or cut the index into more partitions")
