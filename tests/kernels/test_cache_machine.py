"""The knowledge cache, whatever happens to it: requests read the KV of their own tokens, and accounts are right."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.cached_kv import (
    BLOCK,
    IDENTITY,
    PATHS,
    PLENTY,
    SHAPE,
    Engine,
    HeldExecutor,
    HeldTransfers,
    Request,
    check_accounts,
)
from support.inside import host_of, leases_of, tiers_of
from support.rings import examples

from ragorder.kernels.cache import DiskSettings, KnowledgeCache, TierTokens
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.trie.policies import POLICIES

PATH = st.sampled_from(PATHS)


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
        self.cache.poll()
        before = self.cache.stats()
        try:
            lease = self.engine.acquire(request)
        except OutOfBlocksError:
            assert leases_of(self.cache), "nobody holds anything, and there is no room"
            assert self.cache.stats() == before, "who finds no room waits, and nothing has changed"
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
        lease = request.lease
        least = (request.computed or lease.cached_tokens) + 1
        self.cache.poll()
        before = self.cache.stats(), lease.cached_tokens, lease.tokens, len(lease.block_table)
        try:
            self.engine.schedule(request, least + int(share * (len(request.tokens) - least)))
        except OutOfBlocksError:
            after = self.cache.stats(), lease.cached_tokens, lease.tokens, len(lease.block_table)
            assert after == before or len(leases_of(self.cache)) == 1
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
        """It evicts nothing of running or waiting requests."""
        self.cache.poll()
        kept = {copy.node.key for lease in leases_of(self.cache).values() for copy in lease.pinned if copy.resident}
        nodes = tiers_of(self.cache).nodes
        kept |= {key for key, node in nodes.items() if node.device is not None and node.device.prefetched}
        self.cache.prefetch(Request(path).path)
        assert all(nodes[key].device is not None for key in kept)

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
        for after in (other for other in PATHS if other[: len(path)] == path):
            assert not any(tiers_of(self.cache).holds(each.key) for each in Request(after).path[len(path) - 1 :])

    @precondition(lambda self: not self.engine.scheduled)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        stats = self.cache.stats()
        assert not stats.device.nodes and not stats.host.nodes and not stats.disk.nodes
        assert not stats.host.used_bytes and not stats.disk.used_bytes
        assert not [*(self.folder / "disk" / "chunks").glob("??/*.kv")]

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


def test_threads_and_a_disk(tmp_path: Path) -> None:
    """Real ones, and stats from another thread meanwhile."""
    disk = DiskSettings(tmp_path / "disk", 12 * 4096)
    cache = KnowledgeCache(SHAPE, device_blocks=8, host_blocks=8, disk=disk, identity=IDENTITY, replicate_nodes=2)
    at, ended, failed = Engine(cache), threading.Event(), []

    def look() -> None:
        while not ended.is_set():
            try:
                stats = cache.stats()
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
                cache.prefetch(Request(choice.choice(PATHS)).path)
            found = TierTokens(*map(sum, zip(found, at.serve(*path), strict=True)))
    finally:
        ended.set()
        watcher.join()
    assert not failed
    stats = cache.stats()
    assert found == (stats.device.hit_tokens, stats.host.hit_tokens, stats.disk.hit_tokens)
    assert all(found)
    assert stats.requests == 300 and stats.leases == 0
    tiers_of(cache).drain()
    check_accounts(cache)
    cache.close()
