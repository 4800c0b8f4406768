"""The ring of buffers: layers come in order, ahead of their use, and faults come to the step that they concern."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from support.waiting import eventually

from ragorder.kernels.offload.feeder import LayerBuffer
from ragorder.kernels.offload.ring import LayerRing, Slot

CPU = torch.device("cpu")


class Source:
    """Fills a slot with its layer's number. `held`: each fill waits for `let`."""

    def __init__(self, held: bool = False) -> None:
        self.filled: list[int] = []
        self.faults: dict[int, Exception] = {}
        self.always: set[int] = set()
        self.let = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self._held = held

    def __call__(self, slot: Slot, stale: Callable[[], bool]) -> None:
        self.begun.release()
        if self._held:
            assert self.let.acquire(timeout=30)
        if stale():
            return
        self.filled.append(slot.layer)
        if slot.layer in self.always:
            raise OSError("broken")
        if slot.layer in self.faults:
            raise self.faults.pop(slot.layer)
        slot.buffer.bytes.fill_(slot.layer)


Make = Callable[..., LayerRing]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[LayerRing, Source]] = []

    def ring(source: Source, slots: int, layers: int) -> LayerRing:
        made.append((LayerRing(source, [LayerBuffer(8, CPU) for _ in range(slots)]), source))
        made[-1][0].order(range(layers))
        return made[-1][0]

    yield ring
    for each, source in made:
        for _ in range(100):
            source.let.release()
        each.close()


def use(ring: LayerRing, layer: int) -> int:
    """What the layer's slot holds when it is taken."""
    slot = ring.take(layer)
    assert slot.layer == layer
    content = int(slot.buffer.bytes[0])
    ring.give_back(slot)
    return content


class TestOrder:
    def test_it_is_as_far_ahead_as_there_are_slots_and_wraps_around(self, make: Make) -> None:
        ring = make(Source(), 4, 5)
        assert ring.ahead == [0, 1, 2, 3]
        for layer in range(3):
            use(ring, layer)
        assert ring.ahead == [3, 4, 0, 1]
        # With one slot a layer is read when the last one is done.
        source = Source()
        ring = make(source, 1, 3)
        slot = ring.take(0)
        assert ring.ahead == [0] and source.filled == [0]
        ring.give_back(slot)
        assert ring.ahead == [1]

    def test_a_layer_out_of_turn_waits_for_the_only_buffer(self, make: Make) -> None:
        source = Source(held=True)
        ring = make(source, 1, 4)
        assert source.begun.acquire(timeout=30)
        done: list[int] = []
        taker = threading.Thread(target=lambda: done.append(use(ring, 2)))
        taker.start()
        for _ in range(3):
            source.let.release()
        taker.join(30)
        assert done == [2]
        assert 0 not in source.filled[1:]

    def test_a_layer_that_is_not_streamed_is_refused(self, make: Make) -> None:
        with pytest.raises(ValueError, match="layer 7 is not streamed"):
            make(Source(), 2, 3).take(7)


class TestFaults:
    def test_come_to_the_one_who_takes_the_layer_and_are_over_after_that(self, make: Make) -> None:
        source = Source()
        ring = make(source, 1, 4)
        use(ring, 0)
        # Whether it is read ahead or waited for, the second attempt fails, too.
        source.faults = {2: OSError("broken")}
        use(ring, 1)
        source.always.add(2)
        with pytest.raises(OSError, match="broken"):
            use(ring, 2)
        source.always.clear()
        source.faults.clear()
        assert [use(ring, layer) for layer in range(4)] == list(range(4))

    def test_of_what_was_read_ahead_are_tried_once_more(self, make: Make) -> None:
        source = Source()
        source.faults = {1: OSError("for a moment")}
        ring = make(source, 3, 3)
        use(ring, 0)
        while len(source.filled) < 4:
            threading.Event().wait(0.001)
        assert [use(ring, layer) for layer in (1, 2, 0)] == [1, 2, 0]


class TestSlots:
    def test_a_slot_that_is_being_filled_is_let_go_of_afterwards(self, make: Make) -> None:
        source = Source(held=True)
        ring = make(source, 3, 6)
        assert source.begun.acquire(timeout=30)
        threading.Timer(0.05, source.let.release, []).start()
        ring.shrink(0)
        assert (len(ring), ring.ahead) == (0, [])
        with pytest.raises(MemoryError, match="no buffer"):
            ring.take(0)

    def test_closing_waits_for_the_read_that_has_begun_and_begins_no_other(self, make: Make) -> None:
        source = Source(held=True)
        ring = make(source, 3, 6)
        assert source.begun.acquire(timeout=30)
        closer = threading.Thread(target=ring.close)
        closer.start()
        assert eventually(lambda: not ring.ahead)
        assert closer.is_alive()
        source.let.release()
        closer.join(30)
        assert not closer.is_alive() and not source.begun.acquire(blocking=False)

    @given(steps=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=12))
    def test_whatever_the_slots_and_wherever_a_forward_ends_each_layer_is_itself(
        self, steps: list[tuple[int, int]]
    ) -> None:
        ring = LayerRing(Source(), [LayerBuffer(8, CPU)])
        ring.order(range(6))
        try:
            for slots, end in steps:
                ring.shrink(slots)
                while len(ring) < slots:
                    ring.grow(LayerBuffer(8, CPU))
                assert [use(ring, layer) for layer in range(end)] == list(range(end))
                assert len(ring) == slots
        finally:
            ring.close()
