"""RAGCache's two tiers, device and host (section 5.1), simulated on a stream: metadata only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream
from ragorder.orderer import Orderer
from ragorder.trie.policies import POLICIES, History, Tier, TierNode, make_policy
from ragorder.trie.profile import PrefillProfile
from ragorder.trie.residency.blocks import EngineBlocks

_CACHED = (0, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
_NEW = (1, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
SYSTEM_TOKENS = 64
"""Before the documents; always on the device, and not counted in its size."""
QUESTION_TOKENS = 32
"""After the documents, never cached (the paper's requests, section 3.2)."""
_BLOCK_SIZE = 16
_MAX_BLOCKS = 1 << 20
HISTORY = "+history"
REPLACEMENT_POLICIES = ("none", "device", *(f"{name}{kept}" for kept in (HISTORY, "") for name in POLICIES))
"""No cache; the device alone with LRU (plain prefix caching); each policy in both tiers, with and without history."""
HISTORY_NODES = 65_536
"""Nodes that a history remembers, as in `ragorder.adapters.vllm_tiers`."""


def _seconds(cached: int, new: int) -> float:
    return 0.025 + 2.2e-4 * new + 3.2e-8 * new * (cached + new / 2)


A10G = PrefillProfile(
    cached_tokens=_CACHED,
    new_tokens=_NEW,
    seconds=tuple(tuple(_seconds(cached, new) for new in _NEW) for cached in _CACHED),
    facts={"engine": "estimated, not measured", "model": "Mistral-7B", "device": "NVIDIA A10G"},
)
"""Mistral-7B on an NVIDIA A10G, estimated from operations and not measured: 14.5 GFLOP a token at half of the peak in
the layers, 0.52 MFLOP a pair of tokens in the attention. A prompt of 4,000 tokens takes 1.2 s; the paper (section 3.1)
says one second for more than 4,000."""


@dataclass(frozen=True, slots=True)
class SimulatedPrefill:
    """The first `hits` documents were cached, `host_hits` of these, with `host_tokens`, only in the host."""

    hits: int
    host_hits: int
    cached_tokens: int
    new_tokens: int
    seconds: float
    host_tokens: int = 0


@dataclass(slots=True)
class Traffic:
    """Tokens copied to the host (`swapped_out`) and back, and tokens lost to both tiers."""

    swapped_out: int = 0
    swapped_in: int = 0
    lost: int = 0


class TwoTiers:
    """Nodes of the knowledge tree in two tiers; a node is a document after those before it.

    As in the paper: a full tier evicts its leaf with the lowest priority, by its own clock; a node is copied to the
    host only when it first leaves the device ("swap out only once"); nodes of the request in service stay. Where it
    says nothing: of a request longer than the device, the first documents are kept; the host also evicts copies of
    device nodes; a node without room in the host is lost with those after it.

    With `history_nodes` 0, frequency and cost are forgotten once both tiers have evicted a node. `entered`: nodes that
    the last request brought; `left`: those that neither tier has any more.
    """

    def __init__(
        self,
        device_tokens: int,
        host_tokens: int,
        policy: str = "pgdsf",
        history_nodes: int = 0,
        profile: PrefillProfile = A10G,
    ) -> None:
        self.device_tokens = device_tokens
        self.host_tokens = host_tokens
        self.device, self.host = (
            Tier(make_policy(policy), History(history_nodes) if history_nodes else None) for _ in range(2)
        )
        self.traffic = Traffic()
        self._profile = profile
        self._nodes: dict[tuple[int | None, int], int] = {}
        self._parents: list[int | None] = []
        self._sizes: list[int] = []
        self._children: list[list[int]] = []
        # Statistics of the nodes on the device, and of one that is just leaving it.
        self._on_device: dict[int, TierNode] = {}
        self._expected: frozenset[int] = frozenset()
        self.entered: list[int] = []
        self.left: list[int] = []

    def __contains__(self, node: int) -> bool:
        return node in self.device or node in self.host

    def parent(self, node: int) -> int | None:
        return self._parents[node]

    def path(self, documents: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The nodes of these documents, root first; `tokens` are lengths by document."""
        path: list[int] = []
        parent: int | None = None
        for document in documents:
            node = self._nodes.get((parent, document))
            if node is None:
                node = self._nodes[parent, document] = len(self._sizes)
                self._parents.append(parent)
                self._sizes.append(tokens[document])
                self._children.append([])
                if parent is not None:
                    self._children[parent].append(node)
            path.append(node)
            parent = node
        return path

    def held(self, documents: Iterable[int], *, in_order: bool) -> list[int]:
        """The longest path of these documents in the tiers, root first: in this order, or in any."""
        documents = tuple(documents)
        if in_order:
            return list(self._held_in_order(documents))
        best: tuple[int, ...] = ()
        longest = 0
        open_paths: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while open_paths:
            length, path = open_paths.pop()
            if length > longest:
                longest, best = length, path
            above = path[-1] if path else None
            for document in documents:
                node = self._nodes.get((above, document))
                if node is not None and node in self:
                    open_paths.append((length + self._sizes[node], (*path, node)))
        return list(best)

    def expect(self, paths: Iterable[Sequence[int]]) -> None:
        """Keep the nodes of waiting requests' paths, the next one first, in the host, up to half of it."""
        room = self.host_tokens // 2
        expected: set[int] = set()
        for path in paths:
            new = [node for node in path if node not in expected]
            room -= sum(self._sizes[node] for node in new)
            if room < 0:
                break
            expected.update(new)
        self._expected = frozenset(expected)

    def serve(
        self, documents: Sequence[int], tokens: Sequence[int], expected_uses: Sequence[float] = ()
    ) -> SimulatedPrefill:
        """`expected_uses`: of the path to each document, if there is a forecast."""
        self.entered, self.left = [], []
        path = self.path(documents, tokens)
        hits = host_hits = host_tokens = 0
        for node in path:
            if node not in self.device:
                if node not in self.host:
                    break
                host_hits += 1
                host_tokens += self._sizes[node]
            hits += 1
        cached = SYSTEM_TOKENS + sum(self._sizes[node] for node in path[:hits])
        new = QUESTION_TOKENS + sum(self._sizes[node] for node in path[hits:])
        self._make_resident(path)
        # The host may have evicted its copy of a node that was leaving the device, and taken it again.
        self.left = [node for node in dict.fromkeys(self.left) if node not in self]
        cost = self._profile.cost(cached, new)
        computed = set(path[hits:])
        expected = dict(zip(path, expected_uses, strict=False))
        for tier in (self.device, self.host):
            tier.use(path, cost=cost, computed=computed, expected=expected)
        seconds = self._profile.with_loads(cached, new, host_tokens, 0)
        return SimulatedPrefill(hits, host_hits, cached, new, seconds, host_tokens)

    def _make_resident(self, path: Sequence[int]) -> None:
        missing, room = [], self.device_tokens
        for node in path:
            room -= self._sizes[node]
            if room < 0:
                break
            if node not in self.device:
                missing.append(node)
        needed = sum(self._sizes[node] for node in missing) - (self.device_tokens - self.device.used)
        protected = set(path)
        if needed > 0:
            victims = _evict(self.device, needed, protected)
            assert victims is not None, "what is no part of the request can always go"
            for node in victims:
                self._swap_out(node, protected)
        for node in missing:
            if node in self.host:
                self.traffic.swapped_in += self._sizes[node]
            else:
                self.entered.append(node)
            self.device.insert(node, self._sizes[node], self._parents[node], known=self.host.get(node))
            known = self.device.get(node)
            assert known is not None
            self._on_device[node] = known

    def _swap_out(self, node: int, protected: AbstractSet[int]) -> None:
        known = self._on_device.pop(node)
        if node in self.host:
            return
        size = self._sizes[node]
        needed = size - (self.host_tokens - self.host.used)
        victims = _evict(self.host, needed, protected | self._expected) if size <= self.host_tokens else None
        if victims is None:
            self._lose(node)
            return
        for victim in victims:
            if victim not in self.device:
                self._leave(victim)
        self.host.insert(node, size, self._parents[node], known=known)
        self.traffic.swapped_out += size

    def _lose(self, node: int) -> None:
        """Neither tier has the node, so those after it are useless."""
        self._leave(node)
        below = [child for child in self._children[node] if child in self.host]
        while below:
            lost = below.pop()
            self.host.remove(lost)
            self._leave(lost)
            below += [child for child in self._children[lost] if child in self.host]

    def _leave(self, node: int) -> None:
        self.traffic.lost += self._sizes[node]
        self.left.append(node)

    def _held_in_order(self, documents: Sequence[int]) -> Iterator[int]:
        above: int | None = None
        for document in documents:
            above = self._nodes.get((above, document))
            if above is None or above not in self:
                return
            yield above


def _evict(tier: Tier, tokens: int, protected: AbstractSet[int]) -> list[int] | None:
    victims: list[Any] | None = tier.evict(tokens, protected)
    return victims


class _Blocks(NamedTuple):
    """Of a node: the hashes of those in which its last tokens lie, the one before, and the tokens after the last."""

    hashes: tuple[tuple[int, int], ...]
    last: tuple[int, int]
    rest: list[int]


class EventsOrderer:
    """An orderer without a mirror of its own: what the tiers hold it learns from events, as from a vLLM's."""

    def __init__(self, stream: DocumentStream) -> None:
        tokens = stream.tokens
        self._blocks = EngineBlocks(_BLOCK_SIZE, _MAX_BLOCKS)
        prefix = [0] * SYSTEM_TOKENS
        hashes = tuple((-1, place) for place in range(SYSTEM_TOKENS // _BLOCK_SIZE))
        self._blocks.store(hashes, None, prefix)
        self._front = _Blocks(hashes, hashes[-1], [])
        self._nodes: dict[int, _Blocks] = {}
        self._tokens = tokens
        self.orderer = Orderer(
            key=lambda document: document,
            tokens=tokens.__getitem__,
            token_ids=self._token_ids,
            prefix_ids=prefix,
            blocks=self._blocks,
            capacity_tokens=None,
            block_size=_BLOCK_SIZE,
            prefix_tokens=SYSTEM_TOKENS,
            suffix_tokens=0,
            strict=True,
        )

    def publish(self, tiers: TwoTiers, path: list[int], documents: list[int]) -> None:
        """The events of the last request, which took this path."""
        for node in tiers.left:
            self._blocks.remove(self._nodes.pop(node).hashes)
        entered = set(tiers.entered)
        for node, document in zip(path, documents, strict=True):
            if node in entered:
                parent = tiers.parent(node)
                self._store(node, self._front if parent is None else self._nodes[parent], document)

    def _store(self, node: int, parent: _Blocks, document: int) -> None:
        tokens = parent.rest + self._token_ids(document)
        count = len(tokens) // _BLOCK_SIZE
        hashes = tuple((node, place) for place in range(count))
        if hashes:
            self._blocks.store(hashes, parent.last, tokens[: count * _BLOCK_SIZE])
        self._nodes[node] = _Blocks(hashes, hashes[-1] if hashes else parent.last, tokens[count * _BLOCK_SIZE :])

    def _token_ids(self, document: int) -> list[int]:
        return [document + 1] * self._tokens[document]


def most_hits(stream: DocumentStream, tokens: int, warmup: int = 0, *, in_any_order: bool = False) -> float:
    """The most documents after the warm-up that any policy can hit with room for `tokens`, even if it knows the future;
    with `in_any_order` whatever the order of documents, as if one could be hit after any others.

    PFOO-U (Berger, Beckmann, Harchol-Balter, Practical Bounds on Optimal Caching with Variable Object Sizes, 2018):
    each hit takes its tokens times the requests since the last use of the room, cheapest first. The bound may not be
    reached.
    """
    last: dict[tuple[int, ...], int] = {}
    stays = []
    for now, request in enumerate(stream.requests):
        for end in range(1, len(request) + 1):
            path = request[end - 1 : end] if in_any_order else request[:end]
            if now >= warmup and path in last:
                stays.append(stream.tokens[path[-1]] * (now - max(last[path], warmup)))
            last[path] = now
    room = tokens * (len(stream.requests) - warmup)
    hits = 0
    for stay in sorted(stays):
        if stay > room:
            return hits + room / stay
        room -= stay
        hits += 1
    return float(hits)


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
