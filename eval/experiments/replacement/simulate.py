"""A stream served under one policy, and what the cache saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ragorder.eval.experiments.replacement.costs import A10G
from ragorder.eval.experiments.replacement.streams import DocumentStream
from ragorder.eval.experiments.replacement.tiers import QUESTION_TOKENS, SYSTEM_TOKENS, TierHits, Traffic, TwoTiers
from ragorder.kernels.policies import POLICIES
from ragorder.kernels.profile import PrefillProfile
from ragorder.orderer import Orderer

__all__ = ["HISTORY", "HISTORY_NODES", "REPLACEMENT_POLICIES", "Simulated", "simulate"]

HISTORY = "+history"
REPLACEMENT_POLICIES = ("none", "device", *(f"{name}{kept}" for kept in (HISTORY, "") for name in POLICIES))
"""What may be simulated: without a cache; with the device alone, least recently used first, as plain prefix caching
does it; each replacement policy in both tiers, with and without frequency history."""

HISTORY_NODES = 65_536
"""How many nodes a history remembers: as `ragorder.adapters.vllm_tiers` does by default."""


@dataclass(slots=True)
class Simulated:
    """What happened to each request, and what was copied in all."""

    served: list[TierHits] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


def simulate(
    stream: DocumentStream,
    policy: str,
    device_tokens: int,
    host_tokens: int,
    *,
    profile: PrefillProfile = A10G,
    ordered: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Simulated:
    """Serve all requests of a stream under one of the `REPLACEMENT_POLICIES`, one after another.

    The documents stand in the prompt in the order in which they were retrieved: RAGCache does not reorder them. With
    `ordered` ragorder places them, for a cache of both tiers together.
    """
    if policy == "none":
        return Simulated([_computed(stream, request, profile) for request in stream.requests])
    name, history = policy.removesuffix(HISTORY), HISTORY_NODES if policy.endswith(HISTORY) else 0
    if policy == "device":
        name, host_tokens = "lru", 0
    tiers = TwoTiers(device_tokens, host_tokens, name, history, profile)
    tokens = stream.tokens
    found = Simulated(traffic=tiers.traffic)
    orderer = _orderer(stream, device_tokens + host_tokens) if ordered else None
    for request in stream.requests:
        if orderer is None:
            found.served.append(tiers.serve(request, tokens))
        else:
            ordering = orderer.order(request)
            found.served.append(tiers.serve(ordering.documents, tokens))
            ordering.confirm(found.served[-1].cached_tokens)
        advance()
    return found


def _computed(stream: DocumentStream, request: tuple[int, ...], profile: PrefillProfile) -> TierHits:
    """All of it, the system prompt as well."""
    new = SYSTEM_TOKENS + sum(stream.tokens[document] for document in request) + QUESTION_TOKENS
    return TierHits(0, 0, 0, new, profile(0, new))


def _orderer(stream: DocumentStream, capacity_tokens: int) -> Orderer:
    """Tiers keep documents, of any length, and nothing of the question: so its blocks are tokens."""
    return Orderer(
        key=lambda document: document,
        tokens=stream.tokens.__getitem__,
        capacity_tokens=capacity_tokens,
        block_size=1,
        prefix_tokens=SYSTEM_TOKENS,
        suffix_tokens=0,
        strict=True,
    )
