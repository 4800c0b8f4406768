"""Streams of prompts, and tier sizes relative to their working set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.prompts import Prompts

__all__ = ["ROOMS", "PromptStream", "TierSizes", "kv_bytes_per_token", "make_sizes", "make_stream"]

_ROOM = 1.25
"""Size of a tier that holds the whole working set, as a multiple of it: answers and warm-up need room."""

_SHARES: dict[str, tuple[float, float, float | None]] = {
    "device": (_ROOM, _ROOM, None),
    "host": (0.25, _ROOM, None),
    "beyond": (0.25, 0.5, None),
    "disk": (0.25, 0.5, _ROOM),
}
ROOMS = tuple(_SHARES)
"""Places that the working set fits: the device's pool, the host, neither, the disk."""


@dataclass(frozen=True, slots=True)
class PromptStream:
    """`working_set_tokens` is the reusable KV of the prompts: whole blocks, each prefix once."""

    prompts: Sequence[Sequence[int]]
    working_set_tokens: int

    @property
    def longest_tokens(self) -> int:
        return max(map(len, self.prompts))


def make_stream(trace: Trace, prompts: Prompts, block_size: int) -> PromptStream:
    """Documents stand in retrieval order."""
    ids = [prompts.token_ids(row, request, request.documents) for row, request in enumerate(trace.requests)]
    return PromptStream(ids, _working_set(ids, block_size))


def _working_set(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    seen: set[int] = set()
    for prompt in prompts:
        prefix = 0
        for start in range(0, len(prompt) - block_size + 1, block_size):
            prefix = hash((prefix, tuple(prompt[start : start + block_size])))
            seen.add(prefix)
    return len(seen) * block_size


@dataclass(frozen=True, slots=True)
class TierSizes:
    """`disk_bytes` None: there is no disk."""

    blocks: int
    host_bytes: int
    disk_bytes: int | None
    working_set_tokens: int


def make_sizes(room: str, streams: Sequence[PromptStream], *, block_size: int, bytes_per_token: int) -> TierSizes:
    """By the largest working set of the streams (one a seed). The device's pool holds at least the longest prompt and
    its answer; the disk holds all streams."""
    largest = max(stream.working_set_tokens for stream in streams)
    every = sum(stream.working_set_tokens for stream in streams)
    least = max(stream.longest_tokens for stream in streams) // block_size + 2
    device, host, disk = _SHARES[room]
    return TierSizes(
        max(least, round(largest * device) // block_size),
        round(largest * host) * bytes_per_token,
        None if disk is None else round(every * disk) * bytes_per_token,
        largest,
    )


def kv_bytes_per_token(config: Any, value_bytes: int) -> int:
    """For a model with uniform layers, from its transformers configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * value_bytes)
