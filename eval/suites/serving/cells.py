"""Cells of the suites of kind "serve"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.trace import QuestionOrder
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.policies import parse_guards

__all__ = ["ServingCell"]


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
