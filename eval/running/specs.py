"""The specification of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from ragorder.errors import RagorderError
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.retrieval import Retriever
from ragorder.eval.data.trace import QuestionOrder, Trace
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.sim import Like
from ragorder.eval.running.load import Load, ServiceTimes

EngineName = Literal["sim", "vllm", "torch", "openai"]
DEFAULT_POLICIES = ("retrieval", "greedy", "prefix", "earned", "free")


class BenchError(RagorderError, ValueError):
    """A benchmark cannot be run as asked. The message says what to change."""


class EventsAddress(NamedTuple):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ServedBy(_Spec):
    """An engine, its model and, for a server, what it takes to use it."""

    engine: EngineName = Field(
        default="sim",
        description="sim: a simulated cache; vllm, torch: vLLM or ragorder's embedded engine in this process; openai: "
        "an OpenAI-compatible server.",
    )
    model: Path | None = Field(
        default=None,
        description="vllm, torch: the model's folder [default: random weights, made on the spot]. openai: folder or "
        "Hub name of the served model, for its tokenizer [default: the one that the server names].",
    )
    served_model: str | None = Field(
        default=None, description="The model's id on the server.", json_schema_extra={"unset": "the first one listed"}
    )
    api_key: str | None = Field(default=None, repr=False)
    events: SkipValidation[EventsAddress | None] = None


class EngineSpec(ServedBy):
    """An engine and its cache. `like`: the order of eviction of the simulated engine. Without `base_urls` engine
    "openai" starts a vLLM server."""

    like: Like = "lru"
    base_urls: Sequence[str] = Field(
        default=(),
        description="openai: the server, such as http://127.0.0.1:8000/v1. The policies take turns on it, "
        'each with a cache of its own ("cache_salt"). Repeated once for each policy: a server for '
        "each, all at the same time.",
        json_schema_extra={"unset": "a vLLM server is started for the benchmark"},
    )
    capacity: SkipValidation[Capacity | None] = Field(
        default=None,
        description="The engine's cache: tokens (10k is 10,000), a share of the corpus (5%), or unlimited.",
        json_schema_extra={"unset": "100000; openai: the server's /metrics"},
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in one KV block.",
        json_schema_extra={"unset": "16 for sim and torch, 32 for vllm; openai: the server's /metrics"},
    )
    host_tokens: int | None = Field(
        default=None,
        ge=0,
        description="torch: host memory for documents evicted from the device, in tokens.",
        json_schema_extra={"unset": "0"},
    )
    output_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens an answer.",
        json_schema_extra={"unset": "as the arrivals say, else 32 for sim, 1 for vllm, torch and openai"},
    )


class TraceSpec(_Spec):
    """Requests, and when they arrive. `workloads` are names of synthetic workloads or "pydocs", `corpora` folders,
    "pydocs" or loaded corpora."""

    workloads: Sequence[str] = ()
    corpora: SkipValidation[Sequence[str | Corpus]] = ()
    order: QuestionOrder = Field(
        default="data",
        description="Order of the questions: as in the corpus; random; recurring: 300 of them again and again, by "
        "Zipf's law; topics: 40 groups of five that share documents, shuffled.",
    )
    retriever: SkipValidation[Retriever | None] = None
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Documents a request.",
        json_schema_extra={"unset": "the workload's own; 5 for a corpus"},
    )
    arrivals: SkipValidation[Arrivals | None] = None
    seeds: Sequence[int] = Field(default=(0,), description="Seeds of workloads and random orders, with commas.")
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Only the first N requests; a synthetic workload is extended to N.",
        json_schema_extra={"unset": "all, or the length of the trace of --arrivals"},
    )

    @property
    def requests(self) -> int | None:
        return self.limit or (self.arrivals.count if self.arrivals else None)


class Bench(TraceSpec, EngineSpec):
    """A benchmark: requests, policies, an engine and its load.

        Bench(workloads=["zipf10"], policies=["retrieval", "free"], capacity=Capacity(100_000), limit=500)

    `settings` are those of the policies that are orderers. `time_builds`: prompts are built as text, too. `timelines`:
    the runs record how the cache filled.
    """

    policies: Sequence[str] = DEFAULT_POLICIES
    waiting: int = Field(default=0, ge=0, description="The next N requests are already waiting when one is ordered.")
    batch: bool = Field(default=False, description="Plan the whole run at once, reordering requests as well.")
    max_wait: int | None = Field(
        default=None,
        ge=0,
        description="With --batch: a request is served at most this many places late.",
        json_schema_extra={"unset": "any number"},
    )
    concurrency: int | None = Field(
        default=None, ge=1, description="Keep N requests in flight; with --arrivals at most N."
    )
    service_times: SkipValidation[ServiceTimes] = Field(default_factory=ServiceTimes)
    settings: SkipValidation[Mapping[str, Any]] = Field(default_factory=dict)
    time_builds: bool = False
    timelines: bool = False

    @property
    def under_load(self) -> bool:
        return self.concurrency is not None or self.arrivals is not None

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
