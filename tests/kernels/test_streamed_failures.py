"""No request of a model that streams is lost or answered twice, whatever allocation or read fails, and whenever."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import pytest
from support.families import make_model
from support.inside import (
    ALLOCATE,
    ALLOCATE_LAYER,
    cache_of,
    host_of,
    leases_of,
    model_of,
    scheduler_of,
    streamer_of,
    tiers_of,
)
from support.rings import length
from support.small_engine import tokens
from support.streamed import TOKENS, room_for, saved, streaming, whole

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.kernels.engine import Completion, Request, Sampling, ShortOfMemoryError, TieredEngine, runner
from ragorder.kernels.offload import LayerReadError, LayerTiers, feeder
from ragorder.kernels.offload.model_memory import decoder_layers
from ragorder.kernels.paging import BlockPool, LayeredPool, OutOfBlocksError

pytestmark = pytest.mark.merge

LAYERS = 4
SITES = {
    *("read of a layer", "end of a file", "buffer of a layer", "pool of blocks", "within a layer", "sampling"),
    *("planning", "read of KV", "write of KV", "layer of a pool"),
}


class Faults:
    """Fails calls at random while `active`, and counts the failures by site. Threads call, too."""

    def __init__(self, seed: int) -> None:
        self.active = False
        self.injected: Counter[str] = Counter()
        self._random = Random(seed)
        self._lock = Lock()

    def due(self, site: str, share: float) -> bool:
        with self._lock:
            fails = self.active and self._random.random() < share
            self.injected[site] += fails
            return fails

    def failing(self, site: str, share: float, call: Callable[..., Any], error: type[Exception], *details: Any) -> Any:
        """The call, which raises the error at random."""

        def called(*arguments: Any, **options: Any) -> Any:
            if self.due(site, share):
                raise error(*details)
            return call(*arguments, **options)

        return called

    def install(self, engine: TieredEngine, patch: Callable[..., None]) -> None:
        preadv, zeros = os.preadv, getattr(LayeredPool, ALLOCATE_LAYER)
        make, make_layers = (getattr(pool, ALLOCATE) for pool in (BlockPool, LayeredPool))

        def read(*arguments: Any) -> int:
            return 0 if self.due("end of a file", 0.001) else preadv(*arguments)

        def making(pool: BlockPool, blocks: int) -> Any:
            if blocks and self.due("pool of blocks", 0.2):
                raise MemoryError(f"no room for {blocks} blocks")
            return (make_layers if isinstance(pool, LayeredPool) else make)(pool, blocks)

        io_error, full = (errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left on device")
        short = (errno.ENOMEM, "Cannot allocate memory")
        patch(os, "preadv", self.failing("read of a layer", 0.006, read, OSError, *io_error))
        patch(os, "readv", self.failing("read of KV", 0.2, os.readv, OSError, *io_error))
        patch(os, "writev", self.failing("write of KV", 0.2, os.writev, OSError, *full))
        patch(feeder, "mmap", self.failing("buffer of a layer", 0.3, feeder.mmap, OSError, *short))
        patch(BlockPool, ALLOCATE, making)
        patch(LayeredPool, ALLOCATE, making)
        patch(LayeredPool, ALLOCATE_LAYER, self.failing("layer of a pool", 0.02, zeros, MemoryError))
        plan, allocator = scheduler_of(engine).plan, "DefaultCPUAllocator: can't allocate memory"
        patch(scheduler_of(engine), "plan", self.failing("planning", 0.004, plan, MemoryError))
        patch(runner, "choose", self.failing("sampling", 0.01, runner.choose, RuntimeError, allocator))
        computing = self.failing("within a layer", 0.01, lambda *_: None, torch.OutOfMemoryError, "out of memory")
        for layer in decoder_layers(model_of(engine)[0])[1]:
            layer.mlp.register_forward_pre_hook(computing)


def kv_of(engine: TieredEngine) -> dict[bytes, list[Any]]:
    """The KV of each node in memory, its own tokens alone, on the device and in the host."""
    cache, found = cache_of(engine), {}
    tiers_of(cache).drain()
    for node in tiers_of(cache).nodes.values():
        first = node.start % cache.shape.block_size
        copies = [(cache.pool, node.device), (host_of(cache).pool, node.host)]
        rows = [pool.read(copy.blocks).movedim(3, 1).flatten(0, 1) for pool, copy in copies if copy is not None]
        found[node.key] = [each[first : first + node.tokens] for each in rows]
    return found


class Requests:
    """Those of a test, which share documents, what an engine without failures answers, and the documents' KV."""

    def __init__(self, folder: Path) -> None:
        random = Random(5)
        documents = [tokens(random.randint(10, 60), 100 + number) for number in range(8)]
        self.kinds = []
        for number in range(30):
            chosen = random.sample(documents, random.randint(1, 3))
            ends = [sum(map(len, chosen[: place + 1])) for place in range(len(chosen))]
            prompt = [token for document in chosen for token in document] + tokens(random.randint(1, 9), 200 + number)
            self.kinds.append(Request(prompt, ends, Sampling(max_tokens=random.randint(1, 6))))
        with TieredEngine.load(folder, whole(verify=False)) as engine:
            self.expected, self.kv = [], {}
            for request in self.kinds:
                engine.clear_cache()
                self.expected += [completion.token_ids for completion in engine.generate([request])]
                self.kv.update((key, rows) for key, [rows] in kv_of(engine).items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(make_model("Llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def requests(folder: Path) -> Requests:
    return Requests(folder)


@pytest.fixture
def engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredEngine]:
    # Memory is short far more often here than pools and steps could grow again.
    for module in ("scheduler", "budgeted"):
        monkeypatch.setattr(f"ragorder.kernels.engine.{module}._STEPS_TO_GROW", 3)
    tiers = {"host_bytes": "300KiB", "disk_path": tmp_path / "kv", "disk_bytes": 1 << 22}
    settings = streaming(folder, 3, verify=False, max_retries=2, device_bytes=room_for(folder, 3), **tiers)
    with TieredEngine.load(folder, settings) as engine:
        yield engine


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("in_place", [True, False], ids=["on a CPU", "as on a GPU"])
def test_ten_thousand_failures(
    in_place: bool, engine: TieredEngine, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 in `make test-all`: of reads of weights and KV, and of allocations of buffers, pools and activations,
    while layers move, pools are resized, and requests are aborted. Answers are those of an engine without failures, or
    errors that name memory or the disk, and each comes once. Whatever documents have KV, it is the whole model's."""
    failures, random, faults = length(10_000, 150), Random(int(in_place)), Faults(int(in_place))
    engine.move_layers(LayerTiers.spread(LAYERS, 0))
    streamer_of(engine).in_place = cache_of(engine).pool.in_place = in_place
    faults.install(engine, monkeypatch.setattr)
    asked: dict[int, int] = {}
    told: dict[int, list[int]] = {}
    ended: dict[int, Completion] = {}
    refused = moved = moved_kv = 0

    def step() -> None:
        for update in engine.step():
            # Nothing comes after the end.
            assert update.request_id not in ended
            told[update.request_id] += update.token_ids
            if update.completion is not None:
                ended[update.request_id] = update.completion

    while faults.injected.total() < failures:
        if random.random() < 0.1:
            # As little as an engine can have: a request that is longer may find no memory for its KV.
            while engine.relieve():
                pass
        faults.active = True
        for _ in range(60):
            if len(asked) - len(ended) < 6 and random.random() < 0.5:
                kind = random.randrange(len(requests.kinds))
                try:
                    number = engine.add(requests.kinds[kind])
                except ShortOfMemoryError:
                    refused += 1
                    continue
                asked[number], told[number] = kind, []
            try:
                match random.randrange(40):
                    case 0:
                        engine.relieve()
                    case 1:
                        device = random.randrange(LAYERS + 1)
                        engine.move_layers(LayerTiers.spread(LAYERS, device, random.randrange(LAYERS + 1 - device)))
                        moved += 1
                    case 2:
                        engine.resize(device_tokens=random.randrange(300, TOKENS), host_bytes=random.randrange(1 << 19))
                    case 4 if engine.device_tokens:
                        now = engine.placement
                        engine.place(replace(now, kv_host_layers=random.randrange(LAYERS + 1)))
                        moved_kv += engine.placement.kv_host_layers != now.kv_host_layers
                    case 3 if left := sorted(asked.keys() - ended.keys()):
                        engine.abort(random.choice(left))
            except (MemoryError, OutOfBlocksError, LayerReadError):
                pass
            step()
        # Failures are over: what runs ends, and nothing is held any more.
        faults.active = False
        while engine.has_unfinished:
            step()
        assert asked.keys() == ended.keys()
        assert not leases_of(cache_of(engine))
        for key, copies in kv_of(engine).items():
            for rows in copies:
                torch.testing.assert_close(rows, requests.kv[key], rtol=1e-4, atol=1e-5)
    outcomes: Counter[str] = Counter()
    for number, completion in ended.items():
        expected, reason = requests.expected[asked[number]], completion.finish_reason
        outcomes[reason] += 1
        assert told[number] == list(completion.token_ids) == list(expected[: len(completion.token_ids)])
        if reason == "error":
            assert completion.fault in ("memory", "disk"), completion.error
            outcomes[completion.fault] += 1
        else:
            assert reason == "abort" or completion.token_ids == expected
    assert outcomes["length"] > 0.7 * len(ended), outcomes
    assert faults.injected.keys() >= SITES, faults.injected
    assert moved and moved_kv and (failures < 1000 or refused)
    assert engine.stats().cached.host > 0
    # Memory is there again, and so is what was planned.
    engine.resize(device_tokens=TOKENS, host_bytes=1 << 18)
    assert engine.move_layers(LayerTiers.spread(LAYERS, 1)) == LayerTiers.spread(LAYERS, 1)
    for completion, expected in zip(engine.generate(requests.kinds), requests.expected, strict=True):
        assert completion.token_ids == expected
    engine.clear_cache()
    assert cache_of(engine).pool.used_blocks == host_of(cache_of(engine)).pool.used_blocks == 0
