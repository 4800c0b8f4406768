"""Interface of a serving engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["AsyncEngine", "Cache", "Engine", "EngineCompletion", "EngineError", "RequestError"]


class EngineError(RuntimeError):
    """An engine is not there, or cannot do what a benchmark needs. The message says what to change."""


class RequestError(RuntimeError):
    """One request failed. The engine goes on. `status` is the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineCompletion:
    """What an engine reports of one served prompt. `ttft_s` (to the first token) and `total_s` (to the last) are None
    where the engine has no clock (`sim`)."""

    ttft_s: float | None
    cached_tokens: int
    prompt_tokens: int
    text: str = ""
    total_s: float | None = None


class Cache(Protocol):
    """What must be known of an engine's prefix cache.

    `block_size` is the cache's granularity in tokens, `capacity_tokens` what it holds (None: unlimited),
    `kept_output_tokens` the tokens of an answer that stay in it, `partial_blocks_first` whether blocks that were not
    filled are reused before all others. `name` is the engine's.
    """

    name: str
    block_size: int
    capacity_tokens: int | None
    kept_output_tokens: int
    partial_blocks_first: bool


class Engine(Cache, Protocol):
    """A serving engine with a prefix cache of its own, one request at a time."""

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion:
        """Serve one prompt to the end."""

    def reset(self) -> None:
        """Forget the prefix cache, as a fresh engine would."""

    def close(self) -> None:
        """Give back memory and processes. The engine is not usable afterwards."""


class AsyncEngine(Cache, Protocol):
    """A serving engine with a prefix cache of its own, many requests at a time."""

    async def complete(self, token_ids: Sequence[int], output_tokens: int | None = None) -> EngineCompletion:
        """Serve one prompt, with so many tokens as answer. Raises RequestError."""
