"""Placement of a model and an index over device, host memory and disk (RAGDoll 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Placement", "Spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """An amount in each place."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Placement:
    """Decoder layers by where they lie between steps, bytes of KV by place, partitions of the index that stay in host
    memory, and requests that generate at once.

    `slots`: buffers on the device that layers from elsewhere pass through; `step_tokens`: of the largest step. KV on
    the device is that of the running batch first, and of documents that may come again; in the other places the latter
    only. Raises ValueError for negative amounts, no batch, or streamed layers without a buffer.
    """

    weights: Spread
    kv: Spread
    partitions: int
    batch: int
    step_tokens: int
    slots: int = 0

    def __post_init__(self) -> None:
        amounts = (*_places(self.weights), *_places(self.kv), self.partitions, self.slots)
        if min(amounts) < 0:
            raise ValueError("a placement has no negative amounts")
        if self.batch < 1 or self.step_tokens < self.batch:
            raise ValueError(
                f"a batch of {self.batch} requests in steps of {self.step_tokens} tokens: each request takes one token "
                "of a step or more"
            )
        if self.streamed and not self.slots:
            raise ValueError(f"{self.streamed} layers are streamed, and there is no buffer for them: slots is 0")

    @property
    def streamed(self) -> int:
        """Layers that come to the device in each step."""
        return self.weights.host + self.weights.disk


def _places(spread: Spread) -> tuple[int, int, int]:
    return spread.device, spread.host, spread.disk
