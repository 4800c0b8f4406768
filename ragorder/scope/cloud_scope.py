"""Scopes and settings of an orderer for a cache with rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

from ragorder.clouds import CacheRules, CloudModel, CloudRequest, Prices
from ragorder.clouds.marks import MarkChoice, MarkRates, WriteBudget
from ragorder.clouds.residency import JunctionsResidency, MarkedFeedback, MarksResidency
from ragorder.clouds.tree import MarkedPathSearch, MarkedTree
from ragorder.ordering import Ordering
from ragorder.scope.scope import Scope, ScopeOwner
from ragorder.settings import OrdererOptions, Settings
from ragorder.trie.residency import Lease, Pool, ScopeLengths
from ragorder.trie.tree import Node

D = TypeVar("D")

_REFUSED = {
    "host_tokens": 0,
    "disk_tokens": 0,
    "profile": None,
    "reuse": "exact",
    "residency": "lru",
    "events_endpoint": None,
}


@dataclass(frozen=True, slots=True)
class CloudCache:
    """A cloud's cache, and the clock in seconds for its entries' age."""

    model: CloudModel
    clock: Callable[[], float]

    @classmethod
    def of(
        cls,
        rules: CacheRules,
        model: str | None,
        prices: Prices | str | PathLike[str] | None,
        clock: Callable[[], float],
    ) -> CloudCache:
        known = prices if isinstance(prices, Prices) else Prices.load(prices)
        return cls(CloudModel(rules, model, known), clock)


class RulesOptions(OrdererOptions, total=False):
    """Further options of `Orderer.for_rules`."""

    prices: Prices | str | PathLike[str] | None
    key: Callable[[Any], Hashable] | None
    tokens: Callable[[Any], int] | None
    group: Callable[[Any], Hashable | None] | None
    clock: Callable[[], float]
    settings: Settings | None


def cloud_settings(settings: Settings, prefix_tokens: int | None) -> Settings:
    given = settings.model_fields_set
    for name, usual in _REFUSED.items():
        if name in given and getattr(settings, name) != usual:
            raise ValueError(f"{name} is not for a cache with rules: leave it out")
    changes: dict[str, Any] = {"block_size": 1}
    if "moves" not in given:
        # A cloud's contents depend on its breakpoints, which the measurement of earned moves ignores.
        changes["moves"] = "free"
    if "capacity_tokens" not in given:
        changes["capacity_tokens"] = None
    if prefix_tokens is not None and "prefix_tokens" not in given:
        changes["prefix_tokens"] = prefix_tokens
    return settings.model_copy(update=changes)


class CloudScopes:
    """Makes an orderer's scopes, which share learned read rates and the write budget."""

    def __init__(self, cache: CloudCache) -> None:
        self.cache = cache
        self._rates = MarkRates(cache.model.rules.ttl_s)
        self._budget = WriteBudget()

    def make(
        self, name: Hashable, settings: Settings, owner: ScopeOwner, pool: Pool, lengths: ScopeLengths
    ) -> CloudScope:
        choice = MarkChoice(self.cache.model.rules, self._rates, self._budget)
        return CloudScope(name, settings, owner, pool, lengths, self.cache, choice)


class CloudScope(Scope):
    mirror: MarksResidency
    # Only the last message of a turn has breakpoints for documents.
    rebases = False

    def __init__(
        self,
        name: Hashable,
        settings: Settings,
        owner: ScopeOwner,
        pool: Pool,
        lengths: ScopeLengths,
        cache: CloudCache,
        choice: MarkChoice,
    ) -> None:
        super().__init__(name, settings, owner, pool, None, lengths)
        tree = MarkedTree(settings.prefix_tokens, cache.model.rules)
        self.tree = tree
        resides = JunctionsResidency if cache.model.rules.resume == "junctions" else MarksResidency
        self.mirror = resides(tree, pool, choice, cache.clock)
        self.residency = MarkedFeedback(self.mirror, self._lengths) if settings.feedback else self.mirror
        self.search = MarkedPathSearch()
        self._model = cache.model

    def _annotate(self, ordering: Ordering[D], path: Sequence[Node], lease: Lease) -> None:
        plan = self.mirror.plans.get(lease)
        if plan is not None:
            publish, keep_marks = self.mirror.publish, self.mirror.keep_marks
            ordering.cloud = CloudRequest(
                self._model,
                plan,
                lambda: self.defer(publish, lease),
                lambda breakpoints: self.defer(keep_marks, lease, breakpoints),
                lease.turn,
            )
