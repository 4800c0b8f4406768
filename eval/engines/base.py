"""What the evaluation asks of a serving engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Completion", "Engine"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine reports of one served prompt. `ttft_s` is None where the engine has no clock (`sim`)."""

    ttft_s: float | None
    cached_tokens: int
    prompt_tokens: int
    text: str = ""


class Engine(Protocol):
    """A serving engine with a prefix cache of its own.

    `block_size` is the cache's granularity in tokens, `capacity_tokens` what its cache holds (None: unlimited),
    `kept_output_tokens` the tokens of an answer that stay in the cache, `partial_blocks_first` whether blocks that were
    not filled are reused before all others.
    """

    name: str
    block_size: int
    capacity_tokens: int | None
    kept_output_tokens: int
    partial_blocks_first: bool

    def generate(self, token_ids: Sequence[int]) -> Completion:
        """Serve one prompt to the end."""

    def reset(self) -> None:
        """Forget the prefix cache, as a fresh engine would."""

    def close(self) -> None:
        """Give back memory and processes. The engine is not usable afterwards."""
