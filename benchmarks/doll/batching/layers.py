"""Steps of a model whose layers are read while others compute (RAGDoll Figure 2)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

__all__ = ["FAR_AHEAD", "stalls", "step_seconds"]

FAR_AHEAD = 8
"""Layers that are as good as any number ahead."""

_STEPS = 32


def step_seconds(transfers_s: Sequence[float], computes_s: Sequence[float], depth: int) -> float:
    """Until the last layer is computed, if `depth` layers may be read ahead of the one that computes: 0 reads each when
    it is needed (accelerate), 1 the next one (FlexGen), more is a queue (RAGDoll).

    Steps that follow one another are one sequence: the first layer of the next is read during the last ones. Raises
    ValueError for a negative depth.
    """
    if depth < 0:
        raise ValueError(f"depth must not be negative, got {depth}")
    read_s = 0.0
    computed_s: list[float] = []
    for layer, (transfer_s, compute_s) in enumerate(zip(transfers_s, computes_s, strict=True)):
        freed_s = computed_s[layer - 1 - depth] if layer > depth else 0.0
        read_s = max(read_s, freed_s) + transfer_s
        computed_s.append(max(read_s, computed_s[-1] if computed_s else 0.0) + compute_s)
    return computed_s[-1] if computed_s else 0.0


@cache
def stalls(layers: int, compute: float, depth: int, jitter: float) -> float:
    """Times as long as with a long queue, if a layer computes `compute` times as long as it is read, on average. Both
    vary: the share `jitter` of each time is exponential."""
    draw = random.Random("layers")
    transfers = [_varied(1.0, jitter, draw) for _ in range(layers * _STEPS)]
    computes = [_varied(compute, jitter, draw) for _ in range(layers * _STEPS)]
    return step_seconds(transfers, computes, depth) / step_seconds(transfers, computes, FAR_AHEAD)


def _varied(mean: float, jitter: float, draw: random.Random) -> float:
    return mean * (1 - jitter + jitter * draw.expovariate(1.0))
