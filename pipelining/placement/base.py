"""Placements and sizes (RAGDoll 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Curve = tuple[tuple[int, int], ...]
_Bytes = Annotated[int, Field(ge=0)]
# Partitions in memory in addition to resident ones.
_PASSING = 2

KV_BUFFERS = 2
"""Buffers on the device for layers with KV in host memory."""

ROWS = 64
"""Default number of requests with logits in one step."""


@dataclass(frozen=True, slots=True)
class Spread:
    """An amount in each tier."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Placement:
    """Decoder layers and bytes of KV by tier, and partitions of the index in host memory.

    `slots`: buffers on the device for streamed layers; `step_tokens`: of the largest step. `kv.device` is the pool, for
    the running batch first. The KV of `kv_host_layers` layers is in host memory, and passes buffers on the device.
    """

    weights: Spread
    kv: Spread
    partitions: int
    batch: int
    step_tokens: int
    slots: int = 0
    kv_host_layers: int = 0

    def __post_init__(self) -> None:
        if min(*amounts(self.weights), *amounts(self.kv), self.partitions, self.slots, self.kv_host_layers) < 0:
            raise ValueError("a placement has a negative amount: give 0 or more")
        if self.kv_host_layers > self.weights.total:
            raise ValueError(f"of {self.weights.total} layers a placement has KV of {self.kv_host_layers} in the host")
        if self.batch < 1 or self.step_tokens < self.batch:
            raise ValueError(
                f"a batch of {self.batch} requests in steps of {self.step_tokens} tokens: each request takes one token "
                "of a step or more"
            )
        if self.streamed and not self.slots:
            raise ValueError(f"{self.streamed} layers are streamed, and there is no buffer for them: slots is 0")

    @property
    def streamed(self) -> int:
        return self.weights.host + self.weights.disk

    @property
    def kv_host_share(self) -> float:
        """Share of the running batch's KV in host memory: the paper's c_cpu."""
        return self.kv_host_layers / max(1, self.weights.total)


def pool_spread(pool: int, layers: int, in_host: int) -> Spread:
    """Return the bytes of a pool by tier, with buffers for the `in_host` layers."""
    if not in_host:
        return Spread(device=pool)
    each = -(-pool // layers)
    return Spread((layers - in_host + min(KV_BUFFERS, in_host)) * each, in_host * each)


def amounts(spread: Spread) -> tuple[int, int, int]:
    return spread.device, spread.host, spread.disk


class _Sizes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSizes(_Sizes):
    """Bytes of decoder layers, of other weights (`outside`, on the device), and of a token's KV.

    `step_bytes`: points (tokens, bytes) of the workspace H, the memory of a step besides weights and KV, with logits of
    ROWS requests, `row_bytes` each (0: not known). `staging`: host memory that streamed layers pass. `longest`:
    the most tokens of a request, None for any number.
    """

    layers: tuple[Annotated[int, Field(gt=0)], ...] = Field(min_length=1)
    outside: _Bytes
    kv_token: int = Field(gt=0)
    step_bytes: Curve = Field(min_length=1)
    row_bytes: _Bytes = 0
    itemsize: int = Field(default=2, gt=0)
    block_tokens: int = Field(default=16, gt=0)
    staging: _Bytes = 0
    longest: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        _check_curve("step_bytes", self.step_bytes)
        return self

    @property
    def slot(self) -> int:
        return max(self.layers)

    @property
    def weights(self) -> int:
        return sum(self.layers) + self.outside

    def workspace(self, tokens: int, requests: int | None = None) -> int:
        """Return H for a step of at most `requests` requests (default: ROWS)."""
        known = round(_value(self.step_bytes, max(tokens, self.step_bytes[0][0])))
        rows = ROWS if requests is None else requests
        return known + (min(rows, tokens) - min(ROWS, tokens)) * self.row_bytes

    def kv(self, tokens: int, requests: int = 1) -> int:
        """Return the bytes of KV in blocks; each request may end inside a block."""
        return (-(-tokens // self.block_tokens) + requests - 1) * self.block_tokens * self.kv_token


class IndexSizes(_Sizes):
    """Bytes of an index: `fixed`, such as centroids, are always in host memory, `partitions` can be."""

    fixed: _Bytes = 0
    partitions: tuple[_Bytes, ...] = ()

    @property
    def total(self) -> int:
        return self.fixed + sum(self.partitions)

    def resident(self, count: int) -> int:
        # Any partition may be resident: their use decides.
        return sum(sorted(self.partitions, reverse=True)[:count])

    def reading(self, resident: int) -> int:
        """Return the bytes in transit: one partition is scanned while the next is read."""
        return sum(sorted(self.partitions, reverse=True)[resident : resident + _PASSING])


NO_INDEX = IndexSizes()

PARTITIONS = 32
"""Parts of an index, unless it has fewer clusters."""


_PROMPT_TOKENS, _ANSWER_TOKENS = 2048, 128


class Workload(_Sizes):
    """Tokens of a request. `shared`: points (requests, KV tokens) by batch, see `shared_tokens`."""

    prompt_tokens: int = Field(default=_PROMPT_TOKENS, gt=0)
    answer_tokens: int = Field(default=_ANSWER_TOKENS, gt=0)
    shared: Curve = ()

    @classmethod
    def usual(cls, longest: int | None, *, prompt_tokens: int | None = None, answer_tokens: int | None = None) -> Self:
        """Return a usual request, of at most `longest` tokens, with the tokens that are given."""
        most = _PROMPT_TOKENS + _ANSWER_TOKENS if longest is None else longest
        answer = answer_tokens or max(1, min(_ANSWER_TOKENS, most // 2))
        prompt = prompt_tokens or max(1, min(_PROMPT_TOKENS, most - answer))
        return cls(prompt_tokens=prompt, answer_tokens=answer)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.shared:
            _check_curve("shared", self.shared)
        return self

    def kv_tokens(self, batch: int) -> int:
        """Return the KV tokens of a batch's trie; between measured batches an upper bound."""
        each = self.prompt_tokens + self.answer_tokens
        requests, tokens = max((point for point in self.shared if point[0] <= batch), default=(0, 0))
        bounds = [tokens + (batch - requests) * each]
        bounds += [tokens for requests, tokens in self.shared if requests >= batch]
        return min(bounds)


def _check_curve(name: str, points: Curve) -> None:
    if points[0][0] < 1 or any(before[0] >= after[0] for before, after in pairwise(points)):
        raise ValueError(f"{name} must have ascending counts from 1 on, got {[count for count, _ in points]}")
    if points[0][1] < 0 or any(before[1] > after[1] for before, after in pairwise(points)):
        raise ValueError(f"{name} must not fall, got {[size for _, size in points]}")


def _value(points: Sequence[tuple[int, int]], at: int) -> float:
    if len(points) == 1:
        return points[0][1] * max(1.0, at / points[0][0])
    right = next((index for index in range(1, len(points)) if points[index][0] >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
