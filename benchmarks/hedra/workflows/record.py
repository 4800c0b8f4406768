"""The cell and the record of served workflows."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from ragorder.benchmarks.hedra.workflows.costs import FAST, MODELS, SEARCH
from ragorder.benchmarks.hedra.workflows.script import WORKFLOWS
from ragorder.eval.data.names import unknown
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.record import Record

__all__ = ["WorkflowsCell", "WorkflowsRecord"]


def _known(names: str) -> str:
    for name in names.split("+"):
        if name not in WORKFLOWS:
            raise ValueError(unknown("workflow", name, WORKFLOWS))
    return names


class WorkflowsCell(SuiteCell):
    """Requests of a `workflow`, or of two ("multistep+one_shot", of which the first has the `share`), that arrive at
    `rate` a second (0: all at once). `nprobe` of the 4,096 clusters are searched on `cores`; `model` has the engine's
    costs. A GPU holds the share `fast` of the index, and scans a vector in `fast_ns`."""

    corpus: str = "nqopen"
    workflow: Annotated[str, AfterValidator(_known)] = "one_shot"
    share: float = Field(0.5, ge=0, le=1)
    nprobe: int = Field(128, ge=1, le=4096)
    rate: float = Field(4.0, ge=0)
    cores: int = Field(SEARCH.busy_cores, ge=1)
    top_k: int = Field(1, ge=1, le=20)
    model: Annotated[str, one_of("model", MODELS)] = "llama3-8b"
    fast: float = Field(0.0, ge=0, lt=1)
    fast_ns: float = Field(FAST.code_s * 1e9, gt=0)
    requests: int = Field(300, ge=1)


class WorkflowsRecord(Record):
    """`rows`: seconds from each request's arrival to its answer, and its workflow. For the facts see `measuring`."""

    called: ClassVar[str] = "a run of workflows"
    facts_needed: ClassVar[tuple[str, ...]] = ("total_s", "prompt_tokens", "computed_tokens")

    type: Literal["workflows"] = "workflows"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_s", "workflow")

    @property
    def requests(self) -> int:
        return len(self.rows["latency_s"])
