"""The experiment of the suites of kind "serve"."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.trace import QuestionOrder
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.peers import PEERS, PeerError, make_peer
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.cells import Display, SuiteCell
from ragorder.eval.running.options import SIM_LIKE
from ragorder.eval.running.policies import ORDERERS, POLICIES, parse_guards
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.runner import Run
from ragorder.eval.running.specs import Bench, EngineSpec, EventsAddress
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.eval.engines.pool import EnginePool


def _capacity(value: Any) -> Any:
    if value is None or value == "unlimited":
        return None
    if isinstance(value, str):
        Capacity.parse(value)
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError('give tokens (100000), a share of the corpus ("5%") or "unlimited"')
    return value


def _guard_settings(guards: str) -> dict[str, Any]:
    return {} if guards == "none" else parse_guards(guards.split("+"))


def _guards(value: Any) -> Any:
    if isinstance(value, str):
        _guard_settings(value)
    return value


def _arrivals(value: Any) -> Any:
    if value == "none":
        return None
    if isinstance(value, str):
        if not value.startswith("poisson:"):
            raise ValueError("give a rate in requests a second, such as poisson:2.5, or none")
        Arrivals.parse(value)
    return value


class ServingCell(SuiteCell):
    """`arrivals`: an open loop, "poisson:2.5" (requests a second), with at most `concurrency` in flight if it is given;
    "none": one request at a time, to compare with. `capacity_tokens` None: unlimited. `residency`: evictions are
    ignored ("none", as in the paper), mirrored ("lru"), or read from KV events ("events")."""

    workload: str | None = None
    corpus: str | None = None
    order: QuestionOrder = "data"
    top_k: int | None = Field(None, ge=1)
    capacity_tokens: Annotated[int | str | None, BeforeValidator(_capacity)] = 100_000
    block_size: int | None = Field(None, ge=1)
    output_tokens: int | None = Field(None, ge=1)
    concurrency: int | None = Field(None, ge=1)
    arrivals: Annotated[str | None, BeforeValidator(_arrivals)] = None
    waiting: int = Field(0, ge=0)
    batch: bool = False
    guards: Annotated[str, BeforeValidator(_guards)] = "none"
    residency: Literal["none", "lru", "events"] | None = None

    @model_validator(mode="after")
    def _whole(self) -> ServingCell:
        if (self.workload is None) == (self.corpus is None):
            raise ValueError("a cell has either a workload or a corpus")
        if self.corpus is None and "order" in self.model_fields_set:
            raise ValueError("order is that of a corpus' questions: a workload has none")
        if self.batch and self.waiting:
            raise ValueError("a batch has no waiting requests: leave out waiting")
        if self.batch and self.arrivals:
            raise ValueError("a batch is planned before its first request is served: leave out arrivals")
        return self

    @property
    def capacity(self) -> Capacity:
        tokens = self.capacity_tokens
        if isinstance(tokens, str):
            return Capacity.parse(tokens)
        return Capacity(tokens=tokens)

    @property
    def in_flight(self) -> int | None:
        unloaded = "arrivals" in self.model_fields_set and self.arrivals is None
        return 1 if unloaded and self.concurrency is None else self.concurrency

    @property
    def settings(self) -> dict[str, Any]:
        settings = _guard_settings(self.guards)
        if self.residency == "none":
            settings |= {"residency": "none", "feedback": False}
        elif self.residency == "lru":
            settings["residency"] = "lru"
        return settings

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None or self.order != "data"


class Serving(Experiment):
    kind = "serve"
    record = RunRecord
    cell = ServingCell
    one_job = True
    policies: ClassVar[Any] = POLICIES

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._peers: dict[str, str | None] = {}

    def obstacle(self, suite: Suite, cell: ServingCell, policy: str) -> str | None:
        return super().obstacle(suite, cell, policy) or self._obstacle(suite, cell, policy)

    def _obstacle(self, suite: Suite, cell: ServingCell, policy: str) -> str | None:
        options, engine = self.options, self.options.engine
        if policy == "oracle" and engine != "sim":
            return "the oracle reads the engine's block table, which only the simulated engine shows"
        if policy == "none" and engine == "openai":
            return "a server's prefix cache is on for all requests or off for all: measure it with --engine vllm"
        if cell.residency == "events" and policy in ORDERERS:
            if engine != "openai":
                return f"engine {engine} publishes no KV events: use --engine openai"
            if policy != "free":
                return "events are followed by policy free"
            if options.base_url is not None and options.events is None:
                return "the address of the server's KV events is not known: give --events-endpoint"
        if engine == "vllm" and ((cell.concurrency or 1) > 1 or cell.arrivals):
            return "vLLM in this process serves one request at a time: use --engine openai or torch"
        swept = {name for point in (suite.sweep, *suite.extra) for name in point}
        if engine == "openai" and options.base_url is not None and "capacity_tokens" in swept:
            return "the cache of a running server has a fixed size: leave out --base-url"
        if engine == "openai" and options.base_url is None and not isinstance(cell.capacity_tokens, int):
            return "a server is started with a cache size in tokens, not a share and not unlimited"
        return None

    def together(self, suite: Suite, policies: Sequence[str]) -> Iterable[tuple[str, ...]]:
        """All policies take turns. The baseline is not measured alone if other policies were asked for."""
        alone = list(policies) == [suite.baseline] and len(self.asked(suite)) > 1
        return [] if alone else super().together(suite, policies)

    def seeds(self, cell: ServingCell) -> Sequence[int]:
        return super().seeds(cell) if self.options.engine == "sim" else self.options.seeds

    def in_order(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs of one engine size in a row; among jobs that measure the same, the one with most policies first, for the
        others to copy."""

        def size(job: Job) -> tuple[object, ...]:
            cell = job.cell
            return () if self.options.engine == "sim" else (cell.capacity_tokens, cell.block_size, cell.output_tokens)

        sizes: dict[tuple[object, ...], int] = {}
        measured: dict[str, int] = {}
        placed = []
        for place, job in enumerate(jobs):
            measurement = self.measurement(job)
            first = sizes.setdefault(size(job), place), measured.setdefault(measurement, place), -len(job.policies)
            placed.append((*first, place, job))
        return [job for *_, job in sorted(placed, key=lambda each: each[:-1])]

    def measurement(self, job: Job) -> str:
        what = {
            "cell": job.cell.fields,
            "seed": job.seed,
            "requests": job.requests,
            "warmup": self._warmup(job),
            "builds": self._times_builds(job),
            "timelines": job.suite.keeps_timelines,
        }
        return json.dumps(what, sort_keys=True)

    def _warmup(self, job: Job) -> int:
        return 0 if job.cell.batch else min(job.suite.warmup, job.requests // 2)

    def _times_builds(self, job: Job) -> bool:
        return job.suite.times_builds or self.options.engine != "sim"

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        for peer in [policy for policy in job.policies if policy in PEERS]:
            reason = self._peer_missing(peer)
            if reason is not None:
                yield Missing(job.suite.name, job.cell.fields, peer, reason)
                _skip(job.requests, advance)
                job = job.without([peer])
        kept = self.store.measured(self.measurement(job), job.policies)
        if kept is not None:
            for line in kept:
                copied = {"session": self.session, "suite": job.suite.name, "copied_from": line["suite"]}
                yield {**line, **copied, "measured_in": line.get("measured_in", line["session"])}
            _skip(job.requests * len(job.policies), advance)
            return
        try:
            runs = self.serve(job, advance)
        except PeerError as error:
            peers = [policy for policy in job.policies if policy in PEERS]
            yield from (Missing(job.suite.name, job.cell.fields, peer, str(error)) for peer in peers)
            if len(peers) < len(job.policies):
                yield from self.measure(job.without(peers), advance)
            return
        except ValueError as error:
            reason = " ".join(str(error).split())
            yield from (Missing(job.suite.name, job.cell.fields, policy, reason) for policy in job.policies)
            _skip(job.requests * len(job.policies), advance)
            return
        for policy, run in zip(job.policies, runs, strict=True):
            yield {"policy": policy, **self._figures(job, run)}

    def _peer_missing(self, peer: str) -> str | None:
        if peer not in self._peers:
            try:
                make_peer(peer)
                self._peers[peer] = None
            except PeerError as error:
                self._peers[peer] = str(error)
        return self._peers[peer]

    def serve(self, job: Job, advance: Callable[[], None]) -> list[Run]:
        """Return the served runs of the job's policies, each on an empty cache; an engine is kept until a job needs one
        of another size. Raises as `run_traces` does."""
        pool, options, sizes = None, self.options, (job.cell.capacity.tokens, job.cell.block_size)
        base_url, events = options.base_url, options.events
        if options.engine in ("vllm", "torch"):
            pool = self.kept(options.engine, self._open_pool)
        elif options.engine == "openai" and base_url is None:
            base_url, events = self.kept(sizes, lambda: self._start_server(*sizes))
        (runs,) = run_traces(self._bench(job, base_url, events), lambda description, steps: advance, pool=pool)
        return runs

    def _open_pool(self) -> EnginePool[Any]:
        from ragorder.eval.engines.pool import TorchPool, VLLMPool

        return self.resources.enter_context(VLLMPool() if self.options.engine == "vllm" else TorchPool())

    def _start_server(self, capacity_tokens: int | None, block_size: int | None) -> tuple[str, EventsAddress]:
        from ragorder.eval.running.live import start_server

        spec = EngineSpec(
            engine="openai",
            model=self.options.model,
            capacity=Capacity(tokens=capacity_tokens),
            block_size=block_size,
        )
        server = self.resources.enter_context(start_server(spec))
        return server.base_url, EventsAddress(server.events_endpoint, server.replay_endpoint, server.events_topic)

    def _bench(self, job: Job, base_url: str | None, events: EventsAddress | None) -> Bench:
        options, cell = self.options, job.cell
        live = options.engine == "openai"
        policies = tuple(_served_as(policy, cell) for policy in job.policies)
        return Bench(
            workloads=() if cell.workload is None else (cell.workload,),
            corpora=() if job.corpus is None else (job.corpus,),
            order=cell.order,
            policies=policies,
            engine=options.engine,
            like=SIM_LIKE,
            model=options.model,
            base_urls=() if base_url is None else (base_url,),
            events=events if "events" in policies else None,
            served_model=options.served_model,
            api_key=options.api_key,
            top_k=cell.top_k,
            # A server reports its own cache.
            capacity=None if live else cell.capacity,
            block_size=None if live else cell.block_size,
            output_tokens=cell.output_tokens,
            waiting=cell.waiting,
            batch=cell.batch,
            concurrency=cell.in_flight,
            arrivals=None if cell.arrivals is None else Arrivals.parse(cell.arrivals),
            seeds=(job.seed,),
            limit=job.requests,
            settings=cell.settings,
            time_builds=self._times_builds(job),
            timelines=job.suite.keeps_timelines,
        )

    def _figures(self, job: Job, run: Run) -> dict[str, Any]:
        options = self.options
        model = options.served_model or options.model or (None if options.engine == "sim" else "random weights")
        fields = run.fields(None if model is None else str(model), self._warmup(job))
        return fields | {"measurement": self.measurement(job)}

    @classmethod
    def own_suites(cls) -> Mapping[str, Suite]:
        bench = Suite.unlisted("bench", "Benchmark", report=Display(chart="moves", metrics=("tenths",)))
        return {bench.name: bench}


def _skip(steps: int, advance: Callable[[], None]) -> None:
    for _ in range(steps):
        advance()


def _served_as(policy: str, cell: ServingCell) -> str:
    return "events" if policy == "free" and cell.residency == "events" else policy
