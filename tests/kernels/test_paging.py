"""Paging: blocks with counted references, and asynchronous copies."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import itertools

from hypothesis import given
from hypothesis import strategies as st
from support.fake_streams import fake_streams

from ragorder.kernels.paging import (
    BlockPool,
    KVShape,
    LayeredPool,
    OutOfBlocksError,
    StreamTransfers,
    ThreadTransfers,
    Transfers,
    make_transfers,
)
from ragorder.kernels.paging.pool import runs

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)


def filled(blocks: int, seed: int = 0, device: str = "cpu", pinned: bool = False) -> BlockPool:
    """A pool in which no two numbers are alike."""
    pool = BlockPool(SHAPE, blocks, device, pinned=pinned)
    numbers = torch.randperm(pool.kv.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    pool.kv.copy_(numbers.view(pool.kv.shape))
    return pool


class TestTheShape:
    @pytest.mark.parametrize(
        ("dtype", "bytes"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2), (torch.float8_e4m3fn, 1)]
    )
    def test_bytes_are_those_of_keys_and_values_in_all_layers(self, dtype: Any, bytes: int) -> None:
        shape = KVShape(28, 4, 128, 16, dtype)
        assert shape.token_bytes == 28 * 2 * 4 * 128 * bytes
        assert shape.block_bytes == 16 * shape.token_bytes
        pool = BlockPool(shape, 3)
        assert pool.kv.untyped_storage().nbytes() == pool.capacity_bytes == 3 * shape.block_bytes
        assert pool.rows().shape == (3, shape.block_bytes)

    def test_blocks_cover_tokens(self) -> None:
        assert [SHAPE.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
        assert SHAPE.covering(0, 4) == range(1)
        assert SHAPE.covering(3, 2) == range(2)
        assert SHAPE.covering(8, 1) == range(2, 3)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def no_memory(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


class TestAPool:
    def test_a_block_is_one_piece_and_the_caches_are_views(self) -> None:
        pool = filled(5)
        assert pool.kv.shape == (5, 3, 2, 4, 2, 8)
        assert pool.kv[3].is_contiguous()
        for layer in range(3):
            keys, values = pool.views.key_caches[layer], pool.views.value_caches[layer]
            assert keys.shape == values.shape == (5, 4, 2, 8)
            assert torch.equal(keys[2], pool.kv[2, layer, 0])
            values[2, 1] = -1.0
            assert (pool.kv[2, layer, 1, 1] == -1.0).all()

    def test_it_begins_with_zeros(self) -> None:
        assert not BlockPool(SHAPE, 4).kv.any()

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
    def test_takes_memory_when_it_is_written_and_gives_it_back(self) -> None:
        pool = BlockPool(SHAPE, (256 << 20) // SHAPE.block_bytes)
        before = resident_bytes()
        assert not pool.kv[0].any()
        assert resident_bytes() - before < 32 << 20
        pool.kv.fill_(1)
        assert resident_bytes() - before > 200 << 20
        pool.close()
        assert resident_bytes() - before < 32 << 20

    def test_neighbours_that_were_given_back_are_taken_as_neighbours(self) -> None:
        pool = BlockPool(SHAPE, 9)
        assert pool.allocate(9) == list(range(9))
        pool.release([3, 4, 5])
        assert pool.allocate(3) == [3, 4, 5]

    def test_a_pool_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(MemoryError, match="give the pool fewer"):
            BlockPool(SHAPE, 1 << 50)

    @given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 6)), max_size=60))
    def test_it_counts_as_a_counter_does(self, steps: list[tuple[str, int]]) -> None:
        pool, model = BlockPool(SHAPE, 6), Counter[int]()
        for step, number in steps:
            if step == "allocate":
                if number <= 6 - len(model):
                    taken = pool.allocate(number)
                    assert not model.keys() & set(taken)
                    model.update(taken)
                else:
                    with pytest.raises(OutOfBlocksError):
                        pool.allocate(number)
            elif model:
                block = sorted(model)[number % len(model)]
                if step == "retain":
                    pool.retain([block])
                    model[block] += 1
                else:
                    pool.release([block])
                    model[block] -= 1
                    model = +model
            assert [pool.references(block) for block in range(6)] == [model[block] for block in range(6)]
            assert (pool.used_blocks, pool.free_blocks) == (len(model), 6 - len(model))
            assert pool.used_bytes == len(model) * SHAPE.block_bytes


class TestRuns:
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
    def test_they_are_the_pairs_and_no_two_could_be_one(self, pairs: list[tuple[int, int]]) -> None:
        found = list(runs([source for source, _ in pairs], [target for _, target in pairs]))
        assert [(source + i, target + i) for source, target, count in found for i in range(count)] == pairs
        for (source, target, count), (next_source, next_target, _) in itertools.pairwise(found):
            assert (source + count, target + count) != (next_source, next_target)


class TransfersTests:
    """What all transfers have in common. The host's pool is pinned where the other one is a GPU's."""

    device: str

    @pytest.fixture
    def transfers(self) -> Iterator[Transfers]:
        made = make_transfers(self.device)
        yield made
        made.close()

    def pools(self, into_device: bool) -> tuple[BlockPool, BlockPool]:
        pinned = self.device != "cpu"
        host, device = filled(7, 1, pinned=pinned), filled(9, 2, self.device)
        return (host, device) if into_device else (device, host)

    @pytest.mark.parametrize("into_device", [True, False])
    @pytest.mark.parametrize(
        ("source_blocks", "target_blocks"), [([0, 1, 2], [4, 5, 6]), ([6, 2, 3, 0], [1, 5, 6, 0]), ([], []), ([5], [5])]
    )
    def test_the_blocks_are_copied_and_no_others(
        self, transfers: Transfers, source_blocks: list[int], target_blocks: list[int], into_device: bool
    ) -> None:
        source, target = self.pools(into_device)
        expected, untouched = target.kv.cpu().clone(), source.kv.cpu().clone()
        expected[target_blocks] = untouched[source_blocks]
        transfer = transfers.start(source, source_blocks, target, target_blocks)
        transfer.wait()
        assert transfer.done and not transfer.failed
        assert torch.equal(target.kv.cpu(), expected)
        assert torch.equal(source.kv.cpu(), untouched)

    def test_after_a_fence_the_source_may_be_written(self, transfers: Transfers) -> None:
        host, device = self.pools(into_device=True)
        expected = device.kv[2].cpu().clone()
        transfer = transfers.start(device, [2], host, [3])
        transfer.fence()
        device.kv[2] = -1.0
        transfer.wait()
        assert torch.equal(host.kv[3], expected)

    def test_a_copy_sees_what_was_computed_before(self, transfers: Transfers) -> None:
        host, device = self.pools(into_device=True)
        for value in range(50):
            device.kv[4] = float(value)
            transfer = transfers.start(device, [4], host, [value % 7])
            transfer.fence()
        transfer.wait()
        assert [int(host.kv[block].max()) for block in range(7)] == [49, 43, 44, 45, 46, 47, 48]


class TestOnAThread(TransfersTests):
    device = "cpu"

    def test_the_caller_does_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        may_go = threading.Event()
        monkeypatch.setattr(BlockPool, "settle", lambda pool: may_go.wait())
        transfers = ThreadTransfers()
        source, target = self.pools(into_device=True)
        first = transfers.start(source, [0], target, [0])
        second = transfers.start(source, [1], target, [1])
        assert not first.done and not second.done
        may_go.set()
        second.wait()
        assert first.done
        transfers.close()

    def test_a_copy_that_fails_says_so_and_the_next_one_works(self, caplog: pytest.LogCaptureFixture) -> None:
        transfers = ThreadTransfers()
        source, target = self.pools(into_device=True)
        with caplog.at_level("ERROR", "ragorder"):
            for into, fails in ((BlockPool(KVShape(1, 1, 1, 1), 3), True), (target, False)):
                transfer = transfers.start(source, [0], into, [0])
                transfer.wait()
                assert transfer.done and transfer.failed == fails
        assert caplog.text.count("of KV failed") == 1
        transfers.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnStreams(TransfersTests):
    device = "cuda"


class TestStreamsInOrder:
    """Where there is no GPU: what the streams are told, and in which order."""

    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
        return fake_streams(monkeypatch, "in", "out")

    @pytest.mark.parametrize(("into_device", "name"), [(True, "in"), (False, "out")])
    def test_a_copy_waits_for_the_computing_stream_and_ends_with_an_event(
        self, told: list[tuple[str, ...]], into_device: bool, name: str
    ) -> None:
        host, device = filled(3, 1), filled(3, 2)
        device.device = torch.device("cuda")
        source, target = (host, device) if into_device else (device, host)
        expected = source.kv[[0, 1]].clone()
        transfer = StreamTransfers("cuda").start(source, [0, 1], target, [1, 2])
        assert told == [(name, "waits for", "compute"), ("begin", name), (name, "records"), ("end", name)]
        assert torch.equal(target.kv[1:], expected)
        del told[:]
        assert not transfer.done
        transfer.fence()
        assert told == [("compute", "waits for", f"event of {name}")]
        del told[:]
        transfer.wait()
        assert told == [("host", "waits for", f"event of {name}")]

    @pytest.mark.parametrize("into_device", [True, False])
    def test_layers_in_the_host_are_not_on_a_stream(self, told: list[tuple[str, ...]], into_device: bool) -> None:
        host, device = filled(3, 1), LayeredPool(SHAPE, 3, in_host=(1,))
        source, target = (host, device) if into_device else (device, host)
        for layer, part in enumerate(device.parts):
            part.bytes.fill_(layer + 1)
        expected = source.read([0, 1])
        device.device = torch.device("cuda")
        transfer = StreamTransfers("cuda").start(source, [0, 1], target, [1, 2])
        transfer.wait()
        assert ("host", "waits for", "event of in" if into_device else "event of out") in told
        device.device = torch.device("cpu")
        assert torch.equal(target.read([1, 2]), expected) and not transfer.failed

    def test_within_the_host_no_stream_is_asked(self, told: list[tuple[str, ...]]) -> None:
        transfers = StreamTransfers("cuda")
        source, target = filled(2, 1), filled(2, 2)
        transfers.start(source, [0], target, [1]).wait()
        assert torch.equal(target.kv[1], source.kv[0])
        assert not told
        transfers.close()
        assert told == [("host", "waits for", "in"), ("host", "waits for", "out")]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: make_transfers("mps"), "choose cuda or cpu"),
        (lambda: BlockPool(SHAPE, -1), "0 or more"),
        (lambda: BlockPool(SHAPE, 2).resize(-1), "give 0 or more"),
        (lambda: BlockPool(SHAPE, 2).retain([0]), "allocate"),
        (lambda: BlockPool(SHAPE, 2).release([0]), "free already"),
        (lambda: list(runs([1, 2], [3])), "2 blocks cannot be copied into 1"),
        *(
            (lambda name=name: replace(SHAPE, **{name: 0}), name)
            for name in ("layers", "kv_heads", "head_dim", "block_size")
        ),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


class TestResize:
    @given(st.data())
    def test_blocks_in_use_keep_contents_and_references(self, data: st.DataObject) -> None:
        pool = filled(data.draw(st.integers(1, 12)))
        held = data.draw(st.lists(st.integers(0, pool.blocks - 1), unique=True))
        pool.allocate(pool.blocks)
        pool.release([block for block in range(pool.blocks) if block not in held])
        twice = held[: len(held) // 2]
        pool.retain(twice)
        contents = {block: pool.kv[block].clone() for block in held}
        blocks = data.draw(st.integers(0, 16))
        if blocks < len(held):
            with pytest.raises(OutOfBlocksError, match="in use"):
                pool.resize(blocks)
            assert all(torch.equal(pool.kv[block], contents[block]) for block in held)
            return
        moves = pool.resize(blocks)
        assert sorted(moves) == sorted(block for block in held if block >= blocks)
        # They move to the first free blocks.
        assert sorted(moves.values()) == [block for block in range(blocks) if block not in held][: len(moves)]
        now = {block: moves.get(block, block) for block in held}
        assert len(set(now.values())) == len(held) == pool.used_blocks
        assert (pool.blocks, len(pool.kv)) == (blocks, blocks)
        for block, there in now.items():
            assert torch.equal(pool.kv[there], contents[block])
            assert pool.references(there) == 1 + (block in twice)
        assert sorted([*pool.allocate(pool.free_blocks), *now.values()]) == list(range(blocks))

    def test_without_memory_nothing_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = filled(4)
        taken = pool.allocate(2)
        before = pool.kv[taken].clone()
        monkeypatch.setattr("ragorder.kernels.paging.pool.mmap", no_memory)
        with pytest.raises(MemoryError, match="no room for 3 blocks"):
            pool.resize(3)
        assert (pool.blocks, pool.used_blocks) == (4, 2)
        assert torch.equal(pool.kv[taken], before)

    @pytest.mark.parametrize("module", ["pool", "layered"])
    def test_without_any_memory_it_is_empty_until_it_grows(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        pool = filled(4) if module == "pool" else LayeredPool(SHAPE, 4, in_host=(1,))

        def none(_: Any, blocks: int, *__: Any, **___: Any) -> Any:
            raise MemoryError(f"no room for {blocks} blocks")

        with monkeypatch.context() as patched:
            patched.setattr(f"ragorder.kernels.paging.{module}.zeros", none)
            with pytest.raises(MemoryError, match="no room for 3 blocks"):
                pool.resize(3)
            assert (pool.blocks, pool.free_blocks, len(pool.kv)) == (0, 0, 0)
            with pytest.raises(OutOfBlocksError):
                pool.allocate(1)
        assert pool.resize(2) == {}
        assert pool.allocate(2) == [0, 1]
        assert len(pool.views.key_caches[0]) == 2
