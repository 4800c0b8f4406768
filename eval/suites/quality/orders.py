"""Orders of documents: a policy with its guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ragorder import Lengths
from ragorder.document import Document
from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.prompts import BuiltPrompts
from ragorder.eval.running.policies import ORDERERS, POLICIES, Policy, make_orderer, make_policy, parse_guards
from ragorder.eval.suites.quality.base import GradedQuestion, QualityError
from ragorder.eval.suites.quality.compare import PLACE
from ragorder.eval.suites.quality.fused import FUSED, FusedReuse
from ragorder.ordering import Ordering
from ragorder.settings import Settings

__all__ = ["DEFAULT_ORDERS", "Order", "place_orders"]

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
_MOST_PLACES = 5
_POLICIES = tuple(policy for policy in POLICIES if policy not in ("events", "oracle"))


def place_orders(documents: int) -> tuple[str, ...]:
    """The best document at each of so many places, or at five of them, from the first to the last."""
    several = min(documents, _MOST_PLACES)
    places = [1 + round(step * (documents - 1) / max(1, several - 1)) for step in range(several)]
    return tuple(f"{PLACE}{place}" for place in places)


@dataclass(frozen=True, slots=True)
class Order:
    """With `state_ranking` the prompt states retrieval's ranking. Policy "none" has no prefix cache. `fused`: documents
    off the cached prefix are taken over. `place`: of the best gold document, from 1; the others stand as ranked."""

    name: str
    policy: str
    guards: Mapping[str, Any]
    state_ranking: bool
    fused: FusedReuse | None = None
    place: int | None = None

    @classmethod
    def parse(cls, name: str) -> Order:
        """From "free+keep_first=2", "retrieval+state_ranking", "retrieval+fused=0.05:query" or "place=3". Raises
        QualityError."""
        if name.startswith(PLACE):
            if not (number := name.removeprefix(PLACE)).isdecimal() or not int(number):
                raise QualityError(f"{name!r}: give the place of the best document, such as {PLACE}1")
            return cls(name, "retrieval", {}, False, place=int(number))
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

    def arrange(self, policy: Policy, question: GradedQuestion, suffix_tokens: int | None) -> Ordering[Document]:
        documents = list(question.documents)
        if self.place is None:
            return policy.order(documents, lengths=Lengths(suffix=suffix_tokens))
        best = next(rank for rank, document in enumerate(documents) if document.id in question.gold)
        ranks = [rank for rank in range(len(documents)) if rank != best]
        ranks.insert(self.place - 1, best)
        return Ordering([documents[rank] for rank in ranks], ranks)

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
