"""The disk tier in vLLM's own tiering, without an engine: what leaves host memory comes back, right, or not at all."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgspec").msgpack

from support.event_server import contents_of
from support.inside import chunk_file, is_closing, store_of, threads_of

from ragorder.adapters.vllm.kv_events import EventCounters, EventReader
from ragorder.adapters.vllm_tiers import TierSettings
from ragorder.adapters.vllm_tiers.disk_identity import disk_identity, note_model
from ragorder.adapters.vllm_tiers.disk_jobs import ChunkJob, JobThreads
from ragorder.trie.residency import TierLevel
from ragorder.trie.residency.blocks import EngineBlocks

pytestmark = pytest.mark.vllm

CHUNK_TOKENS = 32
CHUNK_BYTES = 8192
ON_DISK = CHUNK_BYTES + 4096
PLENTY = 1000 * ON_DISK
DISK, HOST = "disk", "host"


@cache
def vllm() -> SimpleNamespace:
    """The parts of vLLM that tiers are made of, and ours. Importing them takes seconds."""
    pytest.importorskip("vllm")
    from vllm.distributed import kv_events
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events
    from vllm.v1.kv_offload import base, config
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from ragorder.adapters.vllm_tiers.spec import TierSpec

    return SimpleNamespace(
        **(vars(kv_events) | vars(events) | vars(config) | vars(base)), TierSpec=TierSpec, TransferJob=TransferJob
    )


def content(key: bytes) -> bytes:
    """A chunk's KV: bytes that no other key has."""
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


def chunks(prompt: str) -> list[bytes]:
    """The keys of a prompt in which each letter is a chunk: as vLLM's, they depend on all before them."""
    return [
        vllm().make_offload_key(hashlib.sha256(prompt[: end + 1].encode()).digest(), 0) for end in range(len(prompt))
    ]


class Engine:
    """vLLM's scheduler and worker, as the tiers see them: asks for a prompt's chunks, and computes the others."""

    def __init__(
        self,
        model: Path,
        disk: Path,
        *,
        host_chunks: int = 4,
        disk_bytes: int = PLENTY,
        dtype: str = "bfloat16",
        block_tokens: int = CHUNK_TOKENS,
        events: bool = False,
        dp: tuple[int, int] = (0, 1),
    ) -> None:
        settings = TierSettings(host_bytes=host_chunks * CHUNK_BYTES, disk_path=disk, disk_bytes=disk_bytes)
        extra = settings.kv_transfer_config()["kv_connector_extra_config"]
        extra["secondary_tiers"][0]["enable_kv_events"] = events
        self.config = vllm().OffloadingConfig(
            groups=(vllm().OffloadingGroupConfig(block_tokens, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=events,
            extra_config=extra,
            engine_id=uuid.uuid4().hex,
            model=vllm().OffloadingModelConfig(str(model), dtype),
            cache=vllm().OffloadingCacheConfig(block_tokens, 1),
            parallel=vllm().OffloadingParallelConfig(0, 1, 1, 1, 1, 1, *dp, None, False),
            kv_cache_layout="NHD",
        )
        self.manager: Any = vllm().TierSpec(self.config).get_manager()
        (self.disk,) = self.manager.secondary_tiers
        self.host: Any = self.manager.primary_tier
        self.requests = 0
        self.closed = False
        self.stats: dict[tuple[str, tuple[str, ...]], float] = {}

    def request(self, prompt: str) -> tuple[Any, list[bytes]]:
        self.requests += 1
        context, keys = vllm().ReqContext(req_id=str(self.requests)), chunks(prompt)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, (place + 1) * CHUNK_TOKENS)
        self.manager.on_new_request(context)
        return context, keys

    def step(self) -> None:
        self.manager.on_schedule_end(vllm().ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def look_up(self, context: Any, keys: Sequence[bytes]) -> int:
        """How many chunks from the first are in host memory, after whatever had to come from disk has."""
        for _ in range(1000):
            found = []
            for key in keys:
                found.append(self.manager.lookup(key, context))
                if found[-1] is vllm().LookupResult.MISS:
                    break
            if vllm().LookupResult.HIT_PENDING not in found:
                return found.count(vllm().LookupResult.HIT)
            self.step()
            self.disk.drain_jobs()
        raise AssertionError("the request waits for ever")

    def serve(self, prompt: str) -> list[str]:
        """Where the prompt's chunks came from; those that are missing at the end were computed."""
        context, keys = self.request(prompt)
        hits = self.look_up(context, keys)
        sources = [self.manager.get_load_source(key, context).value for key in keys[:hits]]
        if hits:
            spec = self.manager.prepare_load(keys[:hits], context)
            for key, place in zip(keys, spec.block_ids, strict=False):
                assert bytes(self.row(place)) == content(key)
            self.manager.complete_load(keys[:hits], context)
        stored = self.manager.prepare_store(keys[hits:], context)
        if stored is not None and stored.keys_to_store:
            for key, place in zip(stored.keys_to_store, stored.store_spec.block_ids, strict=True):
                self.row(place)[:] = content(key)
            self.manager.complete_store(stored.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step()
        self.disk.drain_jobs()
        self.step()
        self.observe()
        return sources

    def row(self, place: int) -> memoryview:
        start = int(place) * CHUNK_BYTES
        return self.host.get_kv_memoryview().cast("B")[start : start + CHUNK_BYTES]

    def observe(self) -> None:
        """Collect the metrics as the engine's own loop does, and see that all of them were declared."""
        declared = vllm().TierSpec.build_metric_definitions(self.config.extra_config)
        stats = self.manager.get_stats()
        for name, values in stats.data["data"].items():
            kind = stats.data["types"][name]
            for labels, value in values.items():
                assert len(labels) == len(declared[name].labelnames)
                if kind == "counter":
                    self.stats[name, labels] = self.stats.get((name, labels), 0) + value
                elif kind == "gauge":
                    self.stats[name, labels] = value

    def reset(self) -> None:
        """Host memory is emptied, and no worker has anything to do. From 0.33 on vLLM says so."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def metric(self, name: str, *labels: str) -> float:
        return self.stats.get((f"vllm:ragorder_{name}", ("disk", *labels)), 0)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.manager.shutdown()


Make = Callable[..., Engine]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model.safetensors").write_bytes(os.urandom(100_000))
    return folder


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes engines on one model and one folder, and closes them."""
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        made.append(Engine(model, tmp_path / "disk", **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "disk" / "chunks").glob("??/*"))


class TestWhatLeavesHostMemoryComesBackFromDisk:
    def test_chunks_are_stored_once_and_loaded_by_another_engine_too(self, engine: Make, tmp_path: Path) -> None:
        served = engine()
        assert served.serve("abcd") == []
        assert served.serve("wxyz") == []
        # The host has room for four chunks, and has them all from the second request.
        assert served.serve("abcd") == [DISK] * 4
        assert served.serve("abcd") == [HOST] * 4
        served.serve("wxyz")
        assert served.metric("stored_chunks") == served.metric("chunks") == len(files(tmp_path)) == 8
        assert served.metric("bytes") == 8 * ON_DISK
        served.close()
        second = engine()
        assert second.serve("abcm") == [DISK] * 3
        assert second.serve("abcm") == [HOST] * 4

    def test_it_stays_within_its_bytes(self, engine: Make, tmp_path: Path) -> None:
        served = engine(disk_bytes=6 * ON_DISK + 100)
        for prompt in ("abcd", "abxy", "mnop", "abcd", "abqr", "mnst"):
            served.serve(prompt)
            assert 0 < len(files(tmp_path)) <= 6
        assert served.metric("evicted_chunks") == served.metric("stored_chunks") - len(files(tmp_path))
        assert served.metric("capacity_bytes") == 6 * ON_DISK + 100

    def test_a_reset_of_the_cache_leaves_the_disk(self, engine: Make) -> None:
        served = engine()
        served.serve("abcd")
        served.reset()
        assert served.serve("abcd") == [DISK] * 4

    def test_engines_that_share_a_configuration_have_a_folder_each(self, engine: Make, tmp_path: Path) -> None:
        engine(dp=(0, 2)).serve("ab")
        second = engine(dp=(1, 2))
        assert second.serve("ab") == []
        assert second.serve("cd") == []
        assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["dp0", "dp1", "weights.json"]

    def test_vllms_events_of_them_name_the_tier_if_they_are_enabled(self, engine: Make) -> None:
        """As vLLM's connector sends them, without the tokens that a request in its scheduler would add."""
        served = engine(events=True, host_chunks=2, disk_bytes=3 * ON_DISK)
        blocks, counters = EngineBlocks(CHUNK_TOKENS), EventCounters()
        reader = EventReader(msgpack.decode, counters)
        tracker = vllm().OffloadingEventsTracker(
            vllm().OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False)
        )

        def read(events: list[Any]) -> None:
            reader.read(msgpack.encode(vllm().KVEventBatch(ts=0.0, events=events)), blocks)

        tokens = {prompt: list(range(place, place + 2 * CHUNK_TOKENS)) for place, prompt in enumerate(("ab", "xy"))}
        for prompt in tokens:
            hashes = [vllm().maybe_convert_block_hash(vllm().get_offload_block_hash(key)) for key in chunks(prompt)]
            facts = {"block_size": CHUNK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None}
            read([vllm().BlockStored(hashes, None, tokens[prompt], **facts)])
            served.serve(prompt)
            read(list(tracker.take_events(served.manager.take_events())))
            read([vllm().BlockRemoved(block_hashes=hashes, medium="GPU")])
        contents = {prompt: contents_of(ids, block_size=CHUNK_TOKENS) for prompt, ids in tokens.items()}
        assert [blocks.place(each) for each in contents["xy"]] == [TierLevel.HOST, TierLevel.HOST]
        assert blocks.place(contents["ab"][0]) is TierLevel.DISK
        assert [blocks.holds(each) for each in contents["ab"]] == [True, False], "one chunk had no room"
        assert counters.garbage == counters.orphans == 0
        served.close()
        quiet = engine()
        quiet.serve("mn")
        assert list(quiet.manager.take_events()) == []

    def test_events_end_with_what_is_on_the_disk(self, engine: Make) -> None:
        """Two requests' chunks are written, and the first's evicted, before vLLM asks for events."""
        disk = (served := engine(events=True, disk_bytes=2 * ON_DISK)).disk
        keys: list[bytes] = []
        for job, prompt in enumerate(("ab", "xy")):
            context, own = served.request(prompt)
            disk.submit_store(vllm().TransferJob(job, own, [2 * job, 2 * job + 1], False, context))
            keys += own
        disk.drain_jobs()
        assert len(list(disk.get_finished_jobs())) == 2
        held: set[bytes] = set()
        for event in disk.take_events():
            held = held - set(event.keys) if event.removed else held | set(event.keys)
        assert held == {key for key in keys if disk.lookup(key, context) is vllm().LookupResult.HIT} != set()

    def test_chunks_that_are_to_be_loaded_make_no_room_for_others(self, engine: Make) -> None:
        served = engine(disk_bytes=4 * ON_DISK)
        served.serve("abcd")
        served.reset()
        context, keys = served.request("abcd")
        blocked = threading.Event()
        for _ in range(2):
            threads_of(served.disk).add(ChunkJob(None, 1, lambda _: blocked.wait(60), urgent=True))
        for key in keys:
            assert served.manager.lookup(key, context) is vllm().LookupResult.HIT_PENDING
        served.step()
        assert not store_of(served.disk).write(b"another", bytes(CHUNK_BYTES))
        blocked.set()
        assert served.look_up(context, keys) == 4


class TestABadChunkIsComputedAgain:
    @pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
    def test_the_others_are_loaded_and_it_is_counted(self, engine: Make, tmp_path: Path, damage: str) -> None:
        served = engine()
        served.serve("abcd")
        served.serve("wxyz")
        path = tmp_path / "disk" / "chunks" / chunk_file(served.disk, chunks("abcd")[2])
        if damage == "flip":
            data = bytearray(path.read_bytes())
            data[5000] ^= 4
            path.write_bytes(data)
        elif damage == "cut":
            os.truncate(path, 5000)
        else:
            path.unlink()
        assert served.serve("abcd") == [DISK] * 2
        reason = {"flip": "checksum", "cut": "truncated", "gone": "missing"}[damage]
        assert served.metric("refused_chunks", reason) == 1
        assert served.metric("failed_transfers") == 1
        served.serve("wxyz")
        assert served.serve("abcd") == [DISK] * 4

    def test_a_disk_that_is_full_leaves_the_host(self, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        served = engine()
        served.serve("ab")

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            assert served.serve("wxyz") == []
            assert served.serve("wxyz") == [HOST] * 4
            # One of them was given up, which made no room.
            assert served.serve("ab") == [DISK]
        assert served.metric("evicted_chunks") == 1
        assert served.metric("refused_chunks", "write_ENOSPC") == 3
        assert served.metric("refused_chunks", "paused") == 2


class TestWithoutAStore:
    """Nothing is found on disk, the host goes on, it is logged once, and counted."""

    def check(self, served: Engine, reason: str, caplog: pytest.LogCaptureFixture) -> None:
        assert served.serve("abcd") == []
        assert served.serve("abcd") == [HOST] * 4
        assert served.serve("wxyz") == []
        assert served.serve("abcd") == []
        assert served.metric("refused_chunks", reason) == 1 + 12
        assert served.metric("chunks") == served.metric("capacity_bytes") == 0
        assert [record.levelname for record in caplog.records if "No disk tier" in record.getMessage()] == ["WARNING"]

    @pytest.fixture(autouse=True)
    def heard(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """vLLM's loggers hand nothing on, where a test could hear it, and earlier tests may have disabled ours, or
        started an engine that only logs errors."""
        caplog.set_level(logging.WARNING, logger="vllm")
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        monkeypatch.setattr(logging.getLogger("vllm.ragorder.disk"), "disabled", False)

    def test_a_folder_in_use_is_refused(self, engine: Make, caplog: pytest.LogCaptureFixture) -> None:
        first = engine()
        self.check(engine(), "locked", caplog)
        first.serve("ab")
        first.serve("wxyz")
        assert first.serve("ab") == [DISK] * 2

    @pytest.mark.parametrize("change", [{"dtype": "float16"}, {"block_tokens": 16}, {}])
    def test_a_folder_of_another_setup_or_of_other_weights_is_refused(
        self, engine: Make, model: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
    ) -> None:
        first = engine()
        first.serve("abcd")
        first.close()
        if not change:
            (model / "model.safetensors").write_bytes(os.urandom(100_000))
        self.check(engine(**change), "identity", caplog)

    def test_a_path_of_a_file_is_refused(self, engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "disk").write_text("a file")
        self.check(engine(), "unusable", caplog)

    def test_unidentified_weights_leave_no_store(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        served = Engine(Path("somebody/some-model"), tmp_path / "disk")
        self.check(served, "unknown-weights", caplog)
        served.close()
        assert not (tmp_path / "disk").exists()


class TestTheEndOfAnEngine:
    def test_threads_lock_and_host_memory_are_released(self, engine: Make) -> None:
        before = threading.active_count()
        served = engine()
        served.serve("ab")
        view = served.host.get_kv_memoryview()
        assert threading.active_count() > before
        served.close()
        assert threading.active_count() == before
        with pytest.raises(ValueError, match="released"):
            view.tobytes()
        assert served.disk.lookup(chunks("ab")[0], vllm().ReqContext(req_id="late")) is vllm().LookupResult.MISS

    def test_waiting_stores_are_written_at_the_end(self, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        served = engine()
        write = os.writev

        def slow(*arguments: Any) -> int:
            time.sleep(0.05)
            return write(*arguments)

        monkeypatch.setattr(os, "writev", slow)
        monkeypatch.setattr(served.disk, "drain_jobs", lambda: None)
        served.serve("abcd")
        assert served.manager.has_pending_work()
        served.close()
        monkeypatch.undo()
        assert engine().serve("abcd") == [DISK] * 4


class TestIdentity:
    def test_every_fact_of_the_setup_makes_another_one(self, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        config = engine().config
        group, parallel = config.groups[0], config.parallel
        others = [
            replace(config, groups=(replace(group, tokens_per_block=64),)),
            replace(config, groups=(replace(group, layer_names=("layer.0",)),)),
            replace(config, groups=(group, replace(group, group_id=1))),
            replace(config, model=replace(config.model, dtype="fp8")),
            replace(config, cache=replace(config.cache, tokens_per_hash=64)),
            replace(config, cache=replace(config.cache, blocks_per_chunk=2)),
            replace(config, worker_kv_bytes_per_block=1),
            replace(config, parallel=replace(parallel, tp_size=2)),
            replace(config, parallel=replace(parallel, world_size=2)),
            replace(config, replicated_layout=True),
            replace(config, canonical_layout=True),
            replace(config, kv_cache_layout="HND"),
            replace(config, extra_config={**config.extra_config, "ragorder_model": {"quantization": "fp8"}}),
        ]
        found = [disk_identity(SimpleNamespace(config=each), CHUNK_BYTES) for each in (config, *others)]
        assert len(set(found)) == len(found)
        same = replace(config, engine_id="another", parallel=replace(parallel, data_parallel_index=1))
        assert disk_identity(SimpleNamespace(config=same), CHUNK_BYTES) == found[0]
        assert disk_identity(SimpleNamespace(config=config), 2 * CHUNK_BYTES) != found[0]
        seeds = []
        for seed in ("1", "2"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            seeds.append(disk_identity(SimpleNamespace(config=config), CHUNK_BYTES))
        assert seeds[0] != seeds[1]

    def test_a_connector_adds_what_a_spec_does_not_get(self, engine: Make) -> None:
        found = []
        offloading = replace(engine().config, model=vllm().OffloadingModelConfig("org/name", "bfloat16"))
        for changes in (
            {},
            {"revision": "d" * 40},
            {"model_weights": "s3://bucket/model"},
            {"quantization": "fp8"},
            {"dtype": "torch.float16"},
            {"hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 1e6})},
            {"hf_config": SimpleNamespace(to_dict=lambda: {"rope_scaling": {"type": "longrope"}})},
            {"hf_config": SimpleNamespace(to_dict=lambda: {"rope_scaling": {"type": "longrope"}}), "max_model_len": 9},
            {"draft": "e" * 40},
            {"load_format": "dummy"},
            {"model_impl": "transformers"},
            {"attention_config": SimpleNamespace(compute_hash=lambda: "flashinfer")},
            {"model_loader_extra_config": {"tensorizer_uri": "s3://bucket/a"}},
        ):
            facts = {"revision": "c" * 40, "max_model_len": 8, "draft": None, "load_format": "auto"} | changes
            draft = facts["draft"] and SimpleNamespace(model="org/draft", revision=facts["draft"])
            extra: dict[str, Any] = {}
            loading = {name: facts.get(name) for name in ("load_format", "model_loader_extra_config")}
            note_model(
                SimpleNamespace(
                    model_config=SimpleNamespace(**facts),
                    load_config=SimpleNamespace(**loading),
                    attention_config=facts.get("attention_config"),
                    speculative_config=SimpleNamespace(draft_model_config=draft),
                    kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
                )
            )
            config = replace(offloading, extra_config=extra)
            found.append(disk_identity(SimpleNamespace(config=config), CHUNK_BYTES))
        assert len(set(found)) == len(found)

    def test_unserialisable_configurations_equal_no_other(self) -> None:
        found = []
        for _ in range(2):
            extra: dict[str, Any] = {}
            note_model(
                SimpleNamespace(
                    model_config=SimpleNamespace(hf_config=object()),
                    kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
                )
            )
            found.append(extra["ragorder_model"]["config"])
        assert found[0] != found[1]


class TestJobs:
    @pytest.fixture
    def threads(self) -> Iterator[JobThreads]:
        made = JobThreads(1, "test", logging.getLogger("test"))
        yield made
        made.close()

    def test_urgent_steps_go_before_the_next_step_of_another_job(self, threads: JobThreads) -> None:
        done: list[tuple[str, int]] = []
        first, go_on = threading.Event(), threading.Event()

        def slow(step: int) -> bool:
            first.set()
            assert go_on.wait(60)
            done.append(("slow", step))
            return True

        threads.add(ChunkJob(1, 3, slow))
        assert first.wait(60)
        threads.add(ChunkJob(2, 2, lambda step: done.append(("urgent", step)) is None, urgent=True))
        go_on.set()
        assert threads.wait(60)
        assert done == [("slow", 0), ("urgent", 0), ("urgent", 1), ("slow", 1), ("slow", 2)]
        assert [id for id, _ in threads.take_ended()] == [2, 1]
        assert not threads.busy

    def test_each_step_says_whether_it_has_worked_and_one_that_raises_has_not(self, threads: JobThreads) -> None:
        def step(number: int) -> bool:
            if number == 1:
                raise RuntimeError("no")
            return number == 0

        threads.add(ChunkJob(7, 3, step))
        threads.add(ChunkJob(None, 1, lambda _: True))
        threads.add(ChunkJob(8, 0, step))
        assert threads.wait(60)
        assert {id: job.worked for id, job in threads.take_ended()} == {7: [True, False, False], 8: []}

    def test_closing_drops_what_has_not_begun_and_says_so(self) -> None:
        threads = JobThreads(1, "test", logging.getLogger("test"))
        begun, go_on = threading.Event(), threading.Event()

        def wait(_: int) -> bool:
            begun.set()
            return go_on.wait(60)

        for number in range(3):
            threads.add(ChunkJob(number, 2, wait, urgent=number == 2))
        assert begun.wait(60)
        closing = threading.Thread(target=threads.close)
        closing.start()
        while not is_closing(threads):
            time.sleep(0.001)
        go_on.set()
        closing.join(60)
        threads.add(ChunkJob(3, 1, wait))
        ended = threads.take_ended()
        assert sorted(id for id, _ in ended) == [0, 1, 2, 3]
        assert sum(sum(job.worked) for _, job in ended) == 1
