"""Simulation of RAGCache's two tiers, device and host (section 5.1), metadata only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ragorder.trie.policies import History, Tier, TierNode, make_policy
from ragorder.trie.profile import PrefillProfile

__all__ = ["A10G", "QUESTION_TOKENS", "SYSTEM_TOKENS", "SimulatedPrefill", "Traffic", "TwoTiers"]

_CACHED = (0, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
_NEW = (1, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)


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

SYSTEM_TOKENS = 64
"""In front of the documents; always on the device, and not counted in its size."""

QUESTION_TOKENS = 32
"""Behind the documents, never cached (the paper's requests, section 3.2)."""


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
    """Nodes of the knowledge tree in two tiers; a node is a document behind those in front of it.

    As in the paper: a full tier evicts its leaf with the lowest priority, by its own clock; a node is copied to the
    host only when it first leaves the device ("swap out only once"); nodes of the request in service stay. Where it
    says nothing: of a request longer than the device, the first documents are kept; the host also evicts copies of
    device nodes; a node without room in the host is lost with those behind it.

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
        self._behind: list[list[int]] = []
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
                self._behind.append([])
                if parent is not None:
                    self._behind[parent].append(node)
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
        """Waiting requests will use these paths, the next one first. Their nodes stay in the host, as many as take half
        of it."""
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
        """Neither tier has the node, so those behind it are useless."""
        self._leave(node)
        below = [behind for behind in self._behind[node] if behind in self.host]
        while below:
            lost = below.pop()
            self.host.remove(lost)
            self._leave(lost)
            below += [behind for behind in self._behind[lost] if behind in self.host]

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
