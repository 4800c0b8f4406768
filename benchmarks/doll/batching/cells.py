"""Cells of batches in a memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ragorder.benchmarks.doll.batching.settings import PARTITION_GB, PARTITIONS, SETTINGS
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteCell, one_of

__all__ = ["BatchingCell", "System", "checked_steps"]


def checked_steps(text: str) -> str:
    if not text.startswith("steps:"):
        raise ValueError(f"arrivals come in steps, such as steps:4@20m,8@20m, got {text!r}")
    Arrivals.parse(text)
    return text


class BatchingCell(SuiteCell):
    """Requests that arrive in `steps` on a platform with a model (`setting`), with `top_k` documents each of a
    `corpus`, which systems that keep KV need. For dissections: partitions that are `resident`, the share of
    `weights` on the device, and a fixed `batch`; None: as the system decides."""

    setting: Annotated[str, one_of("setting", SETTINGS)] = "high-70b"
    steps: Annotated[str, AfterValidator(checked_steps)] = "steps:4@20m,8@20m,12@20m,16@20m"
    index: Annotated[str, one_of("index", PARTITION_GB)] = "partitions"
    top_k: int = Field(5, ge=1, le=20)
    corpus: str = "covidqa"
    resident: int | None = Field(None, ge=0, le=PARTITIONS)
    weights: float | None = Field(None, ge=0, lt=1)
    batch: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _streams(self) -> BatchingCell:
        if self.weights is not None and not SETTINGS[self.setting].streamed:
            raise ValueError(f"weights: {self.setting} has all of them on the device: choose another setting")
        return self

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals.parse(self.steps)

    @property
    def requests(self) -> int:
        return self.arrivals.count or 0


@dataclass(frozen=True, slots=True)
class System:
    """`serial`: a batch is searched for, then generated. `sizes` of its batches; `placed`: partitions are resident
    where memory is left; `depth`: layers read ahead, None: all with room. `joined`: requests join
    generation at each step; `kept`: KV of prefixes is shared and kept, with documents by "rank", or "ordered";
    `passes`: requests join retrieval at each partition. `server`: the product's own, with the batches that are joined
    or not, and ordered KV if kept."""

    words: str
    engine: Literal["accelerate", "vllm", "prefetch"] = "prefetch"
    serial: bool = False
    sizes: Literal["backlog", "rate", "fixed"] = "backlog"
    placed: bool = True
    depth: int | None = None
    joined: bool = False
    kept: Literal["", "rank", "ordered"] = ""
    passes: bool = False
    server: bool = False
