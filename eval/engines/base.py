"""Interface of a serving engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Unpack

from ragorder.errors import RagorderError
from ragorder.settings import OrdererOptions, Settings


class EngineError(RagorderError, RuntimeError):
    """An engine is absent, or unfit for the benchmark. The message says what to change."""


class RequestError(RagorderError, RuntimeError):
    """One request failed; the engine goes on. `status` is the HTTP status, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineCompletion:
    """An engine's report on a prompt. Times are None without a clock (`sim`); `tbt_s`, the mean time between the
    answer's tokens (RAGCache 5.4), without a second token, too."""

    ttft_s: float | None
    cached_tokens: int
    prompt_tokens: int
    text: str = ""
    total_s: float | None = None
    tbt_s: float | None = None


def time_between_tokens(first_s: float, last_s: float, tokens: int) -> float | None:
    """The mean, of an answer whose first and last token came at these times."""
    return (last_s - first_s) / (tokens - 1) if tokens > 1 else None


class Cache(Protocol):
    """A prefix cache. `kept_output_tokens` of an answer stay in it; `partial_blocks_first`: partly filled blocks are
    reused before all others."""

    name: str
    block_size: int
    capacity_tokens: int | None
    kept_output_tokens: int
    partial_blocks_first: bool


class PartialBlocksLast(Settings):
    """Settings for an engine that evicts partly filled blocks in order of use."""

    partial_blocks_first: ClassVar[bool] = False


def settings_of(cache: Cache, **options: Unpack[OrdererOptions]) -> Settings:
    given: OrdererOptions = {"capacity_tokens": cache.capacity_tokens, "block_size": cache.block_size}
    return (Settings if cache.partial_blocks_first else PartialBlocksLast)(**given | options)


class Engine(Cache, Protocol):
    """An engine that serves one request at a time."""

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion: ...

    def reset(self) -> None:
        """Empty the prefix cache."""

    def close(self) -> None:
        """Release memory and processes."""


class AsyncEngine(Cache, Protocol):
    """An engine that serves many requests at a time."""

    async def complete(self, token_ids: Sequence[int], output_tokens: int | None = None) -> EngineCompletion:
        """Raises RequestError."""
