"""The feeder: a layer is in its buffer whole, and nothing writes there afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.families import family
from support.streamed import saved

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.fake_streams import fake_streams

from ragorder.kernels.offload import Checkpoint, LayerStore, feeder
from ragorder.kernels.offload.checkpoint import TensorEntry
from ragorder.kernels.offload.feeder import Feeder, LayerBuffer
from ragorder.kernels.offload.layout import CheckpointMap
from ragorder.kernels.offload.model_memory import decoder_layers, skeleton
from ragorder.kernels.offload.ring import LayerRing, Slot

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Source:
    """Reads of a checkpoint that wait for `gate`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.gate = threading.Event()

    def read(self, entry: TensorEntry, start: int, into: memoryview) -> None:
        assert self.gate.wait(30)
        self.checkpoint.read(entry, start, into)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(Checkpoint(saved(family("llama"), tmp_path / "model")))


@pytest.fixture
def store(source: Source) -> Iterator[LayerStore]:
    empty = skeleton(transformers.AutoConfig.from_pretrained(source.checkpoint.folder))
    prefix, layers = decoder_layers(empty)
    found = CheckpointMap(empty, prefix, layers, source.checkpoint)
    made = LayerStore.of(source.checkpoint, found, layers, source)
    yield made
    made.close()


def test_a_thread_that_cannot_be_started_loses_no_bytes(
    store: LayerStore, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reader is at work when there is no second one."""
    start = threading.Thread.start

    def short(thread: threading.Thread) -> None:
        if thread.name.endswith("reader_1"):
            source.gate.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short)
    before = set(threading.enumerate())
    made = Feeder(store, CPU)
    found = torch.zeros(store.slot_bytes, dtype=torch.uint8)
    made.read(1, found)
    assert source.gate.is_set()
    assert not [each.name for each in set(threading.enumerate()) - before if each.name.startswith("ragorder-layer")]
    expected = torch.zeros(store.slot_bytes, dtype=torch.uint8)
    for chunk in store.chunks(1):
        store.read(chunk, expected)
    assert torch.equal(found, expected)
    assert made.bytes == store.stored_bytes(1)
    made.close()


class TestStreamsInOrder:
    """Where there is no GPU: what the streams are told, and in which order."""

    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
        def allocate(nbytes: int, device: Any, *, pinned: bool = False) -> Any:
            return torch.zeros(nbytes, dtype=torch.uint8)

        monkeypatch.setattr(feeder, "allocate", allocate)
        return fake_streams(monkeypatch, "copies")

    def test_a_new_buffer_is_filled_after_what_had_its_memory_and_kept_until_then(
        self, told: list[tuple[str, ...]], store: LayerStore
    ) -> None:
        made = Feeder(store, GPU)
        host = torch.arange(store.slot_bytes, dtype=torch.int64).to(torch.uint8)
        filled = threading.Event()

        def fill(slot: Slot, stale: Callable[[], bool]) -> None:
            slot.fence = made.fill(slot.layer, slot.buffer.bytes, host, slot.fence, stale)
            filled.set()

        ring = LayerRing(fill, [])
        ring.order(range(len(store)))
        ring.grow(LayerBuffer(store.slot_bytes, GPU))
        assert filled.wait(30)
        assert torch.equal(ring.take(0).buffer.bytes[: store.nbytes(0)], host[: store.nbytes(0)])
        assert told == [
            ("compute", "records"),
            ("begin", "copies"),
            ("copies", "waits for", "event of compute"),
            ("copies", "records"),
            ("end", "copies"),
            ("buffer", "is used by", "copies"),
        ]
        ring.close()
        made.close()
