"""Requests of one run as prompts, and the size of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.prompts import Prompts

__all__ = ["Stream", "make_stream"]


@dataclass(frozen=True, slots=True)
class Stream:
    """Prompts in order of arrival. `working_set_tokens` is their reusable KV: whole blocks, each prefix once."""

    prompts: Sequence[Sequence[int]]
    working_set_tokens: int

    @property
    def longest_tokens(self) -> int:
        return max(map(len, self.prompts))


def make_stream(trace: Trace, prompts: Prompts, block_size: int) -> Stream:
    """The requests of a trace, with documents in retrieval order."""
    ids = [prompts.token_ids(row, request, request.documents) for row, request in enumerate(trace.requests)]
    return Stream(ids, _working_set(ids, block_size))


def _working_set(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    seen: set[int] = set()
    for prompt in prompts:
        prefix = 0
        for start in range(0, len(prompt) - block_size + 1, block_size):
            prefix = hash((prefix, tuple(prompt[start : start + block_size])))
            seen.add(prefix)
    return len(seen) * block_size
