"""Cells of the embedded engine's measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ragorder.benchmarks.kernels.embedded.models import SHAPES, Layout
from ragorder.benchmarks.ragcache.replacement.experiment import SizeText
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.trie.policies import POLICIES

PLAIN, NOTHING, NO_CACHE = "transformers", "nothing", "no cache"
PREFIX = "exact prefix"
FUSED = {f"fused, {share:.0%} recomputed": share for share in (0.0, 0.05, 0.15, 0.3, 1.0)}
"""Shares of the reused tokens recomputed, by arm."""

BLOCKING = ", blocking loads"
"""An arm's end: the engine waits for each request's loads."""

HALF = ", half of the documents exact"
"""An arm's end: what ordering brings."""

EXACTLY = ", exact request"
"""An arm's end: it asks for no more than a prefix cache has."""

_HALVED = tuple(arm for arm, share in FUSED.items() if share < 1)
_BLOCKED = (PREFIX, *(arm for arm, share in FUSED.items() if share != 0.3))
TIERS = ("device", "host", "disk")


def way_of(arm: str) -> str:
    """Return an arm without its end."""
    return arm.removesuffix(BLOCKING).removesuffix(HALF).removesuffix(EXACTLY)


_OF_SETUPS = ("host", "replacement", "order", "replicas")
_OF_SERVING = ("workload", "top_k", "requests", "warmup", "device", "fails_after", *_OF_SETUPS)
_OF_PREFILL = ("documents", "document_tokens", "system_tokens", "question_tokens", "repeats")
_OF_FUSED = ("stored", "batch")
_LEAST_REQUESTS = 10
_Order = Literal["retrieval", "sorted", "greedy", "prefix", "free"]
_List = Field(strict=False)
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
        tiered = [
            CacheSetup(order, policy, host, replicas)
            for order in self.order
            for host in self.host
            for policy in self.replacement
            for replicas in self.replicas
        ]
        return {setup.name: setup for setup in (CacheSetup(), *alone, *tiered)}

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
