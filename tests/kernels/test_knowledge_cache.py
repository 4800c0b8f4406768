"""The knowledge cache: whatever moves between device, host and disk, a request reads the KV of its own tokens."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.cached_kv import (
    BLOCK,
    IDENTITY,
    PATHS,
    PLENTY,
    SHAPE,
    A,
    B,
    C,
    D,
    E,
    Engine,
    F,
    HeldExecutor,
    HeldTransfer,
    HeldTransfers,
    Request,
    check_accounts,
)
from support.inside import device_of, disk_of, host_of, leases_of, tiers_of

from ragorder.kernels.cache import DiskSettings, KnowledgeCache, Segment
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.trie.profile import PrefillProfile

POOL_MEMORY = "ragorder.kernels.paging.pool.mmap"


def no_memory(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


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

    def test_what_was_written_while_the_device_failed_is_not_on_the_disk(self, engine: Made) -> None:
        at = engine(device_blocks=5, disk=PLENTY)
        at.serve(A, B, C)
        at.empty_device()
        assert at.executor.waiting
        while at.executor.waiting:
            at.executor.tick()
        at.cache.forget_device()
        assert at.find(A) == (0, 0, 0)
        assert at.cache.stats().disk.nodes == 0

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


class TestPolicies:
    PROFILE = PrefillProfile((0, 100), (1, 100), ((0.001, 0.2), (0.002, 0.4)))

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
