"""Costs of a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from ragorder.pipelining.placement.base import (
    NO_INDEX,
    IndexSizes,
    ModelSizes,
    Placement,
    Spread,
    Workload,
    amounts,
    pool_spread,
)
from ragorder.pipelining.placement.budgets import Budgets


class PlacementCosts(Protocol):
    """Sizes and times of one model and index on one machine."""

    @property
    def model(self) -> ModelSizes: ...

    @property
    def index(self) -> IndexSizes: ...

    @property
    def workload(self) -> Workload: ...

    @property
    def estimated(self) -> bool: ...

    @property
    def batches(self) -> Sequence[int]: ...

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step; a step is smaller if memory is short."""

    def generation_s(self, batch: int, weights: Spread, step_tokens: int, kv_host_layers: int = 0) -> float:
        """Return the seconds of a batch; with KV in host memory it is copied in each step."""

    def retrieval_s(self, partitions: int) -> float: ...


def mean_latency_s(backlog: int, batch: int, retrieval_s: float, generation_s: Callable[[int], float]) -> float:
    """Return the mean seconds until `backlog` requests are answered in batches: RAGDoll's Eq. 6, with retrieval."""
    retrieved_s = answered_s = sum_s = 0.0
    left, size, seconds = backlog, min(batch, backlog), generation_s(min(batch, backlog))
    while left:
        if left < size:
            size, seconds = left, generation_s(left)
        retrieved_s += retrieval_s
        answered_s = max(retrieved_s, answered_s) + seconds
        sum_s += size * answered_s
        left -= size
    return sum_s / backlog


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of placements by tier.

    Besides Eq. 2 and 3: weights outside the layers, buffers, and the fixed part of the index. Each layer counts as the
    largest one. On the disk only KV counts.
    """

    model: ModelSizes
    index: IndexSizes

    def parts(self, placement: Placement) -> Iterator[tuple[str, Spread]]:
        model, index, slot = self.model, self.index, self.model.slot
        yield "weights outside the layers", Spread(device=model.outside)
        yield "layers", Spread(placement.weights.device * slot, placement.weights.host * slot)
        yield ("buffers of streamed layers", Spread(placement.slots * slot, model.staging if placement.streamed else 0))
        pool = pool_spread(placement.kv.device, placement.weights.total, placement.kv_host_layers)
        yield "KV", Spread(pool.device, pool.host + placement.kv.host, placement.kv.disk)
        yield "workspace of a step", Spread(device=model.workspace(placement.step_tokens, placement.batch))
        yield "index without partitions", Spread(host=index.fixed)
        yield "partitions", Spread(host=index.resident(placement.partitions))
        yield "partitions in transit", Spread(host=index.reading(placement.partitions))

    def total(self, placement: Placement) -> Spread:
        """Return Eq. 2 (device) and Eq. 3 (host)."""
        return Spread(*map(sum, zip(*(amounts(spread) for _, spread in self.parts(placement)), strict=True)))

    def fits(self, placement: Placement, budgets: Budgets) -> bool:
        used = self.total(placement)
        host = used.host + (used.device if budgets.unified else 0)
        return used.device <= budgets.device_bytes and host <= budgets.host_bytes and used.disk <= budgets.disk_bytes


_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_STEP_TOKENS = 8192
_WORKLOAD = Workload()


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations a second, and bytes a second of memory, buses, disk and an index scan."""

    flops: float
    device: float
    host: float
    disk: float
    scan: float

    def __post_init__(self) -> None:
        if min(self.flops, self.device, self.host, self.disk, self.scan) <= 0:
            raise ValueError(f"rates are above 0, got {self}")

    @classmethod
    def usual(cls, *, gpu: bool) -> Self:
        return cls.of_a_gpu() if gpu else cls.of_a_cpu()

    @classmethod
    def of_a_gpu(cls) -> Self:
        """Return the rates of a consumer's card on PCIe 4.0 with an NVMe disk."""
        return cls(flops=40e12, device=500e9, host=12e9, disk=2e9, scan=8e9)

    @classmethod
    def of_a_cpu(cls) -> Self:
        """Return the rates of a desktop processor with an NVMe disk."""
        return cls(flops=400e9, device=20e9, host=8e9, disk=2e9, scan=4e9)


@dataclass(frozen=True, slots=True)
class EstimatedCosts:
    """Times from sizes and rates: a step is computation or copies, a retrieval reads and a scan.

    Where known, `reading` is the factor of the time of reads, and `scan_s` the time of all else in a retrieval.
    """

    model: ModelSizes
    rates: Rates
    index: IndexSizes = NO_INDEX
    workload: Workload = _WORKLOAD
    batches: Sequence[int] = _BATCHES
    step_tokens: int = _STEP_TOKENS
    estimated: bool = True
    reading: float = 1.0
    scan_s: float | None = None

    def generation_s(self, batch: int, weights: Spread, step_tokens: int, kv_host_layers: int = 0) -> float:
        slot, workload = self.model.slot, self.workload
        stream_s = slot * (weights.host / self.rates.host + weights.disk / self.rates.disk)
        copy_s = kv_host_layers / len(self.model.layers) * self.model.kv_token / self.rates.host

        def step_s(tokens: int, kv_tokens: int) -> float:
            return max(stream_s + kv_tokens * copy_s, self._compute_s(tokens))

        batch_tokens = workload.kv_tokens(batch)
        whole, rest = divmod(max(batch, batch_tokens - batch * workload.answer_tokens), step_tokens)
        # A step of prefill copies the KV that it writes, and the begun prompt's.
        prefill_s = whole * step_s(step_tokens, step_tokens + workload.prompt_tokens)
        prefill_s += step_s(rest, rest + workload.prompt_tokens) if rest else 0.0
        return prefill_s + (workload.answer_tokens - 1) * step_s(batch, batch_tokens)

    def retrieval_s(self, partitions: int) -> float:
        scan_s = sum(self.index.partitions) / self.rates.scan if self.scan_s is None else self.scan_s
        return self.reading * self.read_s(partitions) + scan_s

    def read_s(self, partitions: int) -> float:
        """Return the seconds of reading the partitions that are not in memory."""
        return (sum(self.index.partitions) - self.index.resident(partitions)) / self.rates.disk

    def moving_s(self, before: Placement, after: Placement) -> float:
        """Return the seconds that a move reads and copies."""
        bus = abs(after.kv_host_share - before.kv_host_share) * min(after.kv.device, before.kv.device)
        slot, index, rates = self.model.slot, self.index, self.rates
        layers = after.weights.device + after.weights.host - before.weights.device - before.weights.host
        partitions = index.resident(after.partitions) - index.resident(before.partitions)
        copied = slot * abs(after.weights.device - before.weights.device)
        pool = 0 if after.kv.device == before.kv.device else min(after.kv.device, before.kv.device)
        read = max(0, layers) * slot + max(0, partitions)
        return read / rates.disk + (copied + bus) / rates.host + 2 * pool / rates.device

    def _compute_s(self, tokens: int) -> float:
        # A multiplication and an addition for each weight and token; each step reads all weights once.
        parameters = self.model.weights / self.model.itemsize
        return max(2 * parameters * tokens / self.rates.flops, self.model.weights / self.rates.device)
