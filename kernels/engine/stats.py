"""Statistics of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, fields
from operator import add

from ragorder.kernels.cache import CacheStats, TierTokens
from ragorder.kernels.engine.request import Completion
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.offload.stream import StreamStats
from ragorder.kernels.preprocessing.fit import BuildSide

TBT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class EngineCounters:
    """Prompt, cached, fused and recomputed tokens are of requests with a first token. `tbt_counts`: times between
    tokens by bucket, the last above `TBT_BOUNDS_S`. Warm-ups kept `questions_kept`, fused requests used
    `questions_used`. `build_fits`: fused requests by `BUILD_FITS`; `build_sides`: what they and the build are for. Both
    are empty without a build in the disk tier's folder."""

    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    cached: TierTokens = field(default_factory=TierTokens)
    fused: TierTokens = field(default_factory=TierTokens)
    recomputed: int = 0
    generated_tokens: int = 0
    ttft_s_sum: float = 0.0
    ttft_count: int = 0
    steps: int = 0
    computed_tokens: int = 0
    failed_steps: int = 0
    retries: int = 0
    tbt_counts: list[int] = field(default_factory=lambda: [0] * (len(TBT_BOUNDS_S) + 1))
    tbt_s_sum: float = 0.0
    questions_kept: int = 0
    questions_used: int = 0
    build_fits: Counter[str] = field(default_factory=Counter)
    build_sides: dict[str, BuildSide] = field(default_factory=dict)

    def first_token(self, sequence: Sequence) -> None:
        self.prompt_tokens += sequence.prompt_tokens
        self.cached = TierTokens(*map(add, self.cached, sequence.cached or TierTokens()))
        self.fused = TierTokens(*map(add, self.fused, sequence.fused or TierTokens()))
        self.recomputed += sequence.recomputed
        self.ttft_s_sum += sequence.ttft_s or 0.0
        self.ttft_count += 1

    def next_token(self, gap_s: float) -> None:
        self.tbt_counts[bisect_left(TBT_BOUNDS_S, gap_s)] += 1
        self.tbt_s_sum += gap_s

    def end(self, completion: Completion) -> None:
        self.finished[completion.finish_reason] += 1

    def snapshot(
        self, cache: CacheStats, running: int, waiting: int, preemptions: int, stream: StreamStats | None = None
    ) -> EngineStats:
        counted = {each.name: copy(getattr(self, each.name)) for each in fields(self)}
        return EngineStats(
            **counted, cache=cache, running=running, waiting=waiting, preemptions=preemptions, stream=stream
        )


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineCounters):
    """Snapshot of counters and state. `stream` is of a streamed model."""

    cache: CacheStats
    running: int
    waiting: int
    preemptions: int
    stream: StreamStats | None = None
