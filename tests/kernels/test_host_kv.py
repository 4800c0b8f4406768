"""The KV of running requests in host memory: answers are those of the whole model, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.families import family
from support.inside import cache_of
from support.streamed import TOKENS, answers, check_same, requests, room_for, saved, served_while, streaming, whole

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import TieredEngine
from ragorder.kernels.paging import BlockPool, KVShape, LayeredPool, StepBlocks, ThreadTransfers
from ragorder.pipelining.placement.fit import PlacementError

LAYERS = 6
DTYPES = ("float32", "bfloat16", "float16")
SHAPE = KVShape(layers=5, kv_heads=2, head_dim=8, block_size=4)


def numbered(pool: BlockPool, seed: int) -> Any:
    """Fill the pool; return its contents."""
    numbers = torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(seed))
    plain = BlockPool(SHAPE, pool.blocks)
    plain.kv.copy_(numbers)
    transfers = ThreadTransfers()
    transfers.start(plain, range(pool.blocks), pool, range(pool.blocks)).wait()
    transfers.close()
    return numbers


def copying(blocks: int, in_host: Sequence[int]) -> LayeredPool:
    """As on a GPU: layers in host memory have to be copied."""
    pool = LayeredPool(SHAPE, blocks)
    pool.in_place = False
    for layer in in_host:
        pool.move(layer, to_host=True)
    return pool


class TestPool:
    @pytest.mark.parametrize("in_host", [(2,), (0, 1, 3, 4), (0, 1, 2, 3, 4)])
    def test_a_step_has_its_blocks_and_gives_back_those_that_it_wrote(self, in_host: Sequence[int]) -> None:
        pool = copying(9, in_host)
        expected = numbered(pool, 2)
        pool.allocate(9)
        for _ in range(3):
            step = StepBlocks([0, 1, 4, 5, 8], [4, 8])
            for layer in range(SHAPE.layers):
                with pool.supplied(layer, step):
                    views = pool.views
                    keys, values = views.key_caches[layer], views.value_caches[layer]
                    assert torch.equal(keys[step.read], expected[step.read, layer, 0])
                    assert torch.equal(values[step.read], expected[step.read, layer, 1])
                    # The row of a token is the same in all layers.
                    row = 8 * pool.block_rows + 3
                    views.key_rows[layer][row] += 1
                    views.value_rows[layer][4 * pool.block_rows] += 2
            expected[8, :, 0, 3] += 1
            expected[4, :, 1, 0] += 2
            assert torch.equal(pool.kv, expected)

    def test_a_step_that_fails_leaves_what_was_written(self) -> None:
        pool = copying(4, (0, 1, 2, 3))
        expected = numbered(pool, 3)
        pool.allocate(4)
        with pytest.raises(MemoryError), pool.supplied(1, StepBlocks([0, 2], [2])):
            pool.views.key_caches[1][2] = 7
            raise MemoryError
        assert torch.equal(pool.kv, expected)
        with pool.supplied(1, StepBlocks([0, 2], [2])):
            assert torch.equal(pool.views.key_caches[1][[0, 2]], expected[[0, 2], 1, 0])

    def test_without_blocks_all_in_use_are_read(self) -> None:
        pool = copying(4, (0, 1, 2, 3, 4))
        expected = numbered(pool, 4)
        used = pool.allocate(3)
        for layer in (4, 0, 2, 2):
            with pool.supplied(layer):
                assert torch.equal(pool.views.value_caches[layer][used], expected[used, layer, 1])

    def test_takes_memory_of_the_device_for_buffers_alone(self) -> None:
        in_place, copied = LayeredPool(SHAPE, 4), copying(4, range(5))
        in_place.move(0, to_host=True)
        assert not in_place.copied and copied.copied
        assert len({each.data_ptr() for each in in_place.views.key_caches}) == 5
        assert len({each.data_ptr() for each in copied.views.key_caches}) == 2

    def test_without_memory_nothing_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = copying(4, (1,))
        expected = numbered(pool, 5)

        def no_memory(*_: Any, **__: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr("ragorder.kernels.paging.pool.mmap", no_memory)
        for layer, to_host in ((2, True), (1, False)):
            with pytest.raises(MemoryError):
                pool.move(layer, to_host=to_host)
        assert pool.in_host == (1,) and torch.equal(pool.kv, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(family("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("models") / "model")


def loaded(folder: Path, *, in_place: bool, **settings: Any) -> TieredEngine:
    engine = TieredEngine.load(folder, streaming(folder, 3, verify=False, **settings))
    pool = cache_of(engine).pool
    assert isinstance(pool, LayeredPool)
    pool.in_place = in_place
    return engine


def move(engine: TieredEngine, kv_host_layers: int) -> None:
    engine.place(replace(engine.placement, kv_host_layers=kv_host_layers))
    assert engine.placement.kv_host_layers == kv_host_layers


@pytest.mark.parametrize("in_place", [True, False], ids=["on a CPU", "as on a GPU"])
class TestAnswers:
    @pytest.mark.parametrize(
        "options",
        [*({"dtype": dtype} for dtype in DTYPES), {"reuse": "fused", "select": "query", "select_rounds": 2}],
        ids=[*DTYPES, "documents reused anywhere"],
    )
    def test_are_those_of_the_whole_model(self, folder: Path, in_place: bool, options: dict[str, Any]) -> None:
        """With prefixes shared in one step and later, and a prompt of several steps."""
        seeds = (0, 0, 50)
        expected = answers(folder, seeds, **options)
        with loaded(folder, in_place=in_place, **options) as engine:
            for seed, completions, in_host in zip(seeds, expected, (1, LAYERS, 4), strict=True):
                move(engine, in_host)
                check_same(engine.generate(requests(seed)), completions)
            assert engine.stats().cached.device > 0

    def test_are_the_same_after_moves_while_requests_ran(self, folder: Path, in_place: bool) -> None:
        seeds, random = range(0, 500, 100), Random(1)
        expected = answers(folder, seeds)
        with loaded(folder, in_place=in_place) as engine:
            for seed, completions in zip(seeds, expected, strict=True):
                found = served_while(engine, requests(seed), lambda: move(engine, random.randrange(LAYERS + 1)))
                check_same(found, completions)

    def test_are_the_same_with_tiers_below_and_a_pool_too_small(
        self, folder: Path, in_place: bool, tmp_path: Path
    ) -> None:
        """Documents leave the pool and come back, and running requests make way for others."""
        seeds = (0, 10, 20, 0, 10)
        asked = [
            [replace(each, sampling=replace(each.sampling, max_tokens=40, temperature=0.0)) for each in requests(seed)]
            for seed in seeds
        ]
        with TieredEngine.load(folder, whole()) as engine:
            expected = [[each.token_ids for each in engine.generate(some)] for some in asked]
        tiers = {"device_tokens": 320, "host_bytes": "100KiB", "disk_path": tmp_path / "kv", "disk_bytes": 1 << 22}
        with loaded(folder, in_place=in_place, **tiers) as engine:
            for some, token_ids, in_host in zip(asked, expected, (3, 6, 4, 5, 0), strict=True):
                move(engine, in_host)
                assert [each.token_ids for each in engine.generate(some)] == token_ids
            stats = engine.stats()
            assert stats.preemptions and stats.cached.host + stats.cached.disk


class TestStart:
    def test_puts_in_the_host_what_does_not_fit_on_the_device(self, folder: Path) -> None:
        expected = answers(folder, (0,))
        small = room_for(folder, 3, tokens=512)
        with TieredEngine.load(folder, streaming(folder, 3, device_bytes=small, host_bytes="4MiB")) as engine:
            placed = engine.placement
            assert engine.device_tokens == TOKENS
            assert 0 < placed.kv_host_share < 1 and placed.slots == 3
            assert engine.stats().stream.kv_host_layers == placed.kv_host_layers
            check_same(engine.generate(requests()), expected[0])
        with TieredEngine.load(folder, streaming(folder, 3)) as engine:
            assert engine.placement.kv_host_share == 0

    def test_without_room_in_the_host_it_says_what_is_missing(self, folder: Path) -> None:
        with pytest.raises(PlacementError, match=r"device_bytes is \d+, and \d+ bytes are missing"):
            TieredEngine.load(
                folder, streaming(folder, 3, device_bytes=room_for(folder, 1, tokens=64), host_bytes=1000)
            )
