"""Cells of workflows on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ragorder.benchmarks.common.virtual.costs import EngineCosts, ScanCosts, SearchCosts
from ragorder.benchmarks.hedra.workflows.script import WORKFLOWS
from ragorder.eval.data.names import unknown
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.pipelining.workflow.transformations import Transformation

# Costs of the paper's hardware (HedraRAG section 6.1). Measured is one: 77 ns to scan a vector of 128 dimensions on
# one core, which makes 616 ns of 1,024. The others follow from data sheets, or are guesses, as said here.
CLUSTERS = 4096

SEARCH = SearchCosts(
    # Measured: 77 ns x 1024 / 128.
    code_s=616e-9,
    vectors=38_000_000,
    clusters=CLUSTERS,
    # 64 cores read 4 KiB in 616 ns each: 425 GB/s. A guess: 55 % of the EPYC 9534's 460 GB/s can be had, which is 38
    # cores' worth, and 13 searches a second with nprobe=512; the paper calls 8 to 12 its limit (section 6.3).
    busy_cores=38,
    # Measured for ContinuousIVF on another machine: 0.2 ms a piece.
    piece_s=2e-4,
)


# A part of the index on the H100, from its data sheet: 4 KiB a vector, at 75 % of 3.35 TB/s; 50 us a call is a guess.
FAST = ScanCosts(code_s=1.6e-9, call_s=5e-5)


# From an H100's data sheet, at guessed shares: weights and KV are read at 75 % of 3.35 TB/s, with 2 ms a step beside
# it; prompts are computed at 50 % of 989 TFLOP/s. The cache has 0.9 of 80 GB, less weights and 4 GB.
MODELS = {
    "llama3-8b": EngineCosts(8.4e-3, 32e-6, 52e-9, capacity_tokens=396_000),
    "llama2-13b": EngineCosts(12.4e-3, 53e-6, 326e-9, capacity_tokens=51_000),
    # Its KV leaves room for few requests: 8 GB of the 80.
    "opt-30b": EngineCosts(25.9e-3, 121e-6, 548e-9, capacity_tokens=5_800),
}


def _known(names: str) -> str:
    for name in names.split("+"):
        if name not in WORKFLOWS:
            raise ValueError(unknown("workflow", name, WORKFLOWS))
    return names


class WorkflowsCell(SuiteCell):
    """Requests of a `workflow`, or of two ("multistep+one_shot": the first has the `share`), that arrive at
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


@dataclass(frozen=True, slots=True)
class System:
    """Searches: "alone", each whole on a core of its own; "batch", whole, with all others that wait, a core each;
    "dealt", the same, its clusters dealt to all cores; "pieces".
    `transformations` of a WorkflowServer (None: stage by stage). `lockstep`: requests of a batch, whose stages begin
    when all have ended the last. `max_generations`, `window`: of the WorkflowServer. `fast`: a GPU holds the cell's
    part of the index."""

    words: str
    searches: Literal["alone", "batch", "dealt", "pieces"] = "pieces"
    transformations: Callable[[], Sequence[Transformation]] | None = None
    lockstep: int | None = None
    max_generations: int | None = None
    window: int = 32
    fast: bool = False
