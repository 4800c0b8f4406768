"""Eviction from the host tier: a `CachePolicy` of vLLM."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from ragorder.adapters.vllm_tiers.awaited_profile import PrefillCosts
from ragorder.adapters.vllm_tiers.metrics import TierCounts
from ragorder.adapters.vllm_tiers.request_state import RequestPath, facts_of, path_of
from ragorder.trie.policies import AwaitedNodes, History, Tier, make_policy
from ragorder.trie.profile import LINEAR

__all__ = ["HostPolicy"]


class _Either:
    def __init__(self, *keys: Container[OffloadKey]) -> None:
        self._keys = keys

    def __contains__(self, key: object) -> bool:
        return any(key in each for each in self._keys)


class HostPolicy(CachePolicy):  # type: ignore[misc]
    """Policy for chunks in host memory; the leaf with the lowest priority is evicted first.

    A request counts once for each chunk of its prompt; with facts only for its documents. A chunk's cost is that of the
    request that computed it: T(cached, new) / new, or the cost in its facts.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.counts = TierCounts("host")
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._since: OrderedDict[OffloadKey, float] = OrderedDict()
        self._arriving: set[OffloadKey] = set()
        self._path: RequestPath | None = None
        self._awaited = AwaitedNodes(cache_capacity // 2)
        self.configure()

    def configure(
        self,
        policy: str = "pgdsf",
        history: int = 65536,
        profile: PrefillCosts = LINEAR,
        max_cached_documents: int | None = None,
    ) -> None:
        """Set the options before the first chunk: vLLM gives only a capacity. `history`: 0 for none."""
        if self._chunks:
            raise ValueError("the host tier already holds chunks: configure it before its first use")
        self.name = policy
        self.profile = profile
        self._max_cached_documents = max_cached_documents
        self._tier = Tier(make_policy(policy), History(history) if history else None)

    def serve(self, request: ReqContext) -> RequestPath:
        """Use this request's path for the next calls."""
        self._path = path_of(request)
        return self._path

    def expect(self, request: ReqContext) -> Sequence[OffloadKey]:
        """Reserve the chunks of a waiting request, up to half of the tier: other chunks are evicted first. Returns its
        reserved chunks."""
        self.settle(request)
        path = path_of(request)
        path.awaited = self._awaited.add((key, 1) for key in path.keys)
        return path.keys[: len(path.awaited)]

    def settle(self, request: ReqContext) -> None:
        """Release the chunks of a request that no longer waits."""
        path = path_of(request)
        self._awaited.remove(path.awaited)
        path.awaited = ()

    def count(self, request: ReqContext) -> None:
        path = path_of(request)
        if path.counted:
            return
        path.counted = True
        self.settle(request)
        facts = facts_of(request).facts
        documents = 0 if facts is None else len(facts.documents)
        facts = None if facts is None else facts.of_first(self._max_cached_documents)
        tokens = path.ends[-1] if path.ends else 0
        cached = path.ends[path.cached - 1] if path.cached else 0
        computed = set(path.keys[path.cached :])
        # If it computed nothing: the cost of the whole prompt, for chunks without a known cost.
        cost = self.profile.cost(cached, tokens - cached) if computed else self.profile.cost(0, tokens)
        if facts is not None and facts.cost is not None:
            cost = facts.cost
        path.cost = cost
        if facts is not None and facts.documents:
            path.last = path.before(facts.documents[-1])
            if len(facts.documents) < documents:
                path.admitted = path.last
            path.expected = facts.forecast(path.keys, path.ends)
        self._tier.use(path.keys[: path.last], cost=cost, computed=computed, expected=path.expected)

    @override
    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    @override
    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        # From 0.33 on vLLM passes the request; `serve` has it already.
        path = self._path if self._path is not None and key in self._path else None
        self._tier.insert(key, 1, path.parent_of(key) if path is not None else None)
        self._chunks[key] = chunk
        self._since[key] = time.monotonic()
        if chunk.ref_cnt != 0:
            self._tier.pin(key)
        if not chunk.is_ready:
            self._arriving.add(key)
        node = self._tier.get(key)
        if path is not None and path.counts(key) and node is not None and not node.frequency:
            # The request was counted before this chunk arrived, and no history has recorded that.
            self._tier.use((key,), cost=path.cost, computed=(key,), expected=path.expected)

    @override
    def remove(self, key: OffloadKey) -> None:
        self._tier.remove(key)
        self._forget(key)

    @override
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.count(req_context)

    @override
    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.serve(req_context)

    @override
    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.count(req_context)

    @override
    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        if n == 0:
            return []
        own = () if self._path is None else self._path
        going = self._tier.evict(n, _Either(protected, self._awaited), own) or self._tier.evict(n, protected, own)
        if going is None:
            return None
        self.counts.evicted += len(going)
        return [(key, self._forget(key)) for key in going]

    @override
    def clear(self) -> None:
        self._tier.clear()
        self._chunks.clear()
        self._since.clear()
        self._arriving.clear()

    @override
    def mark_evictable(self, key: OffloadKey) -> None:
        self._tier.unpin(key)
        if key in self._arriving:
            self._arriving.discard(key)
            self.counts.stored += 1

    @override
    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._tier.pin(key)

    def current_counts(self, chunk_bytes: int) -> TierCounts:
        counts = self.counts
        counts.chunks = len(self._chunks) - len(self._arriving)
        counts.bytes = counts.chunks * chunk_bytes
        counts.capacity_bytes = self.cache_capacity * chunk_bytes
        counts.oldest_seconds = time.monotonic() - next(iter(self._since.values())) if self._since else 0.0
        return counts

    def _forget(self, key: OffloadKey) -> ChunkStatus:
        self._arriving.discard(key)
        del self._since[key]
        return self._chunks.pop(key)
