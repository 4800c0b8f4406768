"""A knowledge cache without an engine: KV that shows whose it is, copies that end when a test says so, and accounts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch

from ragorder.kernels.cache import KnowledgeCache, KVLease, TierTokens, segments_of
from ragorder.kernels.paging import BlockPool, KVShape
from support.inside import copies_of, device_of, disk_of, host_of, leases_of, running_copies, tiers_of

BLOCK = 4
SHAPE = KVShape(layers=2, kv_heads=1, head_dim=3, block_size=BLOCK, dtype=torch.float32)
PLENTY = 1 << 30
IDENTITY = "a model"


def kv_of(tokens: Sequence[int], salt: str | None = None) -> Any:
    """The KV of each token: numbers that depend on it, on all before it, on layer, and on key or value. Whose they are
    counts, too, so that nobody reads another tenant's unnoticed."""
    values, state = [], repr(salt).encode()
    for token in tokens:
        state = blake2b(state + token.to_bytes(8, "little"), digest_size=8).digest()
        values.append(int.from_bytes(state[:2], "little"))
    ids = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1, 1)
    of_layer = torch.arange(SHAPE.layers * 2, dtype=torch.float32).view(1, SHAPE.layers, 2, 1, 1)
    return (ids * SHAPE.layers * 2 + of_layer).expand(-1, -1, -1, SHAPE.kv_heads, SHAPE.head_dim)


class HeldTransfers:
    """Copies made on request of the test, or when one is waited for: blocks reused too early are detected."""

    def __init__(self) -> None:
        self.waiting: deque[HeldTransfer] = deque()
        self.blocks = 0

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> HeldTransfer:
        for other in self.waiting:
            assert not other.writes(source, source_blocks), "this is still being written"
            assert not other.writes(target, target_blocks) and not other.reads(target, target_blocks), "this is in use"
        transfer = HeldTransfer(self, source, source_blocks, target, target_blocks)
        self.waiting.append(transfer)
        self.blocks += len(source_blocks)
        return transfer

    def tick(self) -> None:
        if self.waiting:
            self.waiting.popleft().copy()

    def close(self) -> None:
        while self.waiting:
            self.tick()


class HeldTransfer:
    def __init__(
        self, all: HeldTransfers, source: BlockPool, from_blocks: Sequence[int], target: BlockPool, to: Sequence[int]
    ) -> None:
        self.done = self.failed = False
        self.all = all
        self._source, self._from, self._target, self._to = source, [*from_blocks], target, [*to]

    def reads(self, pool: BlockPool, blocks: Sequence[int]) -> bool:
        return pool is self._source and not {*self._from}.isdisjoint(blocks)

    def writes(self, pool: BlockPool, blocks: Sequence[int]) -> bool:
        return pool is self._target and not {*self._to}.isdisjoint(blocks)

    def copy(self) -> None:
        self._target.kv[self._to] = self._source.kv[self._from]
        self.done = True

    def wait(self) -> None:
        while not self.done:
            assert self.all.waiting
            self.all.tick()

    fence = wait


class HeldExecutor(Executor):
    """Jobs that are done on request of the test, or when their results are read."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = HeldFuture(self)
        self.waiting.append((future, lambda: job(*arguments, **named)))
        return future

    def tick(self) -> None:
        if self.waiting:
            future, job = self.waiting.popleft()
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)


class HeldFuture(Future[Any]):
    def __init__(self, executor: HeldExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:
        self.exception()
        return super().result()

    def exception(self, timeout: float | None = None) -> Any:
        while not self.done():
            assert self._executor.waiting
            self._executor.tick()
        return super().exception()


class Request:
    """A prompt of documents and a question, and how far it is."""

    def __init__(self, documents: Sequence[Sequence[int]], question: Sequence[int] = (7,), salt: str | None = None):
        self.salt = salt
        self.tokens = [token for document in (*documents, question) for token in document]
        self.ends = list(accumulate(map(len, documents)))
        self.path = segments_of(self.tokens, self.ends, salt=salt)
        self.document_tokens = sum(segment.tokens for segment in self.path)
        self.lease: KVLease | None = None
        self.computed = 0


class Engine:
    """Does with a cache what an engine does: in a step, all write the KV of their new tokens, then all read theirs."""

    def __init__(self, cache: KnowledgeCache, transfers: Any = None, executor: Any = None) -> None:
        self.cache = cache
        self.transfers = transfers
        self.executor = executor
        self.scheduled: list[tuple[Request, int]] = []

    def acquire(self, request: Request) -> KVLease:
        request.lease = self.cache.acquire(request.path)
        return request.lease

    def schedule(self, request: Request, tokens: int | None = None) -> None:
        """Compute the request's tokens up to there, with the next step."""
        lease = request.lease
        assert lease is not None
        tokens = len(request.tokens) if tokens is None else tokens
        self.cache.extend(lease, tokens)
        if not request.computed:
            request.computed = lease.cached_tokens
        assert len(lease.block_table) == SHAPE.blocks_for(lease.tokens) and lease.tokens >= tokens
        self.cache.commit(lease, tokens)
        self.scheduled.append((request, tokens))

    def step(self) -> None:
        for request, tokens in self.scheduled:
            self.write(request, request.computed, tokens)
            request.computed = tokens
        for request, tokens in self.scheduled:
            self.check(request, tokens)
        self.scheduled.clear()

    def compute(self, request: Request, tokens: int | None = None) -> None:
        self.schedule(request, tokens)
        self.step()

    def start(self, *documents: Sequence[int], question: Sequence[int] = (7,), tokens: int | None = None) -> Request:
        """A request that has computed its tokens up to there."""
        request = Request(documents, question)
        self.acquire(request)
        self.compute(request, tokens)
        return request

    def find(self, *documents: Sequence[int]) -> TierTokens:
        return self.cache.find(Request(documents).path)

    def fail(self) -> None:
        """The step fails."""
        for request, _ in self.scheduled:
            assert request.lease is not None
            self.cache.discard(request.lease)
            request.lease = None
        self.scheduled.clear()

    def write(self, request: Request, start: int, end: int) -> None:
        assert request.lease is not None
        table, places = torch.tensor(request.lease.block_table), torch.arange(start, end)
        new = kv_of(request.tokens[:end], request.salt)[start:]
        self.cache.pool.kv[table[places // BLOCK], :, :, places % BLOCK] = new

    def check(self, request: Request, tokens: int) -> None:
        """What the request reads is the KV of its own tokens, each at its own place."""
        assert request.lease is not None
        if not tokens:
            return
        table, places = torch.tensor(request.lease.block_table), torch.arange(tokens)
        read = self.cache.pool.kv[table[places // BLOCK], :, :, places % BLOCK]
        right = (read == kv_of(request.tokens[:tokens], request.salt)).flatten(1).all(1)
        assert right.all(), f"wrong KV at {(~right).nonzero().flatten().tolist()} of {tokens}"

    def release(self, request: Request) -> None:
        assert request.lease is not None
        self.cache.release(request.lease)
        request.lease = None

    def empty_device(self) -> None:
        """Have a request use all of it."""
        self.take(self.cache.pool.blocks)

    def take(self, blocks: int) -> None:
        """Have a request without documents use so many blocks."""
        lease = self.cache.acquire([])
        self.cache.extend(lease, blocks * BLOCK)
        self.cache.release(lease)

    def store(self) -> None:
        """Have everything on the disk, and nothing on the device."""
        self.empty_device()
        disk_of(self.cache).wait()

    def serve(self, *documents: Sequence[int], question: Sequence[int] = (7,), salt: str | None = None) -> TierTokens:
        """One request from beginning to end: what it found cached."""
        request = Request(documents, question, salt)
        lease = self.acquire(request)
        lease.wait()
        self.check(request, lease.cached_tokens)
        self.schedule(request)
        assert lease.tokens_by_tier.total == lease.cached_tokens
        self.step()
        found = lease.tokens_by_tier
        self.release(request)
        return found


DOCUMENTS = [[10 * name + offset for offset in range(length)] for name, length in enumerate((8, 3, 5, 1, 9, 2), 1)]
A, B, C, D, E, F = DOCUMENTS
PATHS = [[A], [A, B], [A, B, C], [A, B, D], [A, B, D, C], [B], [B, E], [B, D, D], [E, A, B], [F, D, F, E], [F, D, B]]


def references(cache: KnowledgeCache) -> tuple[Counter[int], Counter[int]]:
    """The references to blocks of device and host: nodes, leases, and running copies."""
    device, host = Counter[int](), Counter[int]()
    for node in tiers_of(cache).nodes.values():
        if node.device is not None:
            device.update(node.device.blocks)
        if node.host is not None:
            host.update(node.host.blocks)
    for lease in leases_of(cache).values():
        device.update(lease.block_table)
    for copy in running_copies(cache):
        for pool, blocks, holds in (
            (copy.source, copy.source_blocks, copy.holds_source),
            (copy.target, copy.target_blocks, True),
        ):
            if holds:
                (device if pool is cache.pool else host if pool is host_of(cache).pool else Counter()).update(blocks)
    return device, host


def check_accounts(cache: KnowledgeCache) -> None:
    """Every block is accounted for, and every tier knows what it holds."""
    for tier, counted in zip((device_of(cache), host_of(cache)), references(cache), strict=True):
        pool = tier.pool
        assert [pool.references(block) for block in range(pool.blocks)] == [counted[b] for b in range(pool.blocks)]
        nodes = [
            (node, place.blocks)
            for node in tiers_of(cache).nodes.values()
            if (place := node.device if tier is device_of(cache) else node.host) is not None
        ]
        of_nodes = {block for _, blocks in nodes for block in blocks}
        assert tier.tier.used == len(of_nodes)
        assert len(tier.tier) == len(nodes) and tier.tokens == sum(node.tokens for node, _ in nodes)
        for node, blocks in nodes:
            entry = tier.tier.get(node.key)
            assert entry is not None and entry.parent == node.parent
            assert len(blocks) == len(SHAPE.covering(node.start, node.tokens))
            if tier is device_of(cache):
                assert node.device is not None
                assert entry is node.device.entry and entry.size == node.device.size
        # What only copies hold whose source is being left will be free.
        staying = set(of_nodes)
        if tier is device_of(cache):
            staying |= {block for lease in leases_of(cache).values() for block in lease.block_table}
        for copy in running_copies(cache):
            if copy.target is pool:
                staying |= set(copy.target_blocks)
            if copy.source is pool and not copy.leaving and copy.holds_source:
                staying |= set(copy.source_blocks)
        assert pool.used_blocks - len(staying) == copies_of(cache).leaving(pool)
    stats = cache.stats()
    assert stats.device.used_bytes == cache.pool.used_bytes and stats.device.bytes <= stats.device.used_bytes
    assert stats.host.bytes <= stats.host.used_bytes <= stats.host.capacity_bytes
