"""The embedded engine by itself: prefills, fused prompts, and workloads with caches of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.benchmarks.kernels.embedded.models import SHAPES, Layout, hardware, threads
from ragorder.benchmarks.ragcache.replacement.experiment import SizeText
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.trie.policies import POLICIES

__all__ = [
    "BLOCKING",
    "EXACTLY",
    "FUSED",
    "HALF",
    "NOTHING",
    "NO_CACHE",
    "PLAIN",
    "PREFIX",
    "TIERS",
    "CacheSetup",
    "Embedded",
    "EmbeddedCell",
    "EmbeddedRecord",
]

PLAIN, NOTHING, NO_CACHE = "transformers", "nothing", "no cache"
PREFIX = "exact prefix"
FUSED = {f"fused, {share:.0%} anew": share for share in (0.0, 0.05, 0.15, 0.3, 1.0)}
"""Shares of the reused tokens recomputed, by arm."""
BLOCKING = ", blocking loads"
"""An arm's end: the engine waits for each request's loads."""
HALF = ", half of the documents exact"
"""An arm's end: what ordering brings (`eval run fusion-quality` has the answers)."""
EXACTLY = ", exact request"
"""An arm's end: it asks for no more than a prefix cache has."""
_HALVED = tuple(arm for arm, share in FUSED.items() if share < 1)
_BLOCKED = (PREFIX, *(arm for arm, share in FUSED.items() if share != 0.3))
TIERS = ("device", "host", "disk")
_OF_SETUPS = ("host", "replacement", "order", "replicas")
_OF_SERVING = ("workload", "top_k", "requests", "warmup", "device", "fails_after", *_OF_SETUPS)
_OF_PREFILL = ("documents", "document_tokens", "system_tokens", "question_tokens", "repeats")
_OF_FUSED = ("stored", "batch")
_LEAST_REQUESTS = 10
_Order = Literal["retrieval", "sorted", "greedy", "prefix", "free"]
_List = Field(strict=False)
_COLUMNS = ("wall_ms", "cpu_ms", "device", "host", "disk")
_SERVED = ("prompt_tokens", "hits", "retrieved")
_OTHER_ENGINE = "the embedded engine is measured by itself: run it without --engine"


_Policy = Annotated[str, one_of("replacement policy", POLICIES)]


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """Without a `policy` of replacement nothing is cached."""

    order: str = "retrieval"
    policy: str | None = None
    host: str | None = None
    replicas: int = 0

    @property
    def name(self) -> str:
        if self.policy is None:
            return NO_CACHE
        place = "device" if self.host is None else f"device and {self.host}"
        replicas = f", {self.replicas} replicas" if self.replicas else ""
        return f"{place}, {self.policy}{replicas}" + ("" if self.order == "retrieval" else f", {self.order} order")


class EmbeddedCell(SuiteCell):
    """`shape` is a model's, with random weights.

    cached, overhead, tiers, fused: a prompt of `documents`, by how many of them are cached; against transformers; by
    the tier that holds all of them; by the share recomputed of those that have KV after the system prompt alone,
    which is `stored` in one tier, with a `batch` of such prompts at once (times of a prompt).
    serving: a `workload` without a cache, with the `device`, and with each `host` memory besides by each
    `replacement` policy, with `replicas` of the most used nodes, in each `order`. Sizes: "4GiB", or a share of
    the working set ("5%"). The device loses its KV after `fails_after` requests.
    """

    measure: Literal["cached", "overhead", "tiers", "fused", "serving"]
    shape: Annotated[str, one_of("shape", SHAPES)] = "small"
    block_size: int = Field(16, ge=1)
    threads: int = Field(1, ge=1)
    documents: int = Field(5, ge=1)
    document_tokens: int = Field(200, ge=1)
    system_tokens: int = Field(50, ge=1)
    question_tokens: int = Field(30, ge=1)
    repeats: int = Field(20, ge=2)
    stored: Literal["device", "host", "disk"] = "device"
    batch: int = Field(1, ge=1, le=64)
    workload: str = "paper"
    top_k: int | None = Field(None, ge=1)
    requests: int = Field(600, ge=12)
    warmup: int = Field(60, ge=0)
    device: SizeText = "4GiB"
    host: Annotated[tuple[SizeText, ...], _List] = ()
    replacement: Annotated[tuple[_Policy, ...], _List] = ("pgdsf",)
    order: Annotated[tuple[_Order, ...], _List] = ("retrieval",)
    replicas: Annotated[tuple[Annotated[int, Field(ge=0)], ...], _List] = (0,)
    fails_after: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        foreign = (*(_OF_PREFILL if self.measure == "serving" else _OF_SERVING), *(self.measure != "fused") * _OF_FUSED)
        wrong = next((name for name in foreign if name in self.model_fields_set), None)
        if wrong:
            raise ValueError(f'{wrong} does not go with measure = "{self.measure}"')
        if self.warmup > self.requests - _LEAST_REQUESTS:
            least = f"leaves less than {_LEAST_REQUESTS} of {self.requests} requests to measure"
            raise ValueError(f"a warmup of {self.warmup} {least}")
        return self

    @property
    def fields(self) -> dict[str, Any]:
        # Those of `setups` are in the policies' names.
        return {name: value for name, value in super().fields.items() if name not in _OF_SETUPS}

    @property
    def layout(self) -> Layout:
        return Layout(self.documents, self.document_tokens, self.system_tokens, self.question_tokens)

    @property
    def setups(self) -> Mapping[str, CacheSetup]:
        """By name. The device alone has LRU, as prefix caching does."""
        alone = [CacheSetup(order, "lru") for order in self.order]
        behind = [
            CacheSetup(order, policy, host, replicas)
            for order in self.order
            for host in self.host
            for policy in self.replacement
            for replicas in self.replicas
        ]
        return {setup.name: setup for setup in (CacheSetup(), *alone, *behind)}

    @property
    def arms(self) -> tuple[str, ...]:
        """The suite's policies in this cell."""
        if self.measure == "serving":
            return tuple(self.setups)
        if self.measure == "overhead":
            return PLAIN, NOTHING
        if self.measure == "fused":
            loads = self.batch > 1 and self.stored != "device"
            ended = [f"{arm}{BLOCKING}" for arm in _BLOCKED] if loads else [f"{arm}{HALF}" for arm in _HALVED]
            return NOTHING, PREFIX, *FUSED, *ended, *([] if loads else [f"{PREFIX}{EXACTLY}"])
        return NOTHING, *(TIERS if self.measure == "tiers" else map(str, range(self.documents + 1)))


class EmbeddedRecord(Record):
    """One arm: times and cached tokens of each repetition or request. `facts`: the `profile` that PGDSF had."""

    called: ClassVar[str] = "a measurement of the embedded engine"

    type: Literal["embedded"] = "embedded"

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return _COLUMNS + (_SERVED if self.setting.measure == "serving" else ())

    @property
    def setting(self) -> EmbeddedCell:
        return EmbeddedCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.figures("wall_ms"))

    def figures(self, name: str) -> list[float]:
        """The figures after the warm-up."""
        values: list[float] = self.rows[name]
        return values[self.warmup :]


class Embedded(Experiment):
    kind = "embedded"
    record = EmbeddedRecord
    cell = EmbeddedCell
    one_job = True
    unit = "prompts"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._models: dict[str, TorchModel] = {}

    def asked(self, suite: Suite) -> Sequence[str]:
        arms = dict.fromkeys(arm for cell in suite.cells for arm in cell.arms)
        return [arm for arm in arms if self.options.policies is None or arm in self.options.policies]

    def obstacle(self, suite: Suite, cell: EmbeddedCell, policy: str) -> str | None:
        if self.options.engine not in ("sim", "torch"):
            return _OTHER_ENGINE
        return lacks_torch() or SHAPES[cell.shape].obstacle

    def applies(self, suite: Suite, cell: EmbeddedCell, policy: str) -> bool:
        return policy in cell.arms

    def steps(self, job: Job) -> int:
        cell: EmbeddedCell = job.cell
        if cell.measure == "serving":
            return job.requests * len(job.policies)
        return cell.repeats * len(cell.arms)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        cell: EmbeddedCell = job.cell
        with threads(cell.threads):
            if cell.shape not in self._models:
                self._models[cell.shape] = SHAPES[cell.shape].make()
            model = self._models[cell.shape]
            engine = {"name": "torch", "model": cell.shape, "block_size": cell.block_size, "hardware": hardware()}
            try:
                for arm, warmup, rows, facts in self._measure(job, model, advance):
                    rounded = {name: [round(value, 3) for value in values] for name, values in rows.items()}
                    line = {"policy": arm, "engine": engine, "warmup": warmup, "load_average": load_average()}
                    yield {**line, "facts": facts, "rows": rounded}
            except ValueError as error:
                # A workload that cannot be drawn so, or a prompt that is longer than the model's longest.
                yield from (Missing(job.suite.name, cell.fields, arm, str(error)) for arm in job.policies)

    def _measure(
        self, job: Job, model: TorchModel, advance: Callable[[], None]
    ) -> Iterator[tuple[str, int, dict[str, list[float]], dict[str, Any]]]:
        cell: EmbeddedCell = job.cell
        if cell.measure == "serving":
            from ragorder.benchmarks.kernels.embedded.serving import draw_trace, serve_trace

            trace = draw_trace(cell.workload, job.seed, job.requests, cell.top_k)
            # A shorter run has as large a share of warm-up.
            warmup = cell.warmup * job.requests // cell.requests
            for arm in job.policies:
                yield arm, warmup, *serve_trace(trace, cell, cell.setups[arm], model, job.seed, advance)
            return
        from ragorder.benchmarks.kernels.embedded.prefill import measure_prefill

        # All take turns, those too that have been measured: times of one cell are of one time.
        for arm, rows in measure_prefill(cell, model, job.seed, advance).items():
            if arm in job.policies:
                yield arm, 0, rows, {}
