"""Orders of documents: a policy with its guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.prompts import BuiltPrompts
from ragorder.eval.experiments.quality.base import QualityError
from ragorder.eval.experiments.quality.fused import FUSED, FusedReuse
from ragorder.eval.running.policies import ORDERERS, POLICIES, Policy, make_orderer, make_policy, parse_guards
from ragorder.settings import Settings

__all__ = ["DEFAULT_ORDERS", "Order"]

DEFAULT_ORDERS = (
    "retrieval",
    "earned",
    "free",
    "greedy",
    "sorted",
    "free+keep_first=2",
    "free+keep_last=2",
    "free+state_ranking",
)
_POLICIES = tuple(policy for policy in POLICIES if policy not in ("events", "oracle"))


@dataclass(frozen=True, slots=True)
class Order:
    """With `state_ranking` the prompt states retrieval's ranking. Policy "none" has no prefix cache. `fused`: documents
    off the cached prefix are taken over."""

    name: str
    policy: str
    guards: Mapping[str, Any]
    state_ranking: bool
    fused: FusedReuse | None = None

    @classmethod
    def parse(cls, name: str) -> Order:
        """From "free+keep_first=2", "retrieval+state_ranking" or "retrieval+fused=0.05:query". Raises QualityError."""
        policy, *extras = name.split("+")
        if policy not in _POLICIES:
            raise QualityError(f"unknown policy {policy!r} in {name!r}: choose from {', '.join(_POLICIES)}")
        ways = [extra.partition("=")[2] for extra in extras if extra.partition("=")[0] == FUSED]
        extras = [extra for extra in extras if extra.partition("=")[0] != FUSED]
        if ways and (policy == "none" or len(ways) > 1):
            raise QualityError(f"{name!r}: {FUSED} goes with a prefix cache, and once: leave one of them out")
        try:
            guards = parse_guards(extras, ("keep_groups", "state_ranking"))
        except ValueError as error:
            raise QualityError(f"{error} (in {name!r})") from None
        state_ranking = guards.pop("state_ranking", False)
        if guards and policy not in ORDERERS:
            raise QualityError(f"{name!r}: guards apply to {', '.join(ORDERERS)}, not to {policy}")
        try:
            Settings(**guards)
        except ValidationError as error:
            raise QualityError(f"{name!r}: {error.errors()[0]['msg']}") from None
        return cls(name, policy, guards, state_ranking, FusedReuse.parse(ways[0]) if ways else None)

    @property
    def reuses(self) -> bool:
        return self.policy != "none"

    def make(self, engine: Cache, prompts: BuiltPrompts, seed: int) -> Policy:
        """Raises QualityError for invalid guards."""
        if self.policy not in ORDERERS:
            return make_policy(self.policy, engine=engine, prompts=prompts, seed=seed)
        options = {"tokens": prompts.document_tokens, "prefix_tokens": prompts.prefix_tokens, **self.guards}
        if self.fused is not None:
            # Its requests do not say which documents are to be exact.
            options |= {"reuse": "fused", "recompute": self.fused.recompute, "copies": "all", "invest": False}
        try:
            return make_orderer(self.policy, engine=engine, **options)
        except ValidationError as error:
            raise QualityError(f"{self.name!r}: {error.errors()[0]['msg']}") from None
