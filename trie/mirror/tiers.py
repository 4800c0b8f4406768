"""Mirror of an engine's tiers with their replacement policy."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from ragorder.trie.policies import AwaitedNodes, Tier
from ragorder.trie.profile import LINEAR, PrefillProfile
from ragorder.trie.residency import TierLevel


class Arrival(NamedTuple):
    key: Hashable
    tokens: int
    parent: Hashable


class MirroredTier:
    """Metadata of one tier; `tier` counts in tokens."""

    def __init__(self, place: TierLevel, capacity_tokens: int, tier: Tier) -> None:
        self.place = place
        self.capacity_tokens = capacity_tokens
        self.tier = tier
        self._held: dict[Hashable, Arrival] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def admit(
        self, arrivals: Sequence[Arrival], protected: Container[Hashable], awaited: Container[Hashable] = ()
    ) -> list[Arrival]:
        """Insert what fits and return the evicted nodes, children first; `awaited` ones only if nothing else helps."""
        tier, held, room = self.tier, self._held, self.capacity_tokens
        admitted = []
        for arrival in arrivals:
            room -= arrival.tokens
            if room < 0:
                break
            if arrival.key not in held:
                admitted.append(arrival)
        missing = tier.used + sum(each.tokens for each in admitted) - self.capacity_tokens
        keys = tier.evict(missing, protected, awaited)
        if keys is None:
            keys = tier.evict(missing, protected)
        if keys is None:
            return []
        for arrival in admitted:
            tier.insert(arrival.key, arrival.tokens, arrival.parent)
            held[arrival.key] = arrival
        return [held.pop(key) for key in keys]

    def next_victims(self, tokens: int) -> list[Hashable]:
        victims: list[Hashable] = []
        for key in self.tier.victims() if tokens > 0 else ():
            victims.append(key)
            tokens -= self._held[key].tokens
            if tokens <= 0:
                break
        return victims

    def victims_up_to(self, priority: float) -> list[Hashable]:
        victims: list[Hashable] = []
        for key in self.tier.victims():
            node = self.tier.get(key)
            if node is None or node.priority > priority:
                break
            victims.append(key)
        return victims

    def remove(self, key: Hashable) -> int:
        self.tier.remove(key)
        return self._held.pop(key).tokens

    def clear(self) -> None:
        self.tier.clear()
        self._held.clear()


class TierPriority(NamedTuple):
    tier: MirroredTier
    priority: float


class TierMirror:
    """Serve an orderer's requests on `tiers`, the device first, as its engine does.

    With `write_through` each tier takes all computed nodes, as in vLLM with ragorder's tiers; otherwise those evicted
    above (RAGCache 5.1). Host memory evicts nodes of requests in flight last.
    """

    def __init__(self, tiers: Sequence[MirroredTier], *, write_through: bool, profile: PrefillProfile = LINEAR) -> None:
        self.tiers = tiers
        self._write_through = write_through
        self._profile = profile
        self._numbers = count()
        # Seconds per new token of the last request.
        self._cost = 0.0
        self._reset_requests()

    def __contains__(self, key: Hashable) -> bool:
        return any(key in tier for tier in self.tiers)

    def place(self, key: Hashable) -> TierLevel:
        """Return the fastest tier that has the node, or the slowest tier if none has."""
        for tier in self.tiers:
            if key in tier:
                return tier.place
        return self.tiers[-1].place

    def priorities(self, key: Hashable) -> tuple[TierPriority, ...]:
        found = ((tier, tier.tier.get(key)) for tier in self.tiers)
        return tuple(TierPriority(tier, node.priority) for tier, node in found if node is not None)

    def serve(
        self,
        request: Hashable,
        path: Sequence[Arrival],
        *,
        cached_tokens: int,
        new_tokens: int,
        suffix_tokens: int,
        computed: Container[Hashable],
        expected: Mapping[Hashable, float],
    ) -> list[Hashable]:
        """Bring a request's path to the device, and a private suffix. Return nodes that no tier has any more."""
        cost = self._cost = self._profile.cost(cached_tokens, new_tokens)
        keys = [arrival.key for arrival in path]
        arrivals = [*path, Arrival(self._number(), suffix_tokens, keys[-1])] if suffix_tokens else [*path]
        protected = frozenset(arrival.key for arrival in arrivals)
        gone: dict[Hashable, None] = {}
        for tier in self.tiers:
            awaited = self._awaited if tier.place is TierLevel.HOST else ()
            if self._write_through or tier is self.tiers[0]:
                evicted = tier.admit(arrivals, protected, awaited)
            else:
                # One by one, as the tier above evicts them.
                evicted = [other for each in arrivals for other in tier.admit((each,), protected, awaited)]
            tier.tier.use(keys, cost=cost, computed=computed, expected=expected)
            gone.update(dict.fromkeys(each.key for each in evicted))
            if not self._write_through:
                arrivals = [each for each in evicted if each.key not in self]
        self.settle(request)
        self._requests[request] = self._awaited.add((each.key, each.tokens) for each in path)
        return self._lost(gone)

    def settle(self, request: Hashable) -> None:
        self._awaited.remove(self._requests.pop(request, ()))

    def remove(self, key: Hashable) -> None:
        for tier in self.tiers:
            if key in tier:
                tier.remove(key)

    def evict_before(
        self,
        priorities: Iterable[TierPriority],
        kept: Container[Hashable] = (),
        only: Container[Hashable] | None = None,
    ) -> list[Hashable]:
        """Evict nodes up to `priorities` (of `only`) except `kept`, charge other clients, and return lost nodes."""
        gone: dict[Hashable, None] = {}
        for tier, priority in priorities:
            victims = [key for key in tier.victims_up_to(priority) if key not in kept and (only is None or key in only)]
            self._charge_others(tier, victims)
            gone.update(dict.fromkeys(victims))
        return self._lost(gone)

    def evict_tokens(self, tokens: int) -> list[Hashable]:
        """Evict this many tokens, slowest tier first, charge other clients, and return lost nodes."""
        gone: dict[Hashable, None] = {}
        for tier in reversed(self.tiers):
            victims = tier.next_victims(tokens)
            tokens -= self._charge_others(tier, victims)
            gone.update(dict.fromkeys(victims))
        return self._lost(gone)

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()
        self._reset_requests()

    def _number(self) -> Hashable:
        return (next(self._numbers),)

    def _lost(self, gone: Iterable[Hashable]) -> list[Hashable]:
        return [key for key in gone if key not in self]

    def _charge_others(self, tier: MirroredTier, keys: Sequence[Hashable]) -> int:
        """Replace nodes by other clients' nodes of the same size, and return their tokens."""
        # As recent as the nodes that the last request computed.
        others = [Arrival(self._number(), tier.remove(key), None) for key in keys]
        tier.admit(others, ())
        numbers = [each.key for each in others]
        tier.tier.use(numbers, cost=self._cost, computed=numbers)
        return sum(each.tokens for each in others)

    def _reset_requests(self) -> None:
        host = next((tier for tier in self.tiers if tier.place is TierLevel.HOST), None)
        # As in the engines: requests in flight protect up to half of the host memory.
        self._awaited = AwaitedNodes(0 if host is None else host.capacity_tokens // 2)
        self._requests: dict[Hashable, tuple[Hashable, ...]] = {}
