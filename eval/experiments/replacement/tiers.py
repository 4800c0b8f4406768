"""Simulation of RAGCache's two tiers, device and host (section 5.1), metadata only."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ragorder.kernels.policies import History, Tier, TierNode, make_policy
from ragorder.kernels.profile import PrefillProfile

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
    """The first `hits` documents were cached, `host_hits` of these only in the host."""

    hits: int
    host_hits: int
    cached_tokens: int
    new_tokens: int
    seconds: float


@dataclass(slots=True)
class Traffic:
    """Tokens copied to the host (`swapped_out`) and back, and tokens lost to both tiers."""

    swapped_out: int = 0
    swapped_in: int = 0
    lost: int = 0


class TwoTiers:
    """Nodes of the knowledge tree in two tiers; a node is a document behind those in front of it.

    As in the paper: a full tier evicts its leaf with the lowest priority, by its own clock; a node is copied to the
    host only when it first leaves the device ("swap out only once"); nodes of the request in service stay.

    Where the paper says nothing: of a request longer than the device, the first documents are kept; the host also
    evicts copies of device nodes; a node without room in the host is lost with those behind it.

    With `history_nodes` 0, frequency and cost are forgotten once both tiers have evicted a node.
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

    def serve(self, documents: Sequence[int], tokens: Sequence[int]) -> SimulatedPrefill:
        path = self.path(documents, tokens)
        hits = host_hits = 0
        for node in path:
            if node not in self.device:
                if node not in self.host:
                    break
                host_hits += 1
            hits += 1
        cached = SYSTEM_TOKENS + sum(self._sizes[node] for node in path[:hits])
        new = QUESTION_TOKENS + sum(self._sizes[node] for node in path[hits:])
        self._make_resident(path)
        cost = self._profile.cost(cached, new)
        computed = set(path[hits:])
        for tier in (self.device, self.host):
            tier.use(path, cost=cost, computed=computed)
        return SimulatedPrefill(hits, host_hits, cached, new, self._profile(cached, new))

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
        victims = _evict(self.host, needed, protected) if size <= self.host_tokens else None
        if victims is None:
            self._lose(node)
            return
        self.traffic.lost += sum(self._sizes[victim] for victim in victims if victim not in self.device)
        self.host.insert(node, size, self._parents[node], known=known)
        self.traffic.swapped_out += size

    def _lose(self, node: int) -> None:
        """Neither tier has the node, so those behind it are useless."""
        self.traffic.lost += self._sizes[node]
        below = [behind for behind in self._behind[node] if behind in self.host]
        while below:
            lost = below.pop()
            self.host.remove(lost)
            self.traffic.lost += self._sizes[lost]
            below += [behind for behind in self._behind[lost] if behind in self.host]


def _evict(tier: Tier, tokens: int, protected: AbstractSet[int]) -> list[int] | None:
    victims: list[Any] | None = tier.evict(tokens, protected)
    return victims
