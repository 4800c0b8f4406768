"""Simulation of a stream under one policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ragorder.benchmarks.ragcache.replacement.following import EventsOrderer
from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream
from ragorder.benchmarks.ragcache.replacement.tiers import (
    A10G,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    SimulatedPrefill,
    Traffic,
    TwoTiers,
)
from ragorder.orderer import Orderer
from ragorder.trie.policies import POLICIES
from ragorder.trie.profile import PrefillProfile

__all__ = ["HISTORY", "HISTORY_NODES", "REPLACEMENT_POLICIES", "Simulated", "mirroring_orderer", "simulate"]

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
    follow: str = "mirror",
    waiting: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Simulated:
    """Serve the requests under one of the `REPLACEMENT_POLICIES`, in retrieval order as RAGCache does, or `ordered` by
    ragorder, which `follow`s the tiers by its own "mirror" of them, or by their "events". The next
    `waiting` requests are known: documents are ordered for them, and what they will use stays in the host."""
    if policy == "none":
        return Simulated([_computed(stream, request, profile) for request in stream.requests])
    name, history = policy.removesuffix(HISTORY), HISTORY_NODES if policy.endswith(HISTORY) else 0
    if policy == "device":
        name, host_tokens = "lru", 0
    tiers = TwoTiers(device_tokens, host_tokens, name, history, profile)
    found = Simulated(traffic=tiers.traffic)
    place = _placing(stream, tiers, name, profile, follow if ordered else None)
    for number, request in enumerate(stream.requests):
        upcoming = stream.requests[number + 1 : number + 1 + waiting]
        tiers.expect(tiers.held(each, in_order=not ordered) for each in upcoming)
        found.served.append(place(request, upcoming))
        advance()
    return found


_Place = Callable[[tuple[int, ...], Sequence[tuple[int, ...]]], SimulatedPrefill]


def _placing(
    stream: DocumentStream, tiers: TwoTiers, policy: str, profile: PrefillProfile, follow: str | None
) -> _Place:
    tokens = stream.tokens
    if follow is None:
        return lambda request, _: tiers.serve(request, tokens)
    events = EventsOrderer(stream) if follow == "events" else None
    orderer = mirroring_orderer(stream, tiers, policy, profile) if events is None else events.orderer

    def place(request: tuple[int, ...], upcoming: Sequence[tuple[int, ...]]) -> SimulatedPrefill:
        ordering = orderer.order(request, waiting=upcoming)
        served = tiers.serve(ordering.documents, tokens, ordering.expected_uses)
        if events is not None:
            events.publish(tiers, tiers.path(ordering.documents, tokens), ordering.documents)
        ordering.confirm(served.cached_tokens)
        return served

    return place


def _computed(stream: DocumentStream, request: tuple[int, ...], profile: PrefillProfile) -> SimulatedPrefill:
    new = SYSTEM_TOKENS + sum(stream.tokens[document] for document in request) + QUESTION_TOKENS
    return SimulatedPrefill(0, 0, 0, new, profile(0, new))


def mirroring_orderer(stream: DocumentStream, tiers: TwoTiers, policy: str, profile: PrefillProfile) -> Orderer:
    """With a mirror of these tiers."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        # Loads cost nothing here, and an orderer without their times would degrade.
        replace(profile, loads={"host": 0.0, **profile.loads}).to_file(path)
        return Orderer(
            key=lambda document: document,
            tokens=stream.tokens.__getitem__,
            capacity_tokens=SYSTEM_TOKENS + tiers.device_tokens,
            host_tokens=tiers.host_tokens,
            tier_policy=policy,
            tier_copies="evicted",
            profile=path,
            block_size=1,
            prefix_tokens=SYSTEM_TOKENS,
            suffix_tokens=0,
            strict=True,
        )
