"""The cell and the record of workflows on real parts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.hedra.workflows.script import WORKFLOWS
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.record import Record

__all__ = ["LiveCell", "LiveRecord"]


class LiveCell(SuiteCell):
    """Requests at a `load` of the rate at which a full queue is served stage by stage. The index has the corpus and
    jittered copies of it, `vectors` in all, in `clusters`, of which a search scans `nprobe`. Answers are computed by
    the embedded engine, or by a vLLM server, on a model of one `shape`."""

    corpus: str = "nqopen"
    workflow: Annotated[str, one_of("workflow", WORKFLOWS)] = "irg"
    load: float = Field(0.8, gt=0)
    vectors: int = Field(300_000, ge=100)
    clusters: int = Field(512, ge=1)
    nprobe: int = Field(256, ge=1)
    top_k: int = Field(5, ge=1, le=20)
    engine: Literal["torch", "vllm"] = "torch"
    shape: Literal["tiny", "small"] = "small"
    requests: int = Field(120, ge=1)


class LiveRecord(Record):
    """`rows`: seconds from each request's arrival to its answer. Facts: the rate, milliseconds of one whole search and
    of a generation under this load, and those of `ragorder.benchmarks.hedra.workflows.measuring`."""

    called: ClassVar[str] = "a run of workflows on real parts"
    facts_needed: ClassVar[tuple[str, ...]] = ("rate", "search_ms", "total_s", "prompt_tokens", "cached_tokens")

    type: Literal["workflows-live"] = "workflows-live"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_s",)

    @property
    def requests(self) -> int:
        return len(self.rows["latency_s"])
