"""Retrieval and generation within a memory budget on a virtual clock, with costs fitted to RAGDoll's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from ragorder.benchmarks.doll.batching.settings import PARTITION_GB, PARTITIONS, SETTINGS
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["SYSTEMS", "Batching", "BatchingCell", "System", "checked_steps"]


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


SYSTEMS = {
    "accrag": System("serial static batches, accelerate (AccRAG)", "accelerate", True, "rate", placed=False),
    "vllmrag": System("serial static batches, vLLM (vLLMRAG)", "vllm", True, "rate", placed=False),
    "flexgen": System("serial static batches, one layer ahead (FlexGen)", "prefetch", True, "rate", False, depth=1),
    "ragdoll": System("RAGDoll"),
    "ragdoll-serial": System("RAGDoll, not pipelined", serial=True),
    "ragdoll-fixed": System("RAGDoll, fixed batches", sizes="fixed"),
    "ragdoll-depth1": System("RAGDoll, one layer ahead (FlexGen)", depth=1),
    "ragdoll-depth0": System("RAGDoll, no prefetch", depth=0),
    "ragdoll-unplaced": System("RAGDoll, no resident partitions", placed=False),
    "server": System("RAGDoll's batches by DecoupledServer", server=True),
    "joined": System("requests join at each step", joined=True),
    "kept": System("and prefixes are kept", joined=True, kept="rank"),
    "ours": System("and documents are ordered (ours)", joined=True, kept="ordered"),
    "ours-server": System("the same by DecoupledServer", joined=True, kept="ordered", server=True),
    "ours+passes": System("ours, and requests join a pass", joined=True, kept="ordered", passes=True),
    "ours-server+passes": System("the same by DecoupledServer", joined=True, kept="ordered", passes=True, server=True),
}
"""By policy; from "joined" each adds to the one before."""


class Batching(Experiment):
    """Columns: of each request its arrival, and seconds that it waited, was searched for and was generated for. Facts:
    see `serve`."""

    kind = "batching"
    cell = BatchingCell
    columns = ("latency_s", "at_s", "waiting_s", "retrieval_s", "generation_s")
    facts = ("total_s", "searching_s", "generating_s", "trace")
    runs = True
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"
    counts = "policies"

    def obstacle(self, suite: Suite, cell: BatchingCell, policy: str) -> str | None:
        """Only systems that keep KV need a corpus."""
        return super().obstacle(suite, cell, policy) if SYSTEMS[policy].kept else None

    def corpus(self, cell: BatchingCell) -> Corpus | None:
        found = self._corpus(cell)
        return None if isinstance(found, str) else found

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching.generation import Prompts
        from ragorder.benchmarks.doll.batching.serving import serve
        from ragorder.eval.virtual.loop import run_virtual

        cell: BatchingCell = job.cell
        arrivals = cell.arrivals
        at_s = [each.at_s for each in arrivals.draw(job.requests, job.seed)]
        for policy in job.policies:
            system = SYSTEMS[policy]
            prompts = None
            if system.kept and job.corpus is not None:
                prompts = Prompts.of(job.corpus, job.requests, top_k=cell.top_k, seed=job.seed)
            yield {
                "policy": policy,
                "engine": {"name": "virtual", "model": cell.setting},
                **run_virtual(serve(system, cell, at_s, arrivals.steps, prompts)),
            }
            advance()
