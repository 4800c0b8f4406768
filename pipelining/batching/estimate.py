"""Estimated costs of a placement, for a machine that has no profile yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ragorder.pipelining.placement import NO_INDEX, IndexSizes, ModelSizes, Spread, Workload

__all__ = ["EstimatedCosts", "Rates"]

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_STEP_TOKENS = 8192
_WORKLOAD = Workload()


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a machine: floating-point operations a second, and bytes a second of the device's memory, from host
    memory to the device, from the disk, and of a scan of an index in memory. Raises ValueError unless all are above
    0."""

    flops: float
    device: float
    host: float
    disk: float
    scan: float

    def __post_init__(self) -> None:
        if min(self.flops, self.device, self.host, self.disk, self.scan) <= 0:
            raise ValueError(f"rates are above 0, got {self}")

    @classmethod
    def of_a_gpu(cls) -> Self:
        """A consumer's card on PCIe 4.0 beside an NVMe disk."""
        return cls(flops=40e12, device=500e9, host=12e9, disk=2e9, scan=8e9)

    @classmethod
    def of_a_cpu(cls) -> Self:
        """A desktop processor and an NVMe disk. "To the device" is a copy in memory."""
        return cls(flops=400e9, device=20e9, host=8e9, disk=2e9, scan=4e9)


@dataclass(frozen=True, slots=True)
class EstimatedCosts:
    """Times from sizes and rates: a step takes as long as the slower of its computation and of the stream of its
    layers; a retrieval as long as the partitions that are read, and the scan of all."""

    model: ModelSizes
    rates: Rates
    index: IndexSizes = NO_INDEX
    workload: Workload = _WORKLOAD
    batches: Sequence[int] = _BATCHES
    step_tokens: int = _STEP_TOKENS
    estimated: bool = True

    def generation_s(self, batch: int, weights: Spread, step_tokens: int) -> float:
        slot = self.model.slot
        stream_s = slot * (weights.host / self.rates.host + weights.disk / self.rates.disk)
        shared = self.workload.kv_tokens(batch) - batch * self.workload.answer_tokens
        prompts = max(batch, shared)
        whole, rest = divmod(prompts, step_tokens)
        prefill_s = whole * max(stream_s, self._compute_s(step_tokens))
        prefill_s += max(stream_s, self._compute_s(rest)) if rest else 0.0
        return prefill_s + (self.workload.answer_tokens - 1) * max(stream_s, self._compute_s(batch))

    def retrieval_s(self, partitions: int) -> float:
        total = sum(self.index.partitions)
        read = total - sum(sorted(self.index.partitions, reverse=True)[:partitions])
        return read / self.rates.disk + total / self.rates.scan

    def _compute_s(self, tokens: int) -> float:
        # A multiplication and an addition for each weight and token; each step reads all weights once.
        parameters = self.model.weights / self.model.itemsize
        return max(2 * parameters * tokens / self.rates.flops, self.model.weights / self.rates.device)
