"""Memory needs of a model and an index, and their placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragorder.adapters.doctor.commands import COMMANDS, Served, ServingCommand
from ragorder.common.extras import needs
from ragorder.kernels.model_sizes import model_sizes
from ragorder.pipelining.placement.base import NO_INDEX, PARTITIONS, Workload
from ragorder.pipelining.placement.budgets import Budgets, format_bytes, is_gpu
from ragorder.pipelining.placement.costs import EstimatedCosts, PlacementCosts, Rates
from ragorder.pipelining.placement.fit import STAGES, PlacementError
from ragorder.pipelining.placement.plan import PlannedPlacement, bottleneck, plan_placement
from ragorder.pipelining.placement.profile import PlacementProfile


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """`problem` explains a missing placement."""

    costs: PlacementCosts
    budgets: Budgets
    placement: PlannedPlacement | None
    problem: str | None = None

    def needs(self) -> Iterator[tuple[str, int]]:
        model, index, workload = self.costs.model, self.costs.index, self.costs.workload
        yield f"weights: {len(model.layers)} layers", sum(model.layers)
        yield "weights: outside the layers", model.outside
        tokens = workload.prompt_tokens + workload.answer_tokens
        yield f"KV of one request ({tokens:,} tokens)", model.kv(tokens)
        yield f"workspace of a step of {self.costs.step_tokens:,} tokens", model.workspace(self.costs.step_tokens)
        if index.partitions:
            yield f"index: {len(index.partitions)} partitions", sum(index.partitions)
        if index.total:
            yield "index: always in memory", index.fixed

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.needs())
        lines = ["Needed:", *(f"  {name.ljust(width)}  {format_bytes(size).rjust(10)}" for name, size in self.needs())]
        budgets = self.budgets
        shared = " (one memory: the device is a CPU)" if budgets.unified else ""
        lines += [
            f"Budgets: device {format_bytes(budgets.device_bytes)}, host {format_bytes(budgets.host_bytes)}{shared}, "
            f"disk {format_bytes(budgets.disk_bytes)}",
            "",
        ]
        if self.placement is not None:
            lines.append(self.placement.explain())
        return "\n".join(lines)

    def command(self, served: Served, engine: str = "ragorder") -> ServingCommand | None:
        """Return the command of an engine in `COMMANDS`, or None without a placement."""
        return None if self.placement is None else COMMANDS[engine](self.placement, served)

    def as_json(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {
            "model": self.costs.model.model_dump(mode="json"),
            "index": self.costs.index.model_dump(mode="json"),
            "workload": self.costs.workload.model_dump(mode="json"),
            "budgets": asdict(self.budgets),
            "estimated": self.costs.estimated,
            "problem": self.problem,
            "placement": None,
        }
        placed = self.placement
        if placed is None:
            return found
        partitions = len(self.costs.index.partitions)
        found["placement"] = {
            "weights": asdict(placed.weights),
            "kv": asdict(placed.kv),
            "kv_host_layers": placed.kv_host_layers,
            "kv_host_share": placed.kv_host_share,
            "partitions": placed.partitions,
            "batch": placed.batch,
            "step_tokens": placed.step_tokens,
            "slots": placed.slots,
            "used": asdict(placed.footprint.total(placed)),
            "engine_settings": dict(placed.engine_settings),
            "generation_s": placed.generation_s,
            "retrieval_s": placed.retrieval_s,
            "latency_s": placed.latency_s,
            "bottleneck": bottleneck(placed, placed.retrieval_s, placed.generation_s, partitions),
        }
        return found


def choose_budgets(
    device_bytes: int | None, host_bytes: int | None, disk_bytes: int | None, device: str | None = None
) -> Budgets:
    """Complete the given budgets by this machine's, with psutil. A given device and host count as two memories.

    `device`: cpu or cuda, of the machine that is planned for. Raises ValueError for a GPU that is not here.
    """
    if device_bytes is not None and host_bytes is not None:
        return Budgets(device_bytes, host_bytes, disk_bytes or 0)
    given: dict[str, Any] = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
    found = Budgets.of_this_machine()
    if is_gpu(device) == found.unified:
        if found.unified:
            raise ValueError("there is no GPU here: give device_bytes and host_bytes of the machine that has one")
        found = Budgets(found.host_bytes, found.host_bytes, found.disk_bytes, unified=True)
    return replace(found, **{name: size for name, size in given.items() if size is not None})


def estimated_costs(
    model: Path,
    index: Path | None,
    *,
    tokens: Mapping[str, int],
    device: str | None = None,
    partitions: int = PARTITIONS,
    dtype: str | None = None,
) -> EstimatedCosts:
    """Estimate for a model (folder or config.json) and a FAISS file, on `device` (None: a GPU if one is here).

    `tokens`: arguments of `Workload.usual`. Raises OSError, ValueError, and ImportError without FAISS.
    """
    gpu = is_gpu(device)
    sizes = model_sizes(model, dtype=dtype)
    if gpu:
        sizes = sizes.model_copy(update={"staging": STAGES * sizes.slot})
    rates, workload = Rates.usual(gpu=gpu), Workload.usual(sizes.longest, **tokens)
    if index is None:
        return EstimatedCosts(sizes, rates, NO_INDEX, workload)
    with needs("retrieval", "an index"):
        from ragorder.pipelining.placement.profile import index_sizes

    return EstimatedCosts(sizes, rates, index_sizes(index, partitions), workload)


def examine_memory(costs: PlacementCosts | Path, budgets: Budgets, *, backlog: int | None = None) -> MemoryReport:
    """Place by these costs, or by a profile's file. Raises OSError, ValueError."""
    found = PlacementProfile.from_file(costs) if isinstance(costs, Path) else costs
    try:
        return MemoryReport(found, budgets, plan_placement(budgets, found, backlog=backlog))
    except PlacementError as error:
        return MemoryReport(found, budgets, None, str(error))
