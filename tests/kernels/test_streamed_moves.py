"""Layers of an engine that streams, moved while requests run: no step waits, and no token is another one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.families import family
from support.inside import cache_of, set_bounds, streamer_of
from support.small_engine import run, tokens
from support.streamed import TOKENS, answers, ask, check_tokens, requests, room_for, saved, served_while, streaming

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.kernels.engine import Completion, TieredEngine
from ragorder.kernels.offload import LayerReadError, LayerTiers
from ragorder.pipelining.batching import Placement, Spread
from ragorder.trie.residency import TierLevel

pytestmark = pytest.mark.merge


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers."""
    return saved(family("llama", num_hidden_layers=6), tmp_path_factory.mktemp("models") / "six")


class Mover:
    """A thread that moves layers. Its reads wait for `let`, and fail once `broken`; those of steps do neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let, self.begun = threading.Semaphore(0), threading.Event()
        self.broken = False
        self._pool = ThreadPoolExecutor(1, "mover")
        read = os.preadv

        def preadv(*arguments: Any) -> int:
            if threading.current_thread().name.startswith("mover"):
                self.begun.set()
                assert self.let.acquire(timeout=60)
                if self.broken:
                    raise OSError(5, "Input/output error")
            return read(*arguments)

        monkeypatch.setattr(os, "preadv", preadv)

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        future = self._pool.submit(call)
        assert self.begun.wait(60)
        return future

    def go_on(self, reads: int = 10_000) -> None:
        for _ in range(reads):
            self.let.release()

    def close(self) -> None:
        self.go_on()
        self._pool.shutdown()


MOVING = {"max_batch_tokens": 32, "max_requests": 3}


class TestMovesWhileRequestsRun:
    @pytest.fixture(scope="class")
    def expected(self, folder: Path) -> list[list[Completion]]:
        return answers(folder, (0, 100, 200), **MOVING)

    @pytest.fixture
    def mover(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mover]:
        mover = Mover(monkeypatch)
        yield mover
        mover.close()

    def placement(self, engine: TieredEngine, device: int, host: int = 0, tokens_: int = TOKENS) -> Placement:
        kv = Spread(device=tokens_ // 16 * cache_of(engine).shape.block_bytes)
        weights = Spread(device, host, 6 - device - host)
        return Placement(weights, kv, partitions=0, batch=3, step_tokens=32, slots=0 if device == 6 else 2)

    @pytest.mark.parametrize(("device", "host"), [(3, 1), (0, 6), (6, 0)])
    @pytest.mark.parametrize("in_place", [True, False], ids=["on a CPU", "as on a GPU"])
    def test_no_step_waits_for_a_layer_that_moves(
        self, folder: Path, expected: Any, mover: Mover, device: int, host: int, in_place: bool
    ) -> None:
        settings = streaming(folder, 3, device_bytes=room_for(folder, 8), verify=False, **MOVING)
        with TieredEngine.load(folder, settings) as engine:
            engine.move_layers(LayerTiers.spread(6, 0))
            streamer_of(engine).in_place = in_place
            wanted = self.placement(engine, device, host)
            moving = mover.begin(lambda: engine.place(wanted))
            for seed, completions in zip((0, 100, 200), expected, strict=True):
                # A layer arrives in the middle of some of them, and is taken between two steps.
                found = served_while(engine, requests(seed), lambda reads=2 * (seed > 0): mover.go_on(reads))
                check_tokens(found, completions)
                # The first round is served while not one read of the move has ended.
                assert moving.done() <= (seed > 0)
            mover.go_on()
            moving.result(60)
            assert engine.placement == wanted
            check_tokens(engine.generate(requests(0)), expected[0])
            stream = engine.stats().stream
            assert (stream.moving, stream.unmoved) == (0, 0)

    @pytest.mark.parametrize("device", [4, 6])
    def test_a_layer_that_cannot_be_read_leaves_the_old_placement(
        self, folder: Path, expected: Any, mover: Mover, device: int
    ) -> None:
        settings = streaming(folder, 4, device_bytes=room_for(folder, 9), verify=False, **MOVING)
        with TieredEngine.load(folder, settings) as engine:
            mover.go_on()
            engine.place(self.placement(engine, 2))
            before = engine.placement
            mover.let = threading.Semaphore(0)
            moving = mover.begin(lambda: engine.place(self.placement(engine, device, tokens_=512)))
            mover.broken = True
            ids = [engine.add(request) for request in requests()]
            mover.go_on()
            with pytest.raises(LayerReadError, match=r"layer \d cannot be read: .*Input/output error"):
                moving.result(60)
            done = run(engine)
            check_tokens([done[each] for each in ids], expected[0])
            stream = engine.stats().stream
            assert engine.placement == before
            assert (stream.moving, stream.unmoved) == (0, 1)
            mover.broken = False
            engine.place(self.placement(engine, device))
            assert engine.placement == self.placement(engine, device)

    def test_a_shortage_ends_a_move(self, folder: Path, expected: Any, mover: Mover) -> None:
        settings = streaming(folder, 4, device_bytes=room_for(folder, 9), verify=False, **MOVING)
        with TieredEngine.load(folder, settings) as engine:
            engine.move_layers(LayerTiers.spread(6, 0))
            moving = mover.begin(lambda: engine.place(self.placement(engine, 4)))
            threading.Timer(0.05, mover.go_on).start()
            while engine.relieve():
                pass
            with pytest.raises(MemoryError, match="memory ran short while layers moved"):
                moving.result(60)
            assert engine.stats().stream.device_layers == 0
            check_tokens(engine.generate(requests()[2:3]), expected[0][2:3])

    def test_layers_make_way_for_a_request_that_a_smaller_pool_has_no_room_for(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, streamed_steps_to_grow=2)
        with TieredEngine.load(folder, streaming(folder, 6, verify=False)) as engine:
            placed = self.placement(engine, 4, tokens_=128)
            engine.place(placed)
            [found] = engine.generate([ask([], tokens(300, 1))])
            assert found.finish_reason == "length", found.error
            assert engine.device_tokens > 300 and engine.placement.weights.device < 4
            # Both return.
            engine.generate([ask([], tokens(9, 1), max_tokens=30)])
            assert engine.placement == placed

    def test_the_end_of_the_engine_ends_a_move(self, folder: Path, mover: Mover) -> None:
        engine = TieredEngine.load(folder, streaming(folder, 4))
        engine.move_layers(LayerTiers.spread(6, 0))
        moving = mover.begin(lambda: engine.move_layers(LayerTiers.spread(6, 1)))
        threading.Timer(0.05, mover.go_on).start()
        engine.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            moving.result(60)

    def test_a_thread_that_moves_layers_has_its_turn_between_steps(self, folder: Path) -> None:
        """However fast the next step follows."""
        with TieredEngine.load(folder, streaming(folder, 4)) as engine, ThreadPoolExecutor(1) as pool:
            engine.move_layers(LayerTiers.spread(6, 0))
            engine.add(ask([], tokens(9, 1), max_tokens=200))
            moving = pool.submit(engine.move_layers, LayerTiers.spread(6, 1))
            while not moving.done() and engine.has_unfinished:
                engine.step()
            assert engine.has_unfinished
            assert moving.result(60).count(TierLevel.DEVICE) == 1
