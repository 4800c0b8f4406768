"""The knowledge cache: whatever moves between device, host and disk, a request reads the KV of its own tokens."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.inside import copies_of, device_of, disk_of, host_of, leases_of, running_copies, tiers_of
from support.rings import examples

torch = pytest.importorskip("torch")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragorder.kernels.cache import DiskSettings, KnowledgeCache, KVLease, Segment, TierTokens, segments_of
from ragorder.kernels.paging import BlockPool, KVShape, OutOfBlocksError
from ragorder.trie.policies import POLICIES
from ragorder.trie.profile import PrefillProfile

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


POOL_MEMORY = "ragorder.kernels.paging.pool.mmap"


def no_memory(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


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
PATHS = [[A], [A, B], [A, B, C], [A, B, D], [A, B, D, C], [B], [B, E], [B, D, D], [E, A, B], [F, D, F, E]]
PATH = st.sampled_from(PATHS)


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


Made = Callable[..., Engine]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Made]:
    """Makes engines with 12 blocks on the device, none in the host, and no disk, unless told otherwise."""
    made: list[KnowledgeCache] = []

    def make(**settings: Any) -> Engine:
        if isinstance(settings.get("disk"), int):
            settings["disk"] = DiskSettings(tmp_path / "disk", settings["disk"])
        held = {"transfers": HeldTransfers(), "executor": HeldExecutor()}
        options = {"device_blocks": 12, "identity": IDENTITY} | held | settings
        made.append(KnowledgeCache(SHAPE, **options))
        return Engine(made[-1], options["transfers"], options["executor"])

    yield make
    for cache in made:
        cache.close()


def on_disk(engine: Made, *documents: Sequence[int], device_blocks: int = 5, **settings: Any) -> Engine:
    """The documents are on the disk, and nowhere else."""
    at = engine(device_blocks=device_blocks, disk=PLENTY, **settings)
    at.serve(*documents)
    at.store()
    return at


def chunk_files(folder: Path) -> list[Path]:
    return sorted((folder / "disk" / "chunks").glob("??/*.kv"))


class TestAPromptIsAPath:
    TOKENS = tuple(range(100, 120))

    @pytest.mark.parametrize(
        ("ends", "settings", "sizes"),
        [
            # Documents are nodes, the question is none, and the last token is in no node.
            ([5, 12, 18], {}, [5, 7, 6]),
            ([5, 20], {}, [5, 14]),
            ([19, 20], {}, [19]),
            # An impossible end is ignored with all that follow.
            *((ends, {}, [5]) for ends in ([5, 5, 9], [5, 4], [5, 21], [5, 0], [5, -1])),
            # Without any there are chunks.
            *((ends, {"chunk_tokens": 8}, [8, 8]) for ends in ([], [0], [21, 5])),
            ([], {"chunk_tokens": 10}, [10]),
            ([], {}, []),
        ],
    )
    def test_has_a_node_for_each_document(self, ends: list[int], settings: dict[str, int], sizes: list[int]) -> None:
        assert [segment.tokens for segment in segments_of(self.TOKENS, ends, **settings)] == sizes

    def test_of_one_token_or_none_is_empty(self) -> None:
        assert segments_of([1], [1]) == segments_of([], []) == ()

    @pytest.mark.parametrize(
        ("ends", "expected"), [([5, 12, 18], [9, 3, 1]), ([5, 12, 12], [9, 3]), ([5, 20], [9, 3]), ([21, 5], [0, 0])]
    )
    def test_a_forecast_is_of_the_documents(self, ends: list[int], expected: list[int]) -> None:
        path = segments_of(self.TOKENS, ends, chunk_tokens=8, expected_uses=[9, 3, 1])
        assert [segment.expected_uses for segment in path] == expected
        plain = segments_of(self.TOKENS, ends, chunk_tokens=8)
        assert [segment[:2] for segment in path] == [segment[:2] for segment in plain]

    def test_a_key_stands_for_its_tokens_all_before_them_and_whose_they_are(self) -> None:
        path = segments_of(self.TOKENS, [5, 12])
        assert segments_of([*self.TOKENS[:12], 1, 2, 3], [5, 12]) == path
        assert segments_of([0, *self.TOKENS[1:]], [5, 12])[1].key != path[1].key
        assert segments_of([*self.TOKENS[:11], 0, 0], [5, 12])[0] == path[0]
        keys = [segments_of(self.TOKENS, [5], salt=salt)[0].key for salt in (None, "", "a", "b")]
        assert len({*keys}) == 4
        assert all(len(key) == 32 for key in keys)
        assert path[-1].key != segments_of(self.TOKENS, [12])[-1].key


class TestWhatWasComputedIsFound:
    def test_documents_are_found_and_the_question_is_not(self, engine: Made) -> None:
        at = engine()
        assert at.serve(A, B, C) == (0, 0, 0)
        assert at.serve(A, B, C) == (16, 0, 0)
        assert at.serve(A, B, D, question=(9, 9)) == (11, 0, 0)
        assert at.serve(B) == (0, 0, 0)

    def test_another_tenant_finds_nothing(self, engine: Made) -> None:
        at = engine()
        at.serve(A, salt="one")
        assert at.serve(A, salt="two") == at.serve(A) == (0, 0, 0)
        assert at.serve(A, salt="one") == (8, 0, 0)

    def test_what_a_request_has_not_come_to_is_not_there(self, engine: Made) -> None:
        at = engine()
        at.release(at.start(A, B, C, tokens=10))
        assert at.serve(A, B, C) == (8, 0, 0)


class TestMisuse:
    """Refused, with nothing changed."""

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda cache: cache.acquire([Segment(b"long", 49)]), "49 tokens need 13 blocks, but the device has 12"),
            (lambda cache: cache.acquire([Segment(b"empty", 0)]), "leave out empty segments"),
            (lambda cache: cache.extend(cache.acquire([]), 49), "shorten the prompt"),
            (lambda cache: cache.commit(cache.acquire([]), 1), "extend the lease first"),
            (lambda cache: cache.acquire([]) and cache.forget_device(), "discard them first"),
            (lambda cache: cache.resize(device_blocks=0), "give 1 or more"),
        ],
    )
    def test_of_a_cache(self, engine: Made, call: Callable[[KnowledgeCache], Any], said: str) -> None:
        at = engine()
        with pytest.raises(ValueError, match=said):
            call(at.cache)
        check_accounts(at.cache)

    def test_of_a_lease_that_was_given_back(self, engine: Made) -> None:
        at = engine()
        lease = at.acquire(Request([A]))
        at.cache.release(lease)
        at.cache.release(lease)
        at.cache.discard(lease)
        for call in (at.cache.extend, at.cache.commit):
            with pytest.raises(ValueError, match="released"):
                call(lease, 1)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"device_blocks": 0}, "1 or more"),
            ({"host_blocks": -1}, "0 or more"),
            ({"replicate_nodes": -1}, "0 or more"),
            ({"disk": {"bytes": 1}, "identity": ""}, "identity of the model"),
            ({"policy": "mru"}, "forecast, gdsf, lfu, lru, pgdsf"),
            ({"disk": {"bytes": -1}}, "0 or more bytes"),
            ({"disk": {"bytes": 1, "io_threads": 0}}, "0 or more bytes"),
            ({"disk": {"bytes": 1, "backlog_bytes": -1}}, "0 or more bytes"),
        ],
    )
    def test_of_settings(self, engine: Made, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            disk = {"disk": DiskSettings(tmp_path, **settings["disk"])} if "disk" in settings else {}
            engine(**settings | disk)


class TestBlocksAreShared:
    def test_another_continuation_gets_a_copy_of_it(self, engine: Made) -> None:
        at = engine()
        at.serve(A, B, C)
        at.serve(A, B, E)
        # E's 9 tokens begin in a block of its own.
        assert at.cache.pool.used_blocks == 4 + 3
        assert at.serve(A, B, C) == (16, 0, 0)
        assert at.serve(A, B, E) == (20, 0, 0)

    def test_others_copy_a_block_that_is_being_written(self, engine: Made) -> None:
        at = engine()
        first = at.start(A, B, question=[1])
        at.cache.mark_computed(first.lease)
        second = at.start(A, B, question=[2])
        assert first.lease.block_table[:2] == second.lease.block_table[:2]
        assert first.lease.block_table[2] != second.lease.block_table[2]
        first.tokens += [3, 4]
        at.schedule(first)
        at.compute(second)

    def test_requests_of_one_step_share_what_it_computes(self, engine: Made) -> None:
        at = engine()
        first, second = Request([A, B], [1]), Request([A, B], [2])
        for request in (first, second):
            at.acquire(request)
            at.schedule(request)
        # The last 3 tokens are in a block that cannot be copied before it is computed.
        assert (first.lease.cached_tokens, second.lease.cached_tokens) == (0, 8)
        assert second.lease.tokens_by_tier == (8, 0, 0)
        at.step()
        assert first.lease.block_table[:2] == second.lease.block_table[:2]

    def test_what_two_requests_computed_at_once_is_held_once(self, engine: Made) -> None:
        at = engine()
        requests = [Request([A, C], [number]) for number in (1, 2)]
        for request in requests:
            at.acquire(request)
        for request in requests:
            at.compute(request)
        assert not set(requests[0].lease.block_table) & set(requests[1].lease.block_table)
        for request in requests:
            at.release(request)
        assert at.cache.pool.used_blocks == 4
        assert at.serve(A, C) == (13, 0, 0)

    def test_a_block_that_two_nodes_end_in_is_counted_once(self, engine: Made) -> None:
        """The second request goes on in F's block, and shares D with the first one, which had copied that block."""
        at = engine()
        at.serve(F)
        requests = [Request([F, D, F], [1]), Request([F, D, B], [2])]
        for request in requests:
            at.acquire(request)
        for request in requests:
            at.compute(request)
        for request in requests:
            at.release(request)
        assert at.cache.pool.used_blocks == 4
        check_accounts(at.cache)


class TestAFailedStep:
    def test_leaves_what_earlier_steps_computed(self, engine: Made) -> None:
        at = engine()
        at.schedule(at.start(A, B, C, tokens=12))
        at.fail()
        assert at.serve(A, B, C) == (11, 0, 0)

    def test_who_waits_has_found_less(self, engine: Made) -> None:
        at = engine()
        at.serve(A)
        request, waiting = Request([A, E], [1]), Request([A, E], [2])
        at.acquire(request)
        at.schedule(request)
        lease = at.acquire(waiting)
        assert lease.cached_tokens == 16
        at.fail()
        assert (lease.cached_tokens, lease.tokens_by_tier, len(lease.block_table)) == (8, (8, 0, 0), 2)
        at.compute(waiting)


class TestWhatLeavesTheDevice:
    def test_is_copied_out_only_once(self, engine: Made) -> None:
        at = engine(device_blocks=5, host_blocks=20)
        for _ in range(4):
            at.serve(A, B, C)
            at.empty_device()
        tiers_of(at.cache).drain()
        stats = at.cache.stats()
        assert (stats.device.evicted, stats.host.received, stats.host.evicted) == (12, 3, 0)
        assert (stats.host.nodes, stats.host.tokens) == (3, 16)

    def test_is_copied_while_others_go_on(self, engine: Made) -> None:
        at = engine(device_blocks=8, host_blocks=20, replicate_nodes=1)
        at.serve(A)
        at.serve(A)
        (copy,) = at.transfers.waiting
        lease = at.cache.acquire([])
        at.cache.extend(lease, 6 * BLOCK)
        assert not copy.done
        # Whoever needs the blocks waits for the copy that is under way, and makes no other.
        at.cache.extend(lease, 8 * BLOCK)
        assert copy.done
        at.cache.release(lease)
        stats = at.cache.stats()
        assert (stats.device.evicted, stats.host.nodes, at.transfers.blocks) == (1, 1, 2)
        assert at.serve(A) == (0, 8, 0)

    def test_goes_on_to_the_disk(self, engine: Made) -> None:
        at = engine(device_blocks=5, host_blocks=4, disk=PLENTY)
        at.serve(A, B, C)
        at.empty_device()
        at.serve([50, 51, 52], [60] * 9)
        assert at.cache.stats().host.evicted > 0
        assert at.serve(A, B, C).disk > 0
        assert at.cache.stats().disk.hit_tokens > 0

    def test_a_node_that_is_larger_than_the_host_is_passed_over(self, engine: Made) -> None:
        at = engine(device_blocks=5, host_blocks=1)
        at.serve(A)
        at.empty_device()
        stats = at.cache.stats()
        assert stats.host.refused == {"size": 1}
        assert stats.host.nodes == 0

    def test_later_reads_do_not_wait_for_earlier_copies(self, engine: Made) -> None:
        at = on_disk(engine, A, B, C)
        jobs = at.executor.waiting
        lease = at.cache.acquire(Request([A, B, C]).path)
        assert len(jobs) == 3
        assert not lease.ready
        lease.wait()
        assert lease.ready and not jobs
        at.cache.release(lease)

    def test_a_child_may_arrive_before_its_parent(self, engine: Made) -> None:
        at = engine(device_blocks=5, host_blocks=1, disk=PLENTY)
        # They meet within a block. The host has room for the child alone.
        parent, child = [1] * 7, [2]
        for documents in ([parent], [parent, child]):
            at.serve(*documents)
            at.store()
        request = Request([parent, child])
        lease = at.acquire(request)
        assert lease.tokens_by_tier == (0, 1, 7)
        copies_of(at.cache).wait()
        at.cache.poll()
        assert [copy.load is None for copy in lease.pinned] == [False, True]
        lease.wait()
        at.check(request, 8)
        at.release(request)

    def test_the_backlog_gives_what_is_not_written_yet(self, engine: Made, tmp_path: Path) -> None:
        at = engine(device_blocks=5, disk=PLENTY)
        at.serve(A, B, C)
        at.empty_device()
        assert not chunk_files(tmp_path)
        lease = at.cache.acquire(Request([A, B]).path)
        # The executor does jobs in order: only the reads, as if a thread of their own had done them.
        jobs = at.executor.waiting
        writes = [jobs.popleft() for _ in range(len(jobs) - 2)]
        lease.wait()
        assert lease.tokens_by_tier == (0, 0, 11)
        jobs.extend(writes)
        request = Request([A, B])
        request.lease = lease
        at.check(request, 11)
        at.release(request)

    def test_a_write_that_ends_just_now_holds_no_blocks(self, engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        """A is written because B leaves, and stays. Its copy ends after B's, as on another stream, while the cache
        looks for what has ended. Then A leaves, too, without a copy, and its blocks are needed at once."""

        def by_itself(transfer: HeldTransfer) -> None:
            if not transfer.done:
                transfer.all.waiting.remove(transfer)
                transfer.copy()

        monkeypatch.setattr(HeldTransfer, "wait", by_itself)
        monkeypatch.setattr(HeldTransfer, "fence", by_itself)
        at = engine(device_blocks=5, disk=PLENTY)
        at.serve(A, B)
        lease = at.cache.acquire([])
        at.cache.extend(lease, 3 * BLOCK)
        disk = disk_of(at.cache)
        assert disk is not None and [node.tokens for node in tiers_of(at.cache).nodes.values()] == [8]
        assert disk.copying(Request([A]).path[0].key) is not None
        look = disk.poll

        def ended_before() -> None:
            while at.executor.waiting:
                at.executor.tick()
            look()

        monkeypatch.setattr(disk, "poll", ended_before)
        at.cache.extend(lease, 5 * BLOCK)
        at.cache.release(lease)
        check_accounts(at.cache)
        assert at.serve(A, B) == (0, 0, 11)


class TestAfterARestart:
    @pytest.mark.parametrize("host_blocks", [0, 4])
    def test_a_document_after_one_that_never_left_the_device_is_found(self, engine: Made, host_blocks: int) -> None:
        at = engine(device_blocks=8, host_blocks=host_blocks, disk=PLENTY)
        for document in (B, C, E, F, [60] * 9, [70] * 9):
            assert at.serve(A, document).device in (0, len(A))
        assert at.serve(A).device == len(A)
        at.cache.close()
        again = engine(device_blocks=8, host_blocks=host_blocks, disk=PLENTY)
        assert again.serve(A, B) == (0, 0, len(A) + len(B))

    @pytest.mark.parametrize(
        ("shape", "identity"), [(SHAPE, "another"), (KVShape(2, 3, 1, BLOCK, torch.float32), IDENTITY)]
    )
    def test_another_models_documents_are_not_found(
        self, engine: Made, tmp_path: Path, shape: KVShape, identity: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        on_disk(engine, A, B, C).cache.close()
        with caplog.at_level("WARNING", "ragorder"):
            disk = DiskSettings(tmp_path / "disk", PLENTY)
            cache = KnowledgeCache(shape, device_blocks=5, identity=identity, disk=disk)
        assert "another model" in caplog.text
        lease = cache.acquire(Request([A, B, C]).path)
        assert lease.cached_tokens == 0
        cache.release(lease)
        assert cache.stats().disk.refused == {"identity": 1}
        assert cache.stats().disk.capacity_bytes == 0
        cache.close()

    def test_a_locked_folder_is_left_alone(self, engine: Made) -> None:
        at = engine(device_blocks=5, disk=PLENTY)
        second = engine(device_blocks=5, disk=PLENTY)
        assert second.cache.stats().disk.refused == {"locked": 1}
        second.serve(A, B, C)
        second.empty_device()
        assert second.serve(A, B, C) == (0, 0, 0)
        assert at.serve(A, B, C) == (0, 0, 0)


class TestAFailingDisk:
    def path_of(self, at: Engine, tmp_path: Path, documents: Sequence[Sequence[int]]) -> Path:
        (found,) = {
            path for path in chunk_files(tmp_path) if Request(documents).path[-1].key in path.read_bytes()[:100]
        }
        return found

    @pytest.mark.parametrize(("bad", "left", "truncated"), [([A], 0, True), ([A, B], 8, False), ([A, B, C], 11, False)])
    def test_a_chunk_that_has_changed_shortens_what_was_found(
        self, engine: Made, tmp_path: Path, bad: list[list[int]], left: int, truncated: bool
    ) -> None:
        at = on_disk(engine, A, B, C)
        path = self.path_of(at, tmp_path, bad)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content[:-1] if truncated else content)
        request = Request([A, B, C])
        lease = at.acquire(request)
        assert lease.cached_tokens == 16
        lease.wait()
        assert lease.cached_tokens == left
        assert lease.tokens_by_tier == (0, 0, left)
        at.compute(request)
        at.release(request)
        stats = at.cache.stats()
        assert stats.disk.failed == 1
        assert stats.disk.refused == {"truncated" if truncated else "checksum": 1}
        assert at.serve(A, B, C) == (16, 0, 0)

    def test_two_requests_that_wait_for_one_chunk_both_find_less(self, engine: Made, tmp_path: Path) -> None:
        at = on_disk(engine, A, B, C)
        self.path_of(at, tmp_path, [A]).write_bytes(b"something else")
        requests = [Request([A, B], [number]) for number in (1, 2)]
        for request in requests:
            at.acquire(request)
        for request in requests:
            request.lease.wait()
            assert request.lease.cached_tokens == 0
        at.schedule(requests[0])
        at.step()
        at.release(requests[0])
        at.schedule(requests[1])
        at.step()

    def test_a_full_disk_is_left_alone(self, engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        at = engine(device_blocks=6, host_blocks=4, disk=PLENTY)

        def full(*arguments: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            for documents in PATHS * 2:
                at.serve(*documents)
            disk_of(at.cache).wait()
        refused = at.cache.stats().disk.refused
        assert refused["write_ENOSPC"] == 3
        assert refused["paused"] > 0
        assert at.cache.stats().disk.nodes == 0
        assert at.serve(*PATHS[-1]).total > 0


class TestRoom:
    def test_who_finds_no_room_waits_and_nothing_has_changed(self, engine: Made) -> None:
        at = engine(device_blocks=8, host_blocks=20)
        at.serve(A)
        running, waiting = at.start(E, E), Request([A], [1] * 9)
        lease = at.acquire(waiting)
        before = at.cache.stats()
        with pytest.raises(OutOfBlocksError, match="in use"):
            at.cache.extend(lease, 17)
        assert (lease.cached_tokens, lease.tokens, len(lease.block_table)) == (8, 8, 2)
        assert at.cache.stats() == before
        at.release(running)
        at.compute(waiting)

    def test_who_finds_no_room_for_what_is_cached_waits(self, engine: Made) -> None:
        at = engine(device_blocks=8, host_blocks=20)
        at.serve(A, B, C)
        running = at.start(E, E, question=[1] * 10)
        tiers_of(at.cache).drain()
        before = at.cache.stats()
        with pytest.raises(OutOfBlocksError):
            at.cache.acquire(Request([A, B, C]).path)
        assert at.cache.stats() == before
        at.release(running)
        assert at.serve(A, B, C) == (0, 16, 0)

    def test_blocks_merge_only_where_two_nodes_meet(
        self, engine: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Parent and grandchild come from the disk, and what is between them does not, for want of memory to read it
        into. A request that needs the whole device frees blocks that two nodes both hold the tokens of: these two hold
        none of the same."""
        parent, between, grandchild = A, [60, 61, 62, 63, 64, 65], [70, 71, 72, 73]
        at = on_disk(engine, parent, between, grandchild, device_blocks=6)
        made = 0

        def second_fails(*given: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            return no_memory() if made == 2 else mmap.mmap(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(POOL_MEMORY, second_fails)
            lease = at.cache.acquire(Request([parent, between, grandchild]).path)
            lease.wait()
        assert lease.tokens_by_tier == (0, 0, 8)
        at.cache.release(lease)
        tiers_of(at.cache).drain()
        assert [record.getMessage() for record in caplog.records] == [
            "reading a node from the disk failed: MemoryError"
        ]
        assert [node.tokens for node in tiers_of(at.cache).nodes.values()] == [8, 4]
        at.cache.resize(device_blocks=5)
        assert at.serve(parent, between, grandchild).total == 14
        assert at.serve(parent) == (8, 0, 0)
        check_accounts(at.cache)

    def test_nor_where_a_request_has_lost_what_is_between(self, engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        """It goes on after a node that it has computed itself and that others failed to load. It needs the whole device
        then."""
        parent, between = [50] * 7, [60, 61, 62, 63, 64, 65]
        at = on_disk(engine, parent, between, device_blocks=8)
        # Holds the parent's last block, so that the request copies it.
        other, request = Request([parent]), Request([parent, between, [70, 71, 72, 73]])
        at.acquire(other).wait()

        with monkeypatch.context() as patch:
            patch.setattr(POOL_MEMORY, no_memory)
            at.acquire(request).wait()
            assert request.lease.cached_tokens == 7
            at.cache.prefetch(Request([parent, between]).path)
            at.compute(request, 13)
            tiers_of(at.cache).drain()
        assert [copy.resident for copy in request.lease.pinned] == [True, False]
        at.compute(request)
        at.release(other)
        with suppress(OutOfBlocksError):
            at.cache.extend(request.lease, 8 * BLOCK)
        at.check(request, len(request.tokens))
        at.release(request)
        assert at.serve(parent) == (7, 0, 0)
        check_accounts(at.cache)

    def test_an_orphan_leaves_with_the_block_it_shares(self, engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        """B goes on in F's block, and D, between them, could not be loaded: F leaves first, and frees none."""
        at = on_disk(engine, F, D, device_blocks=4, policy="lru")
        request = Request([F, D, B], [1])
        at.acquire(Request([F])).wait()
        at.cache.release(next(iter(leases_of(at.cache).values())))

        with monkeypatch.context() as patch:
            patch.setattr(POOL_MEMORY, no_memory)
            at.acquire(request).wait()
            at.cache.prefetch(Request([F, D]).path)
            at.compute(request, 3)
            tiers_of(at.cache).drain()
        at.compute(request)
        at.release(request)
        assert [node.tokens for node in tiers_of(at.cache).nodes.values()] == [2, 3]
        assert at.cache.pool.used_blocks == 2
        at.take(3)
        check_accounts(at.cache)


class TestPrefetch:
    def test_what_a_waiting_request_will_use_leaves_the_host_last(self, engine: Made) -> None:
        def held_after(expected: Sequence[Sequence[int]]) -> bool:
            at = engine(device_blocks=4, host_blocks=8, policy="lru")
            for document in (A, B):
                at.serve(document)
            awaited = at.cache.expect(Request(expected).path)
            for number in range(6):
                at.serve([2000 + 20 * number + each for each in range(len(A))])
            found = at.find(A)
            at.cache.settle(awaited)
            return bool(found.device + found.host)

        assert held_after([A]) and not held_after([B])

    def test_no_more_than_half_of_the_host_is_kept_and_nothing_waits_for_room(self, engine: Made) -> None:
        at = engine(device_blocks=4, host_blocks=8, policy="lru")
        documents = [[3000 + 20 * number + each for each in range(8)] for number in range(10)]
        awaited = [at.cache.expect(Request([document]).path) for document in documents]
        assert sum(map(len, awaited)) * 8 == 4 * BLOCK
        for document in documents:
            at.serve(document)
            check_accounts(at.cache)

    def test_prefetching_loads_for_any_request(self, engine: Made) -> None:
        at = engine(device_blocks=9, host_blocks=20)
        at.serve(A, B, C)
        at.serve(E, E)
        at.serve(F, F, F, F, F, F, F, F, F)
        at.cache.prefetch(Request([A, B, C]).path)
        assert at.cache.stats().loads > 0
        tiers_of(at.cache).drain()
        loaded = at.cache.stats().device.received
        assert loaded > 0
        lease = at.acquire(request := Request([A, B, C]))
        assert lease.ready and lease.cached_tokens == 16
        # It is told where they were before they were loaded for it.
        assert lease.tokens_by_tier.host > 0
        assert at.cache.stats().device.received == loaded
        at.release(request)

    def test_prefetching_evicts_nothing_of_running_or_waiting_requests(self, engine: Made) -> None:
        at = engine(device_blocks=6, host_blocks=40)
        at.serve(A, B)
        at.serve(B, E)
        at.serve(E, A)
        at.serve(F, D)
        running = at.start(D, D)
        at.cache.prefetch(Request([A, B]).path)
        tiers_of(at.cache).drain()
        ahead = {
            node.key for node in tiers_of(at.cache).nodes.values() if node.device is not None and node.device.prefetched
        }
        assert ahead
        for other in ([B, E], [E, A], [A, B]):
            at.cache.prefetch(Request(other).path)
            tiers_of(at.cache).drain()
            assert all(tiers_of(at.cache).nodes[key].device is not None for key in ahead)
        at.compute(running)


class TestPolicies:
    PROFILE = PrefillProfile((0, 100), (1, 100), ((0.001, 0.2), (0.002, 0.4)))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_each_evicts_and_finds_in_device_and_host(self, engine: Made, policy: str) -> None:
        at = engine(device_blocks=7, host_blocks=7, disk=20 * 4096, policy=policy)
        documents = random.Random(0)
        for _ in range(60):
            at.serve(*documents.choice(PATHS))
            check_accounts(at.cache)
        stats = at.cache.stats()
        assert stats.device.hit_tokens and stats.host.hit_tokens and stats.device.evicted and stats.host.evicted

    def test_a_node_costs_what_a_new_token_of_its_requests_took(self, engine: Made) -> None:
        at = engine(device_blocks=12, host_blocks=12, profile=self.PROFILE)
        at.serve(A)
        at.serve(A, C)
        at.serve(A, C)
        a, c = (segment.key for segment in Request([A, C]).path)
        tier = device_of(at.cache).tier
        assert (tier.get(a).frequency, tier.get(a).misses, tier.get(a).cost) == (3, 1, self.PROFILE.cost(0, 9))
        # 13 tokens and a question of one; 8 were cached.
        assert (tier.get(c).frequency, tier.get(c).misses, tier.get(c).cost) == (2, 1, self.PROFILE.cost(8, 6))

    def test_the_host_counts_what_the_device_holds(self, engine: Made) -> None:
        at = engine(device_blocks=5, host_blocks=20)
        for _ in range(3):
            at.serve(A)
        at.empty_device()
        (key,) = (segment.key for segment in Request([A]).path)
        assert host_of(at.cache).tier.get(key).frequency == 3


def replicas(at: Made) -> list[Any]:
    """Nodes that are kept in the host, because they are used most."""
    tiers = tiers_of(at.cache)
    tiers.drain()
    return [node for node in tiers.nodes.values() if node.host and host_of(at.cache).tier.get(node.key).pins]


class TestWhatIsUsedMost:
    def test_is_in_the_host_before_it_leaves_the_device(self, engine: Made) -> None:
        at = engine(device_blocks=40, host_blocks=20, replicate_nodes=2)
        for _ in range(3):
            at.serve(A, B, C)
            at.serve(A, B, D)
        at.serve(E, F)
        tiers_of(at.cache).drain()
        assert at.cache.stats().device.evicted == 0
        assert (at.cache.stats().host.nodes, at.cache.stats().host.tokens) == (2, 11)
        at.cache.forget_device()
        assert at.cache.pool.used_blocks == 0
        assert at.serve(A, B, C) == (0, 11, 0)
        assert at.serve(E, F) == (0, 0, 0)

    def test_makes_way_for_what_is_used_more(self, engine: Made) -> None:
        at = engine(device_blocks=40, host_blocks=20, replicate_nodes=1)
        for _ in range(2):
            at.serve(A)
        for _ in range(3):
            at.serve(E)
        assert [node.key for node in replicas(at)] == [Request([E]).path[0].key]

    def test_makes_way_even_if_its_own_copy_fails_at_that_moment(self, engine: Made) -> None:
        """Room for the next one has to wait for copies, and one of them has failed."""
        at = engine(device_blocks=12, host_blocks=4, replicate_nodes=1, policy="lru")
        other, often = Request([F]), [70] * 8
        at.serve(F)
        at.empty_device()
        for _ in range(2):
            at.serve(A)
        (copy,) = at.transfers.waiting
        at.acquire(other)
        copy.failed = True
        for _ in range(3):
            at.serve(often)
        assert [node.key for node in replicas(at)] == [Request([often]).path[0].key]
        at.release(other)
        check_accounts(at.cache)

    def test_takes_no_more_than_half_of_the_host(self, engine: Made) -> None:
        at = engine(device_blocks=40, host_blocks=6, replicate_nodes=9)
        for documents in ([A], [E], [[70] * 8]):
            for _ in range(2):
                at.serve(*documents)
        assert 0 < sum(len(node.host.blocks) for node in replicas(at)) <= 3


class TestADeviceThatFails:
    @pytest.mark.parametrize("tier", [{"host_blocks": 20}, {"disk": PLENTY}], ids=["host", "disk"])
    def test_spoils_what_was_being_copied_from_it_and_nothing_else(self, engine: Made, tier: dict[str, int]) -> None:
        at = engine(**tier)
        at.serve(A, B)
        at.empty_device()
        tiers_of(at.cache).drain()
        if disk_of(at.cache) is not None:
            disk_of(at.cache).wait()
        before = at.find(A, B)
        assert before.total == len(A) + len(B)
        at.serve(E)
        at.empty_device()
        assert len(copies_of(at.cache)) and at.find(E).total
        at.cache.pool.kv.fill_(float("nan"))
        at.cache.forget_device()
        assert at.find(E).total == 0
        assert at.find(A, B) == before
        check_accounts(at.cache)
        assert at.serve(A, B) == before
        assert at.serve(E).total == 0


class TestPoolsThatChange:
    def test_a_smaller_one_lets_go_what_the_policy_evicts(self, engine: Made) -> None:
        at = engine(policy="lru", host_blocks=8)
        at.serve(A)
        at.serve(B, E)
        at.serve(A)
        assert at.cache.pool.used_blocks == 5
        at.cache.resize(device_blocks=3)
        assert (at.cache.pool.blocks, at.cache.pool.used_blocks) == (3, 3)
        assert at.serve(A) == (8, 0, 0)
        at.cache.resize(device_blocks=9)
        assert at.serve(B, E) == (0, 12, 0)
        check_accounts(at.cache)

    def test_blocks_in_use_stay_with_what_is_in_them(self, engine: Made) -> None:
        at = engine(device_blocks=12)
        first, second = at.start(A, B, question=[1, 2, 3]), at.start(E, question=[4])
        before = [*second.lease.block_table]
        at.release(first)
        at.cache.resize(device_blocks=3)
        assert sorted(second.lease.block_table) == [0, 1, 2] != before
        at.check(second, len(second.tokens))
        with pytest.raises(OutOfBlocksError, match="in use"):
            at.cache.resize(device_blocks=2)
        assert at.cache.pool.blocks == 3
        at.check(second, len(second.tokens))
        at.cache.resize(device_blocks=6)
        second.tokens += range(1000, 1009)
        at.compute(second)
        check_accounts(at.cache)

    def test_replicas_make_way_in_a_smaller_host(self, engine: Made) -> None:
        at = engine(host_blocks=8, replicate_nodes=2)
        for _ in range(3):
            at.serve(A)
        at.cache.poll()
        tiers_of(at.cache).drain()
        assert host_of(at.cache).pool.used_blocks == 2
        at.cache.resize(host_blocks=1)
        assert host_of(at.cache).pool.used_blocks == 0
        assert at.serve(A) == (8, 0, 0)
        check_accounts(at.cache)

    def test_replaced_the_device_is_empty_and_the_host_has_what_it_held(self, engine: Made) -> None:
        at = engine(host_blocks=8)
        at.serve(A, B)
        at.cache.replace_device(5)
        assert (at.cache.pool.blocks, at.cache.pool.used_blocks) == (5, 0)
        assert at.serve(A, B) == (0, 11, 0)
        lease = at.acquire(Request([A]))
        with pytest.raises(ValueError, match="leases hold blocks"):
            at.cache.replace_device(4)
        at.cache.release(lease)

    def test_what_cannot_leave_a_replaced_one_keeps_its_kv(self, engine: Made) -> None:
        at = engine(host_blocks=8)
        at.serve(E)
        at.serve(A)
        (key,) = (segment.key for segment in Request([A]).path)
        device_of(at.cache).tier.pin(key)
        before = tiers_of(at.cache).nodes[key].device.blocks
        at.cache.replace_device(2)
        assert tiers_of(at.cache).nodes[key].device.blocks == [0, 1] != before
        device_of(at.cache).tier.unpin(key)
        at.cache.resize(device_blocks=12)
        assert at.serve(A) == (8, 0, 0)
        check_accounts(at.cache)


class TestSuspectNodes:
    @pytest.mark.parametrize("tiers", [{}, {"host_blocks": 6, "disk": PLENTY}], ids=str)
    def test_leave_every_tier_with_all_after_them(self, engine: Made, tiers: dict[str, int]) -> None:
        at = engine(device_blocks=14, **tiers)
        for path in ([A, B, C], [A, B, D], [B, E]):
            at.serve(*path)
        if tiers:
            at.empty_device()
        assert at.find(B, E).total == len(B) + len(E)
        at.cache.purge([Request([A, B]).path[-1].key])
        for path in ([A, B], [A, B, C], [A, B, D]):
            assert at.find(*path).total == len(A)
        assert at.find(B, E).total == len(B) + len(E)
        check_accounts(at.cache)
        # What is computed in its place has nothing of the former after it.
        assert at.serve(A, B).total == len(A)
        assert at.find(A, B, C).total == len(A) + len(B)

    def test_a_lease_keeps_their_blocks_and_commits_nothing_after_them(self, engine: Made) -> None:
        at = engine()
        request = at.start(A, B, C, tokens=len(A) + 1)
        at.cache.purge([request.path[0].key])
        at.compute(request)
        at.release(request)
        assert at.find(A, B, C).total == 0
        assert at.cache.stats().device.nodes == 0
        check_accounts(at.cache)

    def test_a_lease_that_has_not_begun_finds_what_is_before_them(self, engine: Made) -> None:
        at = engine()
        at.serve(A, B, C)
        request = Request([A, B, C])
        lease = at.acquire(request)
        assert lease.cached_tokens == request.document_tokens
        at.cache.purge([request.path[1].key])
        assert lease.cached_tokens == len(A)
        at.compute(request)
        at.release(request)
        assert at.find(A, B, C).total == request.document_tokens
        check_accounts(at.cache)


class TestAllAtOnce:
    def test_clear_forgets_all_tiers(self, engine: Made, tmp_path: Path) -> None:
        at = engine(device_blocks=6, host_blocks=4, disk=PLENTY)
        for documents in PATHS:
            at.serve(*documents)
        at.cache.clear()
        stats = at.cache.stats()
        assert (stats.device.nodes, stats.host.nodes, stats.disk.nodes) == (0, 0, 0)
        assert (stats.device.used_bytes, stats.host.used_bytes, stats.disk.used_bytes) == (0, 0, 0)
        assert not chunk_files(tmp_path)
        assert at.serve(A, B, C) == (0, 0, 0)
        at.empty_device()
        assert at.serve(A, B, C).total > 0

    def test_threads_and_a_disk(self, engine: Made) -> None:
        """Real ones, and stats from another thread meanwhile."""
        at = engine(device_blocks=8, host_blocks=8, disk=12 * 4096, transfers=None, executor=None, replicate_nodes=2)
        ended, failed = threading.Event(), []

        def look() -> None:
            while not ended.is_set():
                try:
                    stats = at.cache.stats()
                    assert stats.device.used_bytes <= stats.device.capacity_bytes
                except Exception as error:
                    failed.append(error)
                    return

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            choice, found = random.Random(1), TierTokens()
            for number in range(300):
                path = choice.choice(PATHS)
                if number % 3 == 0:
                    at.cache.prefetch(Request(choice.choice(PATHS)).path)
                found = TierTokens(*map(sum, zip(found, at.serve(*path), strict=True)))
        finally:
            ended.set()
            watcher.join()
        assert not failed
        stats = at.cache.stats()
        assert found == (stats.device.hit_tokens, stats.host.hit_tokens, stats.disk.hit_tokens)
        assert all(found)
        assert stats.requests == 300 and stats.leases == 0
        tiers_of(at.cache).drain()
        check_accounts(at.cache)


class Machine(RuleBasedStateMachine):
    """An engine and all that can happen to it, in any order. The shared folder outlives its caches."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.requests: list[Request] = []

    @initialize(
        settings=st.fixed_dictionaries(
            {
                "device_blocks": st.integers(6, 16),
                "host_blocks": st.sampled_from([9, 4, 0, 60]),
                "policy": st.sampled_from(POLICIES),
                "history": st.sampled_from([1000, 3, 0]),
                "replicate_nodes": st.sampled_from([0, 2]),
            }
        ),
        disk=st.sampled_from([PLENTY, 5 * 4096, None]),
        backlog=st.sampled_from([PLENTY, 2000, 0]),
    )
    def begin(self, settings: dict[str, Any], disk: int | None, backlog: int) -> None:
        self.settings = settings | {"disk": disk and DiskSettings(self.folder / "disk", disk, backlog_bytes=backlog)}
        self.open()

    def open(self) -> None:
        self.transfers, self.executor = HeldTransfers(), HeldExecutor()
        self.cache = KnowledgeCache(
            SHAPE, identity=IDENTITY, transfers=self.transfers, executor=self.executor, **self.settings
        )
        self.engine = Engine(self.cache)

    def idle(self) -> list[Request]:
        """Those that hold a lease, and are not in the step that is being put together."""
        scheduled = [request for request, _ in self.engine.scheduled]
        return [request for request in self.requests if request.lease is not None and request not in scheduled]

    def pick(self, requests: list[Request], number: int) -> Request | None:
        return requests[number % len(requests)] if requests else None

    @rule(
        path=PATH,
        question=st.lists(st.integers(100, 102), min_size=1, max_size=6),
        salt=st.sampled_from([None, None, "a tenant"]),
    )
    def arrive(self, path: list[list[int]], question: list[int], salt: str | None) -> None:
        request = Request(path, question, salt)
        if SHAPE.blocks_for(len(request.tokens)) > self.cache.pool.blocks:
            return
        try:
            lease = self.engine.acquire(request)
        except OutOfBlocksError:
            assert leases_of(self.cache), "nobody holds anything, and there is no room"
            return
        assert lease.cached_tokens <= request.document_tokens
        self.requests.append(request)

    @rule(paths=st.lists(PATH, min_size=2, max_size=6))
    def serve(self, paths: list[list[list[int]]]) -> None:
        """One after the other, beside those that are under way."""
        for path in paths:
            request = Request(path)
            if SHAPE.blocks_for(len(request.tokens)) > self.cache.pool.blocks:
                continue
            try:
                self.engine.acquire(request)
            except OutOfBlocksError:
                continue
            try:
                self.engine.schedule(request)
            except OutOfBlocksError:
                pass
            else:
                self.engine.step()
            self.engine.release(request)
            check_accounts(self.cache)

    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def schedule(self, number: int, share: float) -> None:
        request = self.pick([request for request in self.idle() if request.lease.ready], number)
        if request is None or request.computed >= len(request.tokens):
            return
        least = (request.computed or request.lease.cached_tokens) + 1
        try:
            self.engine.schedule(request, least + int(share * (len(request.tokens) - least)))
        except OutOfBlocksError:
            if len(leases_of(self.cache)) == 1:
                # Without what others had of its path, which it has itself, there is room.
                assert request.lease.started
                self.engine.release(request)
                self.requests.remove(request)

    @rule(number=st.integers(0, 9), tokens=st.integers(1, 9))
    def answer(self, number: int, tokens: int) -> None:
        finished = [request for request in self.idle() if request.computed == len(request.tokens)]
        request = self.pick(finished, number)
        if request is not None and SHAPE.blocks_for(len(request.tokens) + tokens) <= self.cache.pool.blocks:
            request.tokens += range(1000, 1000 + tokens)

    def check_idle(self) -> None:
        for request in self.idle():
            if request.lease.ready:
                self.engine.check(request, request.computed or request.lease.cached_tokens)

    @rule()
    def step(self) -> None:
        self.engine.step()
        self.check_idle()

    @rule()
    def fail(self) -> None:
        self.engine.fail()
        self.requests = [request for request in self.requests if request.lease is not None]

    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        request = self.pick(self.idle(), number)
        if request is not None:
            self.engine.release(request)
            self.requests.remove(request)

    @rule(path=PATH)
    def prefetch(self, path: list[list[int]]) -> None:
        pinned = {copy.node.key for lease in leases_of(self.cache).values() for copy in lease.pinned if copy.resident}
        self.cache.prefetch(Request(path).path)
        assert all(tiers_of(self.cache).nodes[key].device is not None for key in pinned)

    @rule(copies=st.integers(0, 3), jobs=st.integers(0, 3), polls=st.booleans())
    def time_passes(self, copies: int, jobs: int, polls: bool) -> None:
        for _ in range(copies):
            self.transfers.tick()
        for _ in range(jobs):
            self.executor.tick()
        if polls:
            self.cache.poll()

    @rule(number=st.integers(0, 99), place=st.integers(0, 10_000))
    def a_bit_flips(self, number: int, place: int) -> None:
        files = sorted((self.folder / "disk" / "chunks").glob("??/*.kv"))
        if files:
            path = files[number % len(files)]
            bytes = bytearray(path.read_bytes())
            bytes[place % len(bytes)] ^= 1
            path.write_bytes(bytes)

    @rule(path=PATH)
    def purge(self, path: list[list[int]]) -> None:
        key = Request(path).path[-1].key
        self.cache.purge([key])
        assert not tiers_of(self.cache).holds(key)

    @precondition(lambda self: not self.engine.scheduled)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        stats = self.cache.stats()
        assert not stats.device.nodes and not stats.host.nodes and not stats.disk.nodes

    @precondition(lambda self: not self.engine.scheduled)
    @rule()
    def lose_the_device(self) -> None:
        for request in self.idle():
            self.cache.discard(request.lease)
        self.requests.clear()
        self.cache.pool.kv.fill_(float("nan"))
        self.cache.forget_device()
        assert not self.cache.pool.used_blocks

    @rule(device=st.integers(1, 20), host=st.none() | st.integers(0, 20))
    def resize(self, device: int, host: int | None) -> None:
        held = [SHAPE.blocks_for(len(request.tokens)) for request in self.requests if request.lease is not None]
        device = max([device, *held])
        before = self.cache.pool.blocks
        try:
            self.cache.resize(device_blocks=device)
        except OutOfBlocksError:
            assert leases_of(self.cache), "nothing is in use, and the pool cannot be smaller"
            device = before
        assert self.cache.pool.blocks == device
        if host is not None:
            self.cache.resize(host_blocks=host)
            assert host_of(self.cache).pool.blocks == host
        self.check_idle()

    @rule()
    def restart(self) -> None:
        self.engine.fail()
        for request in self.idle():
            self.engine.release(request)
        self.requests.clear()
        self.cache.close()
        self.open()

    @rule(path=PATH)
    def alone_a_request_can_have_all_blocks(self, path: list[list[int]]) -> None:
        if leases_of(self.cache):
            return
        request = Request(path)
        most = self.cache.pool.blocks * BLOCK
        if len(request.tokens) > most:
            return
        request.tokens += range(2000, 2000 + most - len(request.tokens))
        self.engine.acquire(request).wait()
        self.engine.schedule(request)
        self.engine.step()
        self.engine.release(request)

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            check_accounts(self.cache)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.engine.fail()
            for request in self.idle():
                self.engine.release(request)
            self.cache.clear()
            assert not self.cache.pool.used_blocks and not host_of(self.cache).pool.used_blocks
            self.cache.close()
        shutil.rmtree(self.folder)


TestWhateverHappens = Machine.TestCase
TestWhateverHappens.settings = settings(max_examples=examples(120), stateful_step_count=50, deadline=None)
