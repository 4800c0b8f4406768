"""vLLM `CachePolicy` of the host tier, and its requests."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from ragorder.adapters.request_facts import RequestFacts, read_facts
from ragorder.adapters.vllm_tiers.awaited_profile import PrefillCosts
from ragorder.adapters.vllm_tiers.metrics import TierCounts
from ragorder.trie.policies import AwaitedNodes, History, Key, Tier, make_policy
from ragorder.trie.profile import LINEAR

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RequestPath:
    """A prompt's chunks, root first; the first `last` count as used, the first `admitted` may be stored."""

    # vLLM's own dictionary, which grows while the request is answered.
    _positions: dict[OffloadKey, int]
    keys: list[OffloadKey] = field(init=False)
    ends: list[int] = field(init=False)
    places: dict[OffloadKey, int] = field(init=False)
    _device: int | None = None
    _loaded: int = 0
    counted: bool = False
    last: int | None = None
    admitted: int | None = None
    cost: float | None = None
    # Chunks that the host reserves while the request waits.
    awaited: tuple[Key, ...] = ()
    # Forecast uses of chunks.
    expected: dict[OffloadKey, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read()

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def parent_of(self, key: OffloadKey) -> OffloadKey | None:
        place = self._place(key)
        return self.keys[place - 1] if place else None

    def looked_up(self, key: OffloadKey) -> None:
        """Note the first chunk that is looked up: the device has all chunks before it."""
        if self._device is None:
            self._device = self._place(key)

    def loaded(self, keys: Iterable[OffloadKey]) -> None:
        places = [place for key in keys if (place := self._place(key)) is not None]
        self._loaded = max([self._loaded, *(place + 1 for place in places)])

    @property
    def cached(self) -> int:
        """Cached chunks: all if vLLM looked up none."""
        return len(self.keys) if self._device is None else max(self._device, self._loaded)

    def counts(self, key: OffloadKey) -> bool:
        place = self._place(key)
        return self.counted and place is not None and (self.last is None or place < self.last)

    def admits(self, key: OffloadKey) -> bool:
        place = self._place(key)
        return self.admitted is None or place is None or place < self.admitted

    def before(self, end: int) -> int:
        return bisect_right(self.ends, end)

    def _place(self, key: OffloadKey) -> int | None:
        place = self.places.get(key)
        if place is None and key in self._positions:
            self._read()
            place = self.places.get(key)
        return place

    def _read(self) -> None:
        in_order = sorted(self._positions.items(), key=lambda chunk: chunk[1])
        self.keys = [key for key, _ in in_order]
        self.ends = [end for _, end in in_order]
        self.places = {key: place for place, key in enumerate(self.keys)}


@dataclass(frozen=True, slots=True)
class ReadFacts:
    facts: RequestFacts | None
    readable: bool = True

    @classmethod
    def of(cls, kv_transfer_params: object) -> ReadFacts:
        try:
            return cls(read_facts(kv_transfer_params))
        except ValueError:
            return cls(None, readable=False)


def path_of(request: ReqContext) -> RequestPath:
    # vLLM's public get_offload_key_position needs a key, and a manager never gets the keys of a request's chunks that
    # were on the device. They count as used, too.
    return state_of(request, RequestPath, lambda: RequestPath(request._offload_key_positions))


def facts_of(request: ReqContext) -> ReadFacts:
    return state_of(request, ReadFacts, lambda: ReadFacts.of(request.kv_transfer_params))


def state_of(request: ReqContext, kind: type[T], make: Callable[[], T]) -> T:
    state: T | None = request.get_state(kind)
    if state is None:
        state = make()
        request.set_state(state)
    return state


class _Either:
    def __init__(self, *keys: Container[OffloadKey]) -> None:
        self._keys = keys

    def __contains__(self, key: object) -> bool:
        return any(key in each for each in self._keys)


class HostPolicy(CachePolicy):  # type: ignore[misc]
    """A request counts once for each chunk of its prompt (with facts: of its documents); a chunk costs what the request
    that computed it took per new token."""

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
        """Set the options before the first chunk. `history`: 0 for none."""
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
        """Reserve a waiting request's chunks, up to half of the tier, and return them: others are evicted first."""
        self.settle(request)
        path = path_of(request)
        path.awaited = self._awaited.add((key, 1) for key in path.keys)
        return path.keys[: len(path.awaited)]

    def settle(self, request: ReqContext) -> None:
        """Release a request's reserved chunks."""
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
