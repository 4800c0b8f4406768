"""Statistics of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import add

from ragorder.kernels.cache import CacheStats, TierTokens
from ragorder.kernels.engine.request import Completion

__all__ = ["EngineCounters", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`finished` by finish reason; prompt and cached tokens of requests with a first token."""

    cache: CacheStats
    running: int
    waiting: int
    finished: Mapping[str, int]
    refused: int
    prompt_tokens: int
    cached: TierTokens
    generated_tokens: int
    ttft_s_sum: float
    ttft_count: int
    steps: int
    computed_tokens: int
    preemptions: int
    failed_steps: int


@dataclass(slots=True)
class EngineCounters:
    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    cached: TierTokens = field(default_factory=TierTokens)
    generated_tokens: int = 0
    ttft_s_sum: float = 0.0
    ttft_count: int = 0
    steps: int = 0
    computed_tokens: int = 0
    failed_steps: int = 0

    def first_token(self, prompt_tokens: int, cached: TierTokens, ttft_s: float) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached = TierTokens(*map(add, self.cached, cached))
        self.ttft_s_sum += ttft_s
        self.ttft_count += 1

    def end(self, completion: Completion) -> None:
        self.finished[completion.finish_reason] += 1

    def snapshot(self, cache: CacheStats, running: int, waiting: int, preemptions: int) -> EngineStats:
        counted = {each.name: getattr(self, each.name) for each in fields(self)} | {"finished": dict(self.finished)}
        return EngineStats(cache=cache, running=running, waiting=waiting, preemptions=preemptions, **counted)
