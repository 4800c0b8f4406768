"""Explanation of a placement, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.pipelining.batching.budgets import Budgets, format_bytes
from ragorder.pipelining.batching.costs import PlacementCosts
from ragorder.pipelining.batching.footprint import Footprint
from ragorder.pipelining.placement import Placement, Spread

__all__ = ["bottleneck", "explanation"]

# A gain below this share of the latency is none.
_WORTHWHILE = 0.01


def explanation(
    placement: Placement,
    budgets: Budgets,
    costs: PlacementCosts,
    backlog: int,
    latency_s: float,
    larger: Sequence[tuple[str, int, float]],
) -> str:
    """`larger`: budgets by name with more bytes, and the latency with each."""
    generation_s = costs.generation_s(placement.batch, placement.weights, placement.step_tokens)
    retrieval_s = costs.retrieval_s(placement.partitions)
    weights, partitions = placement.weights, len(costs.index.partitions)
    lines = [
        f"Batches of {placement.batch} requests, in steps of up to {placement.step_tokens:,} tokens. "
        f"Of {weights.total} layers {weights.device} stay on the device, {weights.host} in host memory, "
        f"{weights.disk} on the disk"
        + (
            f"; of {partitions} partitions of the index {placement.partitions} stay in host memory."
            if partitions
            else "."
        ),
        "",
        *_table(placement, budgets, costs),
        "",
        f"Expected: {backlog} waiting requests are answered after {_seconds(latency_s)} in the mean; a batch takes "
        f"{_seconds(retrieval_s)} of retrieval beside {_seconds(generation_s)} of generation.",
    ]
    if costs.estimated:
        lines.append(
            "These times are estimates from sizes and usual rates, not measurements: `ragorder profile --placement` "
            "measures."
        )
    elif placement.step_tokens < min(costs.step_tokens, placement.batch * costs.workload.prompt_tokens):
        lines.append(
            f"Times were measured with steps of {costs.step_tokens:,} tokens: with shorter ones prefill takes longer."
        )
    lines += [
        f"Bottleneck: {bottleneck(placement, retrieval_s, generation_s, partitions)}.",
        _what_helps(latency_s, larger),
    ]
    return "\n".join(lines)


def bottleneck(placement: Placement, retrieval_s: float, generation_s: float, partitions: int) -> str:
    """The resource that the slower half of the pipeline waits for."""
    if retrieval_s > generation_s:
        absent = partitions - placement.partitions
        if absent:
            return f"the disk, from which retrieval reads {absent} partitions for each batch"
        return "the processor, on which retrieval scans the index"
    if placement.weights.disk:
        return f"the disk, from which generation reads {placement.weights.disk} layers in each step"
    if placement.weights.host:
        return f"the way from host memory, on which {placement.weights.host} layers come to the device in each step"
    return "the device's computation: all layers are there"


def _table(placement: Placement, budgets: Budgets, costs: PlacementCosts) -> list[str]:
    footprint = Footprint(costs.model, costs.index)
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


def _what_helps(latency_s: float, larger: Sequence[tuple[str, int, float]]) -> str:
    name, size, shorter_s = min(larger, key=lambda each: each[2])
    if latency_s - shorter_s < _WORTHWHILE * latency_s:
        return "More memory would not help."
    return f"What would help: {name} of {format_bytes(size)} instead, with which it is {_seconds(shorter_s)}."


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
