"""Results of a run: each request's figures, and their summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ragorder.eval.running.measures import Decile

__all__ = ["Column", "Columns", "RunResult", "Throughput"]

Column = list[int | None] | list[float | None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one policy did on one trace. Times are None where the engine has no clock. `order_us` is thread CPU time of
    ordering and confirming one request. Of the cached tokens that the policy predicted (None: it predicts nothing):
    `prediction_within_block` is the share of requests where they were right to within one block,
    `prediction_error_blocks_mean` the mean of |predicted - reported| and `prediction_bias_blocks` that of predicted -
    reported. `failures` of the requests are in no other figure. In a `batch` no request is
    served more than `max_wait` places late (None: any number). `load` says under which load the run was, and `deciles`
    how it went along; both are None where none was asked for."""

    workload: str
    policy: str
    engine: str
    order: str
    seed: int
    top_k: int
    capacity_tokens: int | None
    waiting: int
    batch: bool
    requests: int
    failures: int
    prompt_tokens: int
    cached_tokens: int
    cached_ratio: float
    prefix_documents_mean: float
    displacement_mean: float
    prediction_within_block: float | None
    prediction_error_blocks_mean: float | None
    prediction_bias_blocks: float | None
    ttft_ms: dict[str, float] | None
    order_us: dict[str, float]
    load: dict[str, Any] | None = None
    deciles: list[Decile] | None = None
    max_wait: int | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Columns:
    """What was measured of each request, in the trace's order whatever the order of service, so that the runs of one
    trace can be compared request by request. Of a request that failed everything is None; a whole column is None where
    the policy predicts nothing, the engine has no clock or prompts are not built.

    `order_us` is thread CPU time of ordering and confirming, `build_us` of building the prompt; `displacement` is the
    mean distance of a document from its rank, in places, and `moved_share` the share of documents that are not there.
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


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests and tokens (of prompts and answers) a second. Requests that were served one at a time count with the
    time that the engine took for them, those that were served together with the time from the first that was sent to
    the last that ended."""

    requests_per_s: float
    tokens_per_s: float
