"""Marks and cost of one request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragorder.clouds.cost import Cost
from ragorder.clouds.prices import Prices
from ragorder.clouds.residency import CacheReport, MarkPlan
from ragorder.clouds.rules import CacheRules
from ragorder.clouds.turns import TurnMarks
from ragorder.trie.histories import TurnEnd

__all__ = ["CloudModel", "CloudRequest", "RequestMirror"]


@dataclass(frozen=True, slots=True)
class CloudModel:
    """A provider's model: the `rules` of its cache, and its name among `prices`."""

    rules: CacheRules
    name: str | None = None
    prices: Prices | None = None

    @property
    def price(self) -> float | None:
        return None if self.prices is None or self.name is None else self.prices.of(self.name)


class RequestMirror(Protocol):
    """What is known of the cache is told what a request does. Its methods never wait."""

    def publish(self) -> None:
        """The first token is there."""

    def keep_marks(self, breakpoints: Collection[int]) -> None:
        """Of its marks it has these alone."""


class CloudRequest:
    """A request's part of an `Ordering`: `turn` of one in a conversation."""

    __slots__ = ("_mirror", "_plan", "_turn", "model")

    def __init__(self, model: CloudModel, plan: MarkPlan, mirror: RequestMirror, turn: TurnEnd | None = None) -> None:
        self.model = model
        self._plan = plan
        self._mirror = mirror
        self._turn = turn

    @property
    def breakpoints(self) -> Sequence[int]:
        if self._turn is None:
            return self._plan.breakpoints
        marks = self.turn_marks
        return (0, *marks.documents) if marks.system else marks.documents

    @property
    def turn_marks(self) -> TurnMarks:
        """The marks of a turn, of which `breakpoints` are those at its documents."""
        if self._turn is None:
            marks = self._plan.breakpoints
            return TurnMarks(system=0 in marks, documents=tuple(mark for mark in marks if mark))
        turn = self._turn
        return TurnMarks.of(self._plan.breakpoints, turn.sizes, turn.documents - turn.history_nodes)

    @property
    def resumed(self) -> int:
        """The mark at which the request is expected to resume; -1 if at none."""
        return self._plan.resumed

    def keep_marks(self, breakpoints: Collection[int]) -> None:
        """Of its `breakpoints` the request, which is no turn, is sent with these alone."""
        if set(self._plan.breakpoints) - set(breakpoints):
            self._mirror.keep_marks(breakpoints)

    def readable(self) -> None:
        self._mirror.publish()

    def report(self, cached_tokens: float | None, written_tokens: float | None, prompt_tokens: float | None) -> None:
        self._plan.report = CacheReport(cached_tokens, written_tokens, prompt_tokens)

    @property
    def cost(self) -> Cost:
        prompt, cached, written = self._plan.tokens
        model = self.model
        return Cost(
            prompt,
            cached,
            written,
            model.rules.cost(prompt, cached, written),
            model.price,
            model.prices.currency if model.prices is not None else "",
            model.prices.date if model.prices is not None else "",
            self._plan.report.cached_tokens is not None,
        )
