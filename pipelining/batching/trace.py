"""Events of batches and requests, for pictures, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ragorder.pipelining.protocols import PipelineTrace

__all__ = ["BatchEvent", "RequestOutcome", "RequestTrace", "WorkerName"]

WorkerName = Literal["retrieval", "generation"]
RequestOutcome = Literal["running", "answered", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A worker's state when a batch began or requests joined it, when it ended or failed, memory was relieved, or a
    hook ran between two batches.

    - `at_s`: by the server's clock; `seconds`: of what has ended
    - `batch`: how many requests may run at once, as chosen; `running`: those that do; `waiting`: in the worker's queue
    - `kv_tokens`: of the running requests, None where no limit is set
    - `partitions`: in memory, None for a search without partitions
    """

    at_s: float
    worker: WorkerName
    event: Literal["began", "ended", "failed", "relieved", "reorganised"]
    batch: int
    running: int
    waiting: int
    kv_tokens: int | None = None
    partitions: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class RequestTrace:
    """Times of one request by the server's clock, in seconds (None: has not happened).

    - `retrieval_began_s`, `found_s`: of the search that succeeded; `generation_began_s`, `first_token_s`: of the answer
    - `retrieval_batch`, `generation_batch`: the most requests that ran beside it, itself included
    - `failures`: of its batches, after each of which it went back into its queue
    """

    arrived_s: float
    retrieval_began_s: float | None = None
    found_s: float | None = None
    generation_began_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    retrieval_batch: int = 0
    generation_batch: int = 0
    failures: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    outcome: RequestOutcome = "running"
    generation: PipelineTrace = field(default_factory=PipelineTrace, repr=False)

    @property
    def waited_s(self) -> float | None:
        """In both queues, including batches that failed."""
        times = self.retrieval_began_s, self.found_s, self.generation_began_s
        began_s, found_s, sent_s = times
        if began_s is None or found_s is None or sent_s is None:
            return None
        return began_s - self.arrived_s + sent_s - found_s

    def as_record(self) -> dict[str, Any]:
        """Fields of a line of JSON, without any text of the request."""
        names = [name for name in self.__slots__ if name != "generation"]
        return {name: getattr(self, name) for name in names}
