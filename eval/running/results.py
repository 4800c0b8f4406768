"""Results of a run: figures of each request, and their summary."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Column", "Columns", "RunResult", "Throughput"]

Column = list[int | None] | list[float | None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The summary of one policy on one trace, without its `failures`.

    Times are None on an engine without a clock; `tbt_ms` is of each request's mean; `order_us` is thread CPU time of
    ordering and confirming. `reordered` requests had documents moved, `reordered_cold` although nothing was cached; in
    `best_moved` another document than the best one was first. Predictions of cached tokens: the share right to within a
    block, the mean of |predicted - reported| and of predicted - reported.
    """

    workload: str
    policy: str
    engine: str
    order: str
    seed: int
    top_k: int
    capacity_tokens: int | None
    requests: int
    failures: int
    prompt_tokens: int
    cached_tokens: int
    cached_ratio: float
    prefix_documents_mean: float
    displacement_mean: float
    reordered: int
    reordered_cold: int
    best_moved: int
    prediction_within_block: float | None
    prediction_error_blocks_mean: float | None
    prediction_bias_blocks: float | None
    ttft_ms: dict[str, float] | None
    order_us: dict[str, float]
    tbt_ms: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Figures of each request in the trace's order; None for one that failed, and for a column that the policy or
    engine does not have.

    `order_us` (ordering and confirming) and `build_us` are thread CPU time; `displacement` is the mean distance from
    the rank, in places, `moved_share` the share of documents not at theirs. `reordered`, `reordered_cold` (although
    nothing is cached) and `best_moved` (another document than the best one is first) are 0 or 1.
    """

    prompt_tokens: Column
    cached_tokens: Column
    cached_documents: Column
    predicted_tokens: Column | None
    ttft_ms: Column | None
    order_us: Column
    build_us: Column | None
    displacement: Column
    moved_share: Column
    reordered: Column
    reordered_cold: Column
    best_moved: Column
    tbt_ms: Column | None = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests and tokens (prompts and answers) per second of the engine's time if served one at a time, else of the
    time from the first request sent to the last answer."""

    requests_per_s: float
    tokens_per_s: float
