"""Split of device memory between KV cache and index clusters (HedraRAG section 4.4, Eq. 2)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["MemorySplit", "Throughput", "split_memory"]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests a second by memory, measured at one request rate: `at[i]` with `bytes[i]`.

    Linear in between and constant outside.
    """

    bytes: Sequence[float]
    at: Sequence[float]

    def __post_init__(self) -> None:
        if not self.bytes or len(self.bytes) != len(self.at):
            raise ValueError(f"{len(self.bytes)} sizes with {len(self.at)} figures: give one figure for each size")
        if any(below >= above for below, above in pairwise(self.bytes)) or self.bytes[0] < 0:
            raise ValueError("sizes must ascend from 0 or more")
        if not all(0 < figure < math.inf for figure in self.at):
            raise ValueError("a throughput must be positive requests a second")

    def __call__(self, size: float) -> float:
        if size <= self.bytes[0]:
            return self.at[0]
        if size >= self.bytes[-1]:
            return self.at[-1]
        above = bisect_left(self.bytes, size)
        share = (size - self.bytes[above - 1]) / (self.bytes[above] - self.bytes[above - 1])
        return self.at[above - 1] + share * (self.at[above] - self.at[above - 1])


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """A split. `generation`, `retrieval`: requests a second that each half serves; `rates`: requested."""

    kv_bytes: int
    index_bytes: int
    generation: float
    retrieval: float
    rates: tuple[float, float]

    @property
    def served(self) -> float:
        return min(self.generation / self.rates[0], self.retrieval / self.rates[1])

    def explain(self) -> str:
        limit = "generation" if self.generation / self.rates[0] <= self.retrieval / self.rates[1] else "retrieval"
        return (
            f"{_gib(self.kv_bytes)} for KV, {_gib(self.index_bytes)} for clusters: generation serves "
            f"{self.generation:.1f} of {self.rates[0]:.1f} requests a second, retrieval {self.retrieval:.1f} of "
            f"{self.rates[1]:.1f}; {limit} is the limit, at {100 * self.served:.0f} % of what is asked for"
        )


def split_memory(
    total_bytes: int, generation: Throughput, retrieval: Throughput, rates: tuple[float, float]
) -> MemorySplit:
    """Return the split that serves most workflows: max over kv of min(T_G(kv) / rps_G, T_R(total - kv) / rps_R).

    `generation` is by bytes of KV cache, `retrieval` by bytes of clusters; `rates` are generations and retrievals a
    second. As printed, T_R does not depend on the split. Exact for any measured curve; among equals, most KV.
    """
    if total_bytes < 1:
        raise ValueError(f"total_bytes must be at least 1, got {total_bytes}")
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates must be positive requests a second, got {rates}")

    def split(kv_bytes: int) -> MemorySplit:
        rest = total_bytes - kv_bytes
        return MemorySplit(kv_bytes, rest, generation(kv_bytes), retrieval(rest), rates)

    def lead(kv_bytes: float) -> float:
        return generation(kv_bytes) / rates[0] - retrieval(total_bytes - kv_bytes) / rates[1]

    sizes = {0.0, float(total_bytes), *generation.bytes, *(total_bytes - size for size in retrieval.bytes)}
    corners = sorted(size for size in sizes if 0 <= size <= total_bytes)
    candidates = [*corners]
    for low, high in pairwise(corners):
        at_low, at_high = lead(low), lead(high)
        if at_low * at_high < 0:
            candidates.append(low + (high - low) * at_low / (at_low - at_high))
    whole = {kv_bytes for size in candidates for kv_bytes in (math.floor(size), math.ceil(size))}
    return max(map(split, sorted(whole)), key=lambda each: (each.served, each.kv_bytes))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
