"""The embedded engine on a model that streams: answers are those of the whole model, bit for bit."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.families import STREAMED, family, make_model
from support.inside import (
    ALLOCATE,
    cache_of,
    counters_of,
    model_of,
    scheduler_of,
    set_bounds,
    streamer_of,
)
from support.rings import grid
from support.small_engine import run, tokens
from support.streamed import (
    STEP,
    TOKENS,
    answers,
    ask,
    check_same,
    check_tokens,
    requests,
    room_for,
    saved,
    streaming,
    whole,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import Completion, EngineSettings, ModelLoadError, TieredEngine, UnsupportedModelError
from ragorder.kernels.models.identity import identity
from ragorder.kernels.offload import LayerTiers
from ragorder.kernels.paging import BlockPool, OutOfBlocksError
from ragorder.pipelining.batching import Placement, PlacementError, Spread
from ragorder.trie.residency import TierLevel

pytestmark = pytest.mark.merge


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers."""
    return saved(family("llama", num_hidden_layers=6), tmp_path_factory.mktemp("models") / "six")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers."""
    return saved(family("llama"), tmp_path_factory.mktemp("models") / "three")


class TestAnswers:
    @pytest.mark.parametrize("name", grid(list(STREAMED), 5))
    def test_are_those_of_the_whole_model_on_every_family(self, name: str, tmp_path: Path) -> None:
        folder = saved(family(name), tmp_path / "model", max_shard_size="100KB")
        expected = answers(folder)
        with TieredEngine.load(folder, streaming(folder, 2)) as engine:
            assert engine.stats().stream.disk_layers == 3
            for seed, completions in zip((0, 0, 50), expected, strict=True):
                check_same(engine.generate(requests(seed)), completions)
            stream = engine.stats().stream
            assert stream.bytes > 0 and stream.hits + stream.waits > 0

    @pytest.mark.parametrize(("layers", "host"), [(1, 0), (2, 1 << 20), (4, 1 << 20), (5, 0), (9, 1 << 20)])
    def test_are_the_same_with_any_budget(self, layers: int, host: int, folder: Path) -> None:
        expected = answers(folder)
        with TieredEngine.load(folder, streaming(folder, layers, host_bytes=host)) as engine:
            stream = engine.stats().stream
            placed = (stream.device_layers, stream.host_layers, stream.disk_layers)
            assert sum(placed) == 6
            assert (placed == (6, 0, 0)) == (layers == 9)
            # A megabyte holds all.
            assert (stream.host_layers > 0) == (host > 0 and layers < 9)
            for seed, completions in zip((0, 0, 50), expected, strict=True):
                check_same(engine.generate(requests(seed)), completions)

    def test_to_prompts_longer_than_a_step_are_the_same_in_steps_of_the_same_size(self, small_folder: Path) -> None:
        step = 16
        long = [ask([tokens(5 * step, 1), tokens(step, 2)], tokens(7, 3)), ask([], tokens(3 * step + 1, 4))]
        same = {"max_batch_tokens": step, "dtype": "bfloat16", "max_requests": 8}
        with TieredEngine.load(small_folder, whole(**same)) as engine:
            expected = engine.generate(long)
        with TieredEngine.load(small_folder, streaming(small_folder, 2, **same)) as engine:
            assert engine.placement.step_tokens == step
            check_same(engine.generate(long), expected)


def test_engines_can_be_loaded_by_several_threads(tmp_path: Path) -> None:
    """transformers disables tied weights while it loads: left so, each later model would lack some."""
    folder = saved(family("qwen2-tied"), tmp_path)
    expected = answers(folder)

    def load(number: int) -> list[Completion]:
        with TieredEngine.load(folder, streaming(folder, 2) if number % 2 else whole()) as engine:
            return engine.generate(requests())

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(load, range(12)):
            check_same(found, expected[0])


class TestStream:
    def test_reads_each_layer_once_a_step_and_ahead_of_its_use(self, folder: Path) -> None:
        with TieredEngine.load(folder, streaming(folder, 3, verify=False)) as engine:
            streamer = streamer_of(engine)
            streamer.room = None
            engine.move_layers(LayerTiers.spread(6, 0))
            engine.generate([ask([], tokens(9, 1), max_tokens=1)])
            before, steps = streamer.stats, engine.stats().steps
            engine.generate([ask([], tokens(9, 1), max_tokens=8)])
            after, steps = streamer.stats, engine.stats().steps - steps
            assert steps == 8
            assert after.hits + after.waits - before.hits - before.waits == 6 * steps
            layer = streamer.store.stored_bytes(0)
            # Layers that are ahead when the requests begin and end are counted at most once.
            assert 6 * steps - 3 <= (after.bytes - before.bytes) / layer <= 6 * steps + 3

    def test_is_deeper_in_small_steps(self, tmp_path: Path) -> None:
        """Few slots in prefill, many in decoding (RAGDoll 4.3)."""
        folder = saved(family("llama", num_hidden_layers=12, hidden_size=32, head_dim=8), tmp_path / "model")
        with TieredEngine.load(folder, streaming(folder, 3, verify=False)) as engine:
            streamer = streamer_of(engine)
            size = streamer.store.slot_bytes
            streamer.room = lambda count: (2 if count > 8 else 7) * size
            streamer.resize(2)
            slots = []
            engine.add(ask([], tokens(STEP - 1, 1), max_tokens=9))
            while engine.has_unfinished:
                engine.step()
                slots.append(streamer.slots)
            assert slots[0] == 2 and slots[-1] == 7
            engine.add(ask([], tokens(STEP - 1, 2), max_tokens=1))
            engine.step()
            assert streamer.slots == 2

    def test_finds_the_kv_that_the_whole_model_left_on_the_disk(self, small_folder: Path, tmp_path: Path) -> None:
        disk = {"disk_path": tmp_path / "kv", "disk_bytes": 1 << 24, "device_tokens": 256}
        request = ask([tokens(100, 1)], tokens(9, 2))
        with TieredEngine.load(small_folder, whole(**disk)) as engine:
            [expected] = engine.generate([request])
            for seed in range(4):
                engine.generate([ask([tokens(200, 10 + seed)], tokens(9, 2), max_tokens=1)])
            name = identity(*model_of(engine))
        with TieredEngine.load(small_folder, streaming(small_folder, 2, **disk)) as engine:
            [found] = engine.generate([request])
            assert (found.cached, found.token_ids) == ((0, 0, 100), expected.token_ids)
        other = saved(make_model("Llama", seed=1), tmp_path / "other")
        with TieredEngine.load(other, streaming(other, 2, **disk)) as engine:
            [found] = engine.generate([request])
            assert found.cached.total == 0
            stored = dict(streamer_of(engine).store.parameters("model.layers"))
            assert identity(*model_of(engine), stored) != name


class TestFaults:
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[TieredEngine]:
        folder = saved(family("llama", num_hidden_layers=6), tmp_path / "model")
        with TieredEngine.load(folder, streaming(folder, 2)) as engine:
            engine.move_layers(LayerTiers.spread(6, 0))
            yield engine

    def test_of_the_disk_are_errors_of_the_step_and_the_engine_goes_on(
        self, engine: TieredEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        expected = engine.generate(requests())
        read = os.preadv
        broken = True

        def preadv(*arguments: Any) -> int:
            if broken:
                raise OSError(5, "Input/output error")
            return read(*arguments)

        monkeypatch.setattr(os, "preadv", preadv)
        ids = [engine.add(request) for request in requests()]
        done: dict[int, Completion] = {}
        with caplog.at_level(logging.DEBUG, "ragorder"):
            while engine.has_unfinished:
                for update in engine.step():
                    if update.completion is not None:
                        assert update.request_id not in done
                        done[update.request_id] = update.completion
                        broken = False
        failed = [done[each] for each in ids if done[each].finish_reason == "error"]
        assert failed
        for completion in failed:
            for said in (" cannot be read: ", "model.safetensors", "Input/output error"):
                assert said in completion.error
        check_tokens(engine.generate(requests()), expected)

    def test_of_the_disk_that_pass_end_no_request_and_lose_nothing_that_is_cached(
        self, engine: TieredEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = engine.generate(requests())
        read, before = os.preadv, engine.stats()
        counters = counters_of(engine)

        def preadv(*arguments: Any) -> int:
            # However many reads are under way in a step, and however often each is tried: two steps fail.
            if counters.failed_steps < before.failed_steps + 2:
                raise OSError(5, "Input/output error")
            return read(*arguments)

        monkeypatch.setattr(os, "preadv", preadv)
        again = engine.generate(requests())
        check_tokens(again, expected)
        assert engine.stats().failed_steps >= before.failed_steps + 2 and engine.stats().retries > before.retries
        assert again[0].cached.device == 71

    def test_of_a_file_that_is_cut_short_name_it(self, engine: TieredEngine) -> None:
        file = next(iter(streamer_of(engine).store.checkpoint.entries.values())).file
        whole_file = file.read_bytes()
        stat = file.stat()
        os.truncate(file, 3000)
        [failed] = engine.generate([ask([tokens(40, 2)], tokens(9, 1))])
        assert failed.finish_reason == "error"
        assert "has changed since the model was loaded" in failed.error
        file.write_bytes(whole_file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        [served] = engine.generate([ask([tokens(40, 2)], tokens(9, 1))])
        # The failed steps computed nothing that others may use.
        assert served.finish_reason == "length" and not served.cached.total


def without_blocks(engine: TieredEngine, patch: pytest.MonkeyPatch, steps: int) -> None:
    """Have so many steps find no blocks."""
    plan, left = scheduler_of(engine).plan, [OutOfBlocksError("none") for _ in range(steps)]

    def planned() -> Any:
        if left:
            raise left.pop()
        return plan()

    patch.setattr(scheduler_of(engine), "plan", planned)


class TestPoolsAndRelief:
    @pytest.fixture(scope="class")
    def expected(self, folder: Path) -> list[Completion]:
        return answers(folder, (0,))[0]

    @pytest.mark.parametrize("unfinished", [False, True], ids=["idle", "while requests run"])
    def test_a_placement_moves_layers_and_pools_and_changes_no_answer(
        self, folder: Path, expected: Any, unfinished: bool
    ) -> None:
        with TieredEngine.load(folder, streaming(folder, 5, device_bytes=room_for(folder, 8))) as engine:
            token, block = cache_of(engine).shape.block_bytes // 16, cache_of(engine).shape.block_bytes
            for device, host, tokens_ in ((1, 2, 4096), (4, 0, 512), (0, 0, 512)):
                ids = [engine.add(request) for request in requests()] if unfinished else []
                if unfinished:
                    engine.step()
                kv, weights = Spread(device=tokens_ * token, host=10 * block), Spread(device, host, 6 - device - host)
                engine.place(Placement(weights, kv, partitions=0, batch=4, step_tokens=STEP, slots=2))
                stream = engine.stats().stream
                assert (stream.device_layers, stream.host_layers, stream.slots) == (device, host, 2)
                assert engine.device_tokens == tokens_
                assert engine.stats().cache.host.capacity_bytes == 10 * block
                done = run(engine)
                found = [done[each] for each in ids] if unfinished else engine.generate(requests())
                check_tokens(found, expected)

    def test_relief_gives_steps_then_kv_then_layers_and_says_when_nothing_is_left(
        self, folder: Path, expected: Any
    ) -> None:
        settings = streaming(folder, 5, max_batch_tokens=4 * STEP, host_bytes="1MiB", device_bytes=room_for(folder, 8))
        with TieredEngine.load(folder, settings) as engine:
            streamer, scheduler = streamer_of(engine), scheduler_of(engine)
            ids = [engine.add(request) for request in requests()]
            engine.step()
            seen = []
            while engine.relieve():
                kept = len(streamer.store) - len(streamer.streamed)
                seen.append((scheduler.step_tokens, engine.device_tokens, kept, streamer.slots))
                assert len(seen) < 100
            # Each stage begins when the one before has nothing left to give.
            steps, pools, kept_, slots = zip(*seen, strict=True)
            assert steps[-1] == 1 and kept_[-1] == 0 and slots[-1] == 1
            assert list(pools) == sorted(pools, reverse=True) and list(kept_) == sorted(kept_, reverse=True)
            first_pool = next(place for place, each in enumerate(pools) if each < TOKENS)
            first_layer = next(place for place, each in enumerate(kept_) if each < kept_[0])
            assert steps[first_pool] == STEP
            assert pools[first_layer] == pools[-1] < TOKENS
            done = run(engine)
            check_tokens((done[each] for each in ids), expected)
            assert engine.device_tokens >= max(len(each.token_ids) for each in requests())

    def test_layers_make_way_for_a_request_without_blocks(
        self, folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with TieredEngine.load(folder, streaming(folder, 6)) as engine:
            without_blocks(engine, monkeypatch, steps=2)
            before, streamer = engine.device_tokens, streamer_of(engine)
            kept = streamer.stats.device_layers
            found = engine.generate(requests())
            assert engine.device_tokens > before
            assert streamer.stats.device_layers < kept
            check_tokens(found, expected)

    def test_the_first_layer_that_makes_way_for_a_request_takes_no_blocks_from_it(
        self, folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Three buffers of a ring come in its place."""
        with TieredEngine.load(folder, streaming(folder, 5)) as engine:
            assert engine.stats().stream.slots == 3
            assert engine.move_layers(LayerTiers.spread(6, 6)).count(TierLevel.DEVICE) == 6
            without_blocks(engine, monkeypatch, steps=1)
            check_same(engine.generate(requests()), expected)
            assert engine.device_tokens == TOKENS
            assert engine.stats().stream.disk_layers == 1

    def test_what_was_given_back_returns_after_many_steps(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = answers(folder, range(0, 400, 100))
        set_bounds(monkeypatch, streamed_steps_to_grow=2)
        with TieredEngine.load(folder, streaming(folder, 5)) as engine:
            streamer = streamer_of(engine)
            placed = streamer.residency
            assert placed.count(TierLevel.DEVICE) == 2 and streamer.slots == 3
            while engine.relieve():
                pass
            assert engine.device_tokens < TOKENS and len(streamer.streamed) == 6 and streamer.slots == 1
            # More than the pool has: it grows for the request.
            engine.generate([ask([], tokens(400, 1))])
            assert engine.device_tokens >= 400
            for seed, completions in zip(range(0, 400, 100), expected, strict=True):
                check_tokens(engine.generate(requests(seed)), completions)
            assert engine.device_tokens == TOKENS
            assert streamer.residency == placed
            # Layers are read ahead again, as far as a small step leaves room.
            assert streamer.slots > 3

    def test_layers_stay_where_they_were_moved_to(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, streamed_steps_to_grow=2)
        with TieredEngine.load(folder, streaming(folder, 5)) as engine:
            streamer = streamer_of(engine)
            assert streamer.residency.count(TierLevel.DEVICE) == 2
            for wanted in (LayerTiers.spread(6, 0), LayerTiers.spread(6, 1)):
                assert engine.move_layers(wanted) == wanted
                engine.generate([ask([], tokens(9, 1), max_tokens=12)])
                assert streamer.residency == wanted
            # After a shortage they come back there.
            while engine.relieve():
                pass
            assert not streamer.residency.count(TierLevel.DEVICE)
            engine.generate([ask([], tokens(9, 1), max_tokens=30)])
            assert streamer.residency == wanted

    def test_a_resize_that_fails_leaves_pools_of_the_sizes_that_they_had(self, folder: Path, expected: Any) -> None:
        with TieredEngine.load(folder, whole(host_bytes=1 << 20)) as engine:
            host = engine.stats().cache.host.capacity_bytes
            for wrong, error, message in (
                ({"device_tokens": 128, "host_bytes": 1 << 60}, MemoryError, "no room"),
                ({"device_tokens": 128, "host_bytes": -1}, ValueError, "host_bytes is -1: give 0 or more"),
                ({"device_tokens": 15}, ValueError, r"device_tokens is 15: give 16 \(one block\)"),
            ):
                with pytest.raises(error, match=message):
                    engine.resize(**wrong)
                stats = engine.stats().cache
                assert (engine.device_tokens, stats.host.capacity_bytes) == (TOKENS, host)
                assert stats.device.capacity_bytes == cache_of(engine).shape.block_bytes * TOKENS // 16
            check_same(engine.generate(requests()), expected)
            [long] = engine.generate([ask([], tokens(500, 9))])
            assert long.finish_reason == "length", long.error

    def test_a_resize_that_fails_where_the_pool_was_lost_names_the_memory(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And does not complain of the size of the pool that there was before."""
        with TieredEngine.load(folder, whole(host_bytes=1 << 20)) as engine:
            pool, make = cache_of(engine).pool, getattr(BlockPool, ALLOCATE)

            def none(each: BlockPool, blocks: int) -> Any:
                if blocks:
                    raise MemoryError("taken")
                return make(each, blocks)

            with monkeypatch.context() as short, pytest.raises(MemoryError, match="taken"):
                short.setattr(BlockPool, ALLOCATE, none)
                cache_of(engine).replace_device(4)
            assert pool.blocks == 0
            with pytest.raises(MemoryError, match="no room"):
                engine.resize(device_tokens=128, host_bytes=1 << 60)
            [found] = engine.generate([ask([], tokens(500, 1))])
            assert found.finish_reason == "length", found.error

    def test_memory_that_cannot_be_taken_again_loses_no_token(
        self, folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, streamed_steps_to_grow=1)
        attempts: list[LayerTiers] = []

        def broken(residency: LayerTiers) -> bool:
            attempts.append(residency)
            raise RuntimeError("CUDA error: unknown")

        with TieredEngine.load(folder, streaming(folder, 5)) as engine:
            monkeypatch.setattr(streamer_of(engine), "regain", broken)
            check_same(engine.generate(requests()), expected)
        assert attempts


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return saved(family("llama"), tmp_path / "model")

    def test_budgets_below_one_layer_and_one_request(self, folder: Path) -> None:
        enough = room_for(folder, 1)
        with pytest.raises(PlacementError) as refused:
            TieredEngine.load(folder, streaming(folder, 1, device_bytes=enough // 2))
        text = str(refused.value)
        assert "bytes are missing" in text and "one layer" in text and "one request of 1024 tokens" in text
        least = int(text.split("and ")[1].split(" bytes")[0]) + enough // 2
        with TieredEngine.load(folder, streaming(folder, 1, device_bytes=least + 64 * 512)) as engine:
            assert engine.generate([ask([], tokens(9, 1))])[0].finish_reason == "length"

    def test_quantised_weights_folders_without_weights_and_models_in_memory(self, folder: Path) -> None:
        settings, file = streaming(folder, 1, device_bytes="1GiB"), folder / "config.json"
        with pytest.raises(ValueError, match=r"use TieredEngine\.load"):
            TieredEngine(family("llama"), settings=settings)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelLoadError, match=r"has no weights that can be streamed"):
            TieredEngine.load(folder, settings)
        quantised = json.loads(file.read_text("utf-8")) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        file.write_text(json.dumps(quantised), "utf-8")
        with pytest.raises(
            UnsupportedModelError, match=r"are quantised \(gptq\).* cannot stream.*--for vllm\|llama\.cpp"
        ):
            TieredEngine.load(folder, settings)

    def test_placements_of_another_model_or_of_one_that_does_not_stream(self, folder: Path) -> None:
        placement = Placement(Spread(5), Spread(device=1 << 20), partitions=0, batch=1, step_tokens=STEP)
        for settings, said in (
            (streaming(folder, 2), "has 5 layers, but the model has 3"),
            (whole(), "load the engine with"),
        ):
            with TieredEngine.load(folder, settings) as engine:
                with pytest.raises(ValueError, match=said):
                    engine.place(placement)
                with pytest.raises(ValueError, match=said):
                    engine.move_layers(LayerTiers.spread(5, 1))

    @pytest.mark.parametrize("size", ["-6GiB", "six", "0", -1, 1.5])
    def test_impossible_sizes(self, size: Any) -> None:
        for name in ("device_bytes", "disk_bytes", "disk_backlog_bytes"):
            with pytest.raises(ValueError, match=f"{name}"):
                EngineSettings(**{name: size})

    @pytest.mark.parametrize(("size", "count"), [("6GiB", 6 << 30), ("1.5 MB", 1_500_000), ("4096", 4096), (17, 17)])
    def test_sizes_are_text_or_numbers(self, size: Any, count: int) -> None:
        settings = EngineSettings(device_bytes=size, host_bytes=size, disk_bytes=size)
        assert (settings.device_bytes, settings.host_bytes, settings.disk_bytes) == (count, count, count)


@pytest.mark.parametrize("room", [True, False], ids=["after it was closed", "that has no room for its model"])
def test_an_engine_leaves_no_threads_and_files(room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(family("llama"), tmp_path / "model")

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("x")

    if room:
        engine = TieredEngine.load(folder, streaming(folder, 2))
        engine.generate([ask([], tokens(9, 1))])
        engine.close()
    else:
        monkeypatch.setattr(transformers.PreTrainedModel, "to", full)
        with pytest.raises(torch.OutOfMemoryError):
            TieredEngine.load(folder, streaming(folder, 2))
    assert not [each.name for each in threading.enumerate() if each.name.startswith("ragorder-layer")]
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert not [each for each in opened if each.startswith(str(folder))]
