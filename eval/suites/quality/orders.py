"""Orders of documents: a policy with its guards, and what is taken from KV that was computed apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from ragorder import Lengths
from ragorder.document import Document
from ragorder.errors import RagorderError
from ragorder.eval.engines.base import Cache, RequestError
from ragorder.eval.engines.prompts import BuiltPrompts, PromptIds
from ragorder.eval.running.policies import ORDERERS, POLICIES, Policy, make_orderer, make_policy, parse_guards
from ragorder.eval.suites.quality.compare import PLACE
from ragorder.ordering import Ordering
from ragorder.settings import Settings

if TYPE_CHECKING:
    from ragorder.eval.engines.torch import TorchEngine
    from ragorder.kernels.engine import Completion, Request

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

FUSED = "fused"
_FUSED = f"+{FUSED}="
_LEAST_GAP = 1.0


class QualityError(RagorderError, ValueError):
    """Quality cannot be measured. The message says what to change."""


@dataclass(frozen=True, slots=True)
class GradedQuestion:
    """`answers` are all accepted ones, `documents` in retrieval order, `gold` the ids of supporting documents."""

    id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    gold: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FusedReuse:
    """The share of reused tokens that is recomputed, and which ones (`--select` of the engine)."""

    recompute: float
    select: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "0.05:query"; "0" takes everything as it is. Raises QualityError."""
        from ragorder.kernels.fusion.selection import selections

        share, _, select = text.partition(":")
        try:
            found = cls(float(share), select or "query")
            selections.check(found.select)
        except ValueError as error:
            raise QualityError(f"{FUSED}={text}: {error}") from None
        if not 0 <= found.recompute <= 1:
            raise QualityError(f"{FUSED}={text}: give a share of the tokens, from 0 to 1")
        if found.recompute and not select:
            raise QualityError(f"{FUSED}={text}: say which tokens are recomputed, such as {FUSED}={text}:query")
        return found


def fused_orders(orders: Sequence[str], shares: Sequence[float], selections: Sequence[str]) -> tuple[str, ...]:
    """Names of each order with each of these shares and selections; the share 0 has no selection."""

    def names(order: str) -> Iterator[str]:
        for share in dict.fromkeys(shares):
            yield from (f"{order}{_FUSED}{share:g}:{each}" for each in selections if share)
            if not share:
                yield f"{order}{_FUSED}0"

    return tuple(name for order in orders for name in names(order))


def normalised_scores(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Of fused orders in percent (FusionRAG's equation 11): 0 is full reuse, 100 the same order without fusion. Scores
    by order, in points; none where full reuse loses hardly anything."""
    found = {}
    for name, score in scores.items():
        exact, fused, _ = name.partition(_FUSED)
        full, reuse = scores.get(exact), scores.get(f"{exact}{_FUSED}0")
        if fused and score is not None and full is not None and reuse is not None and full - reuse >= _LEAST_GAP:
            found[name] = 100 * (score - reuse) / (full - reuse)
    return found


def answer_fused(engine: TorchEngine, token_ids: PromptIds, fused: FusedReuse) -> Completion:
    """Compute each document alone after the system prompt, as `ragorder fuse build --neighbours 0`, then reuse what
    is no exact prefix. Raises RequestError."""
    from ragorder.kernels.engine import Fusion

    request = engine.request(token_ids)
    if len(token_ids.document_ends) > 1:
        for alone in documents_alone(token_ids):
            _serve(engine, marked(engine.request(alone, output_tokens=1)))
        request = replace(marked(request), fusion=Fusion(fused.recompute, fused.select))
    done = _serve(engine, request)
    engine.served.append(done)
    return done


def documents_alone(token_ids: PromptIds) -> list[PromptIds]:
    """A prompt for each document, with it alone after the system prompt."""
    system, *ends = token_ids.document_ends
    last = token_ids[ends[-1] :]
    return [
        PromptIds([*token_ids[:system], *token_ids[begin:end], *last], [system, system + end - begin])
        for begin, end in pairwise(token_ids.document_ends)
    ]


def marked(request: Request) -> Request:
    """With the end of the system prompt apart from those of the documents."""
    system, *ends = request.document_ends
    return replace(request, document_ends=ends, prefix_tokens=system)


def _serve(engine: TorchEngine, request: Request) -> Completion:
    [done] = engine.engine.generate([request])
    if done.finish_reason in ("error", "timeout"):
        raise RequestError(done.error or done.finish_reason)
    return done


def place_orders(documents: int) -> tuple[str, ...]:
    """Return the orders with the best document at each place, or at five of them, from the first to the last."""
    several = min(documents, _MOST_PLACES)
    places = [1 + round(step * (documents - 1) / max(1, several - 1)) for step in range(several)]
    return tuple(f"{PLACE}{place}" for place in places)


@dataclass(frozen=True, slots=True)
class Order:
    """With `state_ranking` the prompt states retrieval's ranking. Policy "none" has no prefix cache. `fused`: documents
    off the cached prefix are reused. `place`: of the best gold document, from 1; the others stand as ranked."""

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
