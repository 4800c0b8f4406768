"""The specification of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.retrieval import Retriever
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.sim import Like
from ragorder.eval.running.load import Load, ServiceTimes

__all__ = ["DEFAULT_POLICIES", "Bench", "BenchError", "EventsAddress"]

DEFAULT_POLICIES = ("retrieval", "greedy", "best", "auto")


class BenchError(ValueError):
    """A benchmark cannot be run as asked. The message says what to change."""


class EventsAddress(NamedTuple):
    """The addresses of a server's KV events."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure.

    `workloads` are synthetic ones or "pydocs"; `corpora` folders or loaded corpora. `settings` go to policies that are
    orderers. Engine "openai" takes one of `base_urls` for all policies, or one each, or starts a vLLM; policy "events"
    needs `events`. None in `capacity` and `block_size`: the engine's own; in `output_tokens`: the arrivals', or the
    engine's. `time_builds` also builds prompts as text; `timelines` samples the cache. With `concurrency` or `arrivals`
    the engine is under `Load`.
    """

    workloads: Sequence[str] = ()
    corpora: Sequence[str | Corpus] = ()
    order: str = "data"
    retriever: Retriever | None = None
    policies: Sequence[str] = DEFAULT_POLICIES
    engine: str = "sim"
    like: Like = "lru"
    model: Path | None = None
    base_urls: Sequence[str] = ()
    events: EventsAddress | None = None
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    top_k: int | None = None
    capacity: Capacity | None = None
    block_size: int | None = None
    host_tokens: int | None = None
    output_tokens: int | None = None
    waiting: int = 0
    batch: bool = False
    max_wait: int | None = None
    concurrency: int | None = None
    arrivals: Arrivals | None = None
    service_times: ServiceTimes = field(default_factory=ServiceTimes)
    seeds: Sequence[int] = (0,)
    limit: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    time_builds: bool = False
    timelines: bool = False

    @property
    def under_load(self) -> bool:
        return self.concurrency is not None or self.arrivals is not None

    @property
    def requests(self) -> int | None:
        """The number wanted; None: all."""
        return self.limit or (self.arrivals.count if self.arrivals else None)

    @property
    def answer_tokens(self) -> int | None:
        """The expected length of an answer."""
        return self.output_tokens or (self.arrivals.output_tokens_mean if self.arrivals else None)

    def load(self, trace: Trace, seed: int) -> Load:
        """Raises ArrivalsError if fewer requests arrive than the trace has."""
        arrivals = self.arrivals.draw(len(trace.requests), seed) if self.arrivals else ()
        return Load(self.concurrency, arrivals, self.output_tokens)

    def describe_load(self) -> dict[str, object] | None:
        if not self.under_load:
            return None
        arrivals = self.arrivals
        return {
            "concurrency": self.concurrency,
            "arrivals": arrivals and arrivals.name,
            "time_scale": arrivals.time_scale if arrivals else 1.0,
            "replicas": arrivals.replicas if arrivals else 1,
        }
