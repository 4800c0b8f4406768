"""Cells of the suites of kind "pipelining"."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell

__all__ = ["PIPELINE_POLICIES", "PipeliningCell"]

PIPELINE_POLICIES = ("none", "warmup", "speculative")
"""The policies of a suite of pipelines; "none" is the sequential baseline."""


class PipeliningCell(SuiteCell):
    """`measure` is "cold" (warm-ups of a cold cache), "speculation" (one request at a time) or "throughput" (a closed
    loop of `clients`, or of enough for `overload`).

    cold: retrieval is a pause of `retrieval_ms`, or of `retrieval_of_system` times the system prompt's time. Otherwise
    `search_ratio` of an `index` is searched in `stages`, stretched to `search_ms` (0: not at all).
    """

    measure: Literal["cold", "speculation", "throughput"]
    corpus: str = "pydocs"
    top_k: int = Field(5, ge=1)
    system_tokens: int = Field(64, ge=1)
    output_tokens: int = Field(1, ge=1)
    retrieval_ms: float | None = Field(None, ge=0)
    retrieval_of_system: float | None = Field(None, ge=0)
    index: Literal["ivf", "hnsw"] = "ivf"
    search_ratio: float = Field(1.0, gt=0, le=1)
    search_ms: float = Field(0, ge=0)
    stages: int = Field(4, ge=1)
    growth: Literal["equal", "geometric"] = "equal"
    max_prefill_bs: int | None = Field(None, ge=1)
    cautious: bool = False
    clients: int | None = Field(None, ge=1)
    overload: float | None = Field(None, gt=0)
    segments: int = Field(10, ge=1)
    segment_requests: int = Field(40, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> PipeliningCell:
        if (self.measure == "cold") != (self.retrieval_ms is not None or self.retrieval_of_system is not None):
            raise ValueError('retrieval_ms or retrieval_of_system go with measure = "cold", and it needs one of them')
        if self.retrieval_ms is not None and self.retrieval_of_system is not None:
            raise ValueError("give retrieval_ms or retrieval_of_system, not both")
        if (self.measure == "throughput") != (self.clients is not None or self.overload is not None):
            raise ValueError('clients or overload go with measure = "throughput", and it needs one of them')
        if self.clients is not None and self.overload is not None:
            raise ValueError("give clients or overload, not both")
        return self
