"""Mirror of an engine's tiers, by their replacement policy."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from ragorder.trie.policies import AwaitedNodes, Tier
from ragorder.trie.profile import LINEAR, PrefillProfile
from ragorder.trie.residency import Place

__all__ = ["Arrival", "MirroredTier", "Rank", "TierMirror"]


class Arrival(NamedTuple):
    key: Hashable
    tokens: int
    parent: Hashable


class MirroredTier:
    """One of an engine's tiers, metadata only; `tier` counts in tokens."""

    def __init__(self, place: Place, capacity_tokens: int, tier: Tier) -> None:
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
        """Insert as many as fit, and return what is evicted for them, children first; awaited nodes only if there is no
        other room."""
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

    def next_to_go(self, tokens: int) -> list[Hashable]:
        """The first evictions that free so many tokens."""
        going: list[Hashable] = []
        for key in self.tier.victims() if tokens > 0 else ():
            going.append(key)
            tokens -= self._held[key].tokens
            if tokens <= 0:
                break
        return going

    def going_before(self, priority: float) -> list[Hashable]:
        """The first evictions, up to this priority."""
        going: list[Hashable] = []
        for key in self.tier.victims():
            node = self.tier.get(key)
            if node is None or node.priority > priority:
                break
            going.append(key)
        return going

    def remove(self, key: Hashable) -> int:
        """Returns its tokens."""
        self.tier.remove(key)
        return self._held.pop(key).tokens

    def clear(self) -> None:
        self.tier.clear()
        self._held.clear()


class Rank(NamedTuple):
    """The priority that a node has in a tier."""

    tier: MirroredTier
    priority: float


class TierMirror:
    """Serves an orderer's requests on `tiers`, the device first, as its engine does.

    `write_through`: each tier takes all that is computed, as in vLLM with ragorder's tiers; otherwise what the tier
    above it evicts, as in the paper (RAGCache 5.1) and the embedded engine. What requests in flight use leaves host
    memory last, as in both.
    """

    def __init__(self, tiers: Sequence[MirroredTier], *, write_through: bool, profile: PrefillProfile = LINEAR) -> None:
        self.tiers = tiers
        self._write_through = write_through
        self._profile = profile
        self._numbers = count()
        # Of the last request: seconds per new token.
        self._cost = 0.0
        self._forget_requests()

    def __contains__(self, key: Hashable) -> bool:
        return any(key in tier for tier in self.tiers)

    def place(self, key: Hashable) -> Place:
        """Of a node that no tier has: the slowest one's."""
        for tier in self.tiers:
            if key in tier:
                return tier.place
        return self.tiers[-1].place

    def ranks(self, key: Hashable) -> tuple[Rank, ...]:
        """In each tier that holds the node."""
        found = ((tier, tier.tier.get(key)) for tier in self.tiers)
        return tuple(Rank(tier, node.priority) for tier, node in found if node is not None)

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
        """A request, `settle`d later, brings its path to the device, and a suffix that nothing else will use. Returns
        the nodes that no tier has any more. `expected`: forecast uses of nodes."""
        cost = self._cost = self._profile.cost(cached_tokens, new_tokens)
        keys = [arrival.key for arrival in path]
        arrivals = [*path, Arrival(self._number(), suffix_tokens, keys[-1])] if suffix_tokens else [*path]
        protected = frozenset(arrival.key for arrival in arrivals)
        gone: dict[Hashable, None] = {}
        for tier in self.tiers:
            awaited = self._awaited if tier.place is Place.HOST else ()
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
        """The request is in flight no longer."""
        self._awaited.remove(self._requests.pop(request, ()))

    def remove(self, key: Hashable) -> None:
        """From all tiers."""
        for tier in self.tiers:
            if key in tier:
                tier.remove(key)

    def displace(
        self, ranks: Iterable[Rank], kept: Container[Hashable] = (), only: Container[Hashable] | None = None
    ) -> list[Hashable]:
        """Others have displaced what goes before nodes of these ranks, but for what is `kept` (of `only` these keys),
        and have its room. Returns the nodes that no tier has any more."""
        gone: dict[Hashable, None] = {}
        for tier, priority in ranks:
            going = [key for key in tier.going_before(priority) if key not in kept and (only is None or key in only)]
            self._give_away(tier, going)
            gone.update(dict.fromkeys(going))
        return self._lost(gone)

    def give_up(self, tokens: int) -> list[Hashable]:
        """Others have the room of so many tokens, of the slowest tier first. Returns the nodes that no tier has any
        more."""
        gone: dict[Hashable, None] = {}
        for tier in reversed(self.tiers):
            going = tier.next_to_go(tokens)
            tokens -= self._give_away(tier, going)
            gone.update(dict.fromkeys(going))
        return self._lost(gone)

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()
        self._forget_requests()

    def _number(self) -> Hashable:
        """The key of what no later request finds."""
        return (next(self._numbers),)

    def _lost(self, gone: Iterable[Hashable]) -> list[Hashable]:
        return [key for key in gone if key not in self]

    def _give_away(self, tier: MirroredTier, keys: Sequence[Hashable]) -> int:
        """Returns their tokens."""
        # As young as what the last request computed.
        others = [Arrival(self._number(), tier.remove(key), None) for key in keys]
        tier.admit(others, ())
        numbers = [each.key for each in others]
        tier.tier.use(numbers, cost=self._cost, computed=numbers)
        return sum(each.tokens for each in others)

    def _forget_requests(self) -> None:
        host = next((tier for tier in self.tiers if tier.place is Place.HOST), None)
        # As in the engines: half of the host memory for what requests in flight use.
        self._awaited = AwaitedNodes(0 if host is None else host.capacity_tokens // 2)
        self._requests: dict[Hashable, tuple[Hashable, ...]] = {}
