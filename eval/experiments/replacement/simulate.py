"""Simulation of a stream under one policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ragorder.eval.experiments.replacement.streams import DocumentStream
from ragorder.eval.experiments.replacement.tiers import (
    A10G,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    SimulatedPrefill,
    Traffic,
    TwoTiers,
)
from ragorder.kernels.policies import POLICIES
from ragorder.kernels.profile import PrefillProfile
from ragorder.orderer import Orderer

__all__ = ["HISTORY", "HISTORY_NODES", "REPLACEMENT_POLICIES", "Simulated", "simulate"]

HISTORY = "+history"
REPLACEMENT_POLICIES = ("none", "device", *(f"{name}{kept}" for kept in (HISTORY, "") for name in POLICIES))
"""No cache; the device alone with LRU (plain prefix caching); each policy in both tiers, with and without history."""

HISTORY_NODES = 65_536
"""Nodes that a history remembers, as in `ragorder.adapters.vllm_tiers`."""


@dataclass(slots=True)
class Simulated:
    served: list[SimulatedPrefill] = field(default_factory=list)
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
    """Serve the requests under one of the `REPLACEMENT_POLICIES`, in retrieval order as RAGCache does, or `ordered` by
    ragorder."""
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


def _computed(stream: DocumentStream, request: tuple[int, ...], profile: PrefillProfile) -> SimulatedPrefill:
    new = SYSTEM_TOKENS + sum(stream.tokens[document] for document in request) + QUESTION_TOKENS
    return SimulatedPrefill(0, 0, 0, new, profile(0, new))


def _orderer(stream: DocumentStream, capacity_tokens: int) -> Orderer:
    return Orderer(
        key=lambda document: document,
        tokens=stream.tokens.__getitem__,
        capacity_tokens=capacity_tokens,
        block_size=1,
        prefix_tokens=SYSTEM_TOKENS,
        suffix_tokens=0,
        strict=True,
    )
