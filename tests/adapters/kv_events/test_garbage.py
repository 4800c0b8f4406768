"""KV events that nobody can read, and those that are too large: no message does any harm."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from support.event_server import BLOCK, TOPIC, Server, as_array, follows, removed, stored, troubles
from support.rings import examples
from support.waiting import eventually

from ragorder.adapters.vllm import kv_events
from ragorder.adapters.vllm.kv_events import KVEventSubscriber

Subscribe = Callable[..., KVEventSubscriber]

NESTED: Any = [1]
for _ in range(500):
    NESTED = [NESTED]
TOKENS = list(range(BLOCK))
MESSAGES = {
    "no number": [TOPIC.encode()],
    "a frame too few": [TOPIC.encode(), bytes(8)],
    "a frame too many": [TOPIC.encode(), bytes(8), b"", b""],
    "a short number": [TOPIC.encode(), bytes(4), b""],
    "a long number": [TOPIC.encode(), bytes(9), b""],
    "another topic": [TOPIC.encode() + b"-of-others", bytes(8), b""],
}
PAYLOADS = {
    "nothing": b"",
    "no msgpack": b"\xc1\xff\x00",
    "half of a batch": msgpack.encode([1.0, [stored([1], TOKENS)]])[:-3],
    "a number": msgpack.encode(7),
    "None": msgpack.encode(None),
    "a text": msgpack.encode("x"),
    "a map without events": msgpack.encode({"a": 1, "b": 2}),
    "a list of nothing": msgpack.encode([]),
    "no events": msgpack.encode([1.0]),
    "a number of events": msgpack.encode([1.0, 3]),
    "events that are None": msgpack.encode([1.0, None]),
    "lists in lists": msgpack.encode([1.0, NESTED]),
    "lists in lists without end": b"\x91" * 100_000 + b"\xc0",
}
EVENTS = {
    "a number": 5,
    "None": None,
    "an empty list": [],
    "a map without type": {"block_hashes": [1]},
    "a type that is a list": [["BlockStored"], [1], None, TOKENS],
    "a store without tokens": {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None},
    "a short array": ["BlockStored", [1]],
    "hashes that are a number": stored(1, TOKENS),
    "unhashable hashes": stored([[1]], TOKENS),
    "an unhashable hash after a good one": stored([1, {}], TOKENS * 2),
    "an unhashable parent": stored([1], TOKENS, [1]),
    "too few tokens": stored([1], TOKENS[:-1]),
    "too many tokens": stored([1], TOKENS * 2),
    "tokens of another block size": stored([1, 2], list(range(BLOCK)), block_size=BLOCK // 2),
    "no hashes for tokens": stored([], TOKENS),
    "tokens that are None": stored([1], None),
    "tokens that are texts": stored([1], ["a"] * BLOCK),
    "tokens that are halves": stored([1], [0.5] * BLOCK),
    "tokens beyond all bounds": stored([1], [2**64 - 1] * BLOCK),
    "a text in the second block": stored([1, 2], [*TOKENS, *TOKENS[:-1], "a"]),
    "a bad token in the second block": stored([1, 2], [*TOKENS, *TOKENS[:-1], 2**63]),
    "extra keys that are a number": stored([1], TOKENS, extra_keys=7),
    "extra keys for another number of blocks": stored([1], TOKENS, extra_keys=[["a"], None]),
    "extra keys in the second block that are a number": stored([1, 2], TOKENS * 2, extra_keys=[["a"], 7]),
    "a removal of a number": removed(4),
    "a removal of what cannot be hashed": removed([[1]]),
}
UNKNOWN = {
    "an event of tomorrow": {"type": "BlockMoved", "block_hashes": [1]},
    "an array of tomorrow": ["BlockMoved", [1], 2],
    "a text": "BlockStored",
    "a removal of a stranger": removed([b"stranger", None, 3.5, True]),
    "a removal from another tier": removed([b"stranger"], "CPU"),
    "a store of nothing": stored([], []),
}


class TestGarbage:
    def test_messages_of_another_shape_are_counted(self, server: Server, events: KVEventSubscriber) -> None:
        for message in MESSAGES.values():
            server.store()
            server.send(*message)
        server.store()
        assert eventually(lambda: follows(events, server))
        assert (events.counters.garbage, events.counters.other_topics) == (len(MESSAGES) - 1, 1)
        assert troubles(events) == {"garbage", "other_topics"}

    @pytest.mark.parametrize("late", [False, True], ids=["live", "in a replay"])
    def test_batches_that_cannot_be_read_are_counted(self, server: Server, subscribe: Subscribe, late: bool) -> None:
        events = None if late else subscribe(server)
        for payload in PAYLOADS.values():
            server.store()
            server.publish_payload(payload)
        server.store()
        if events is None:
            events = subscribe(server)
        assert eventually(lambda: follows(events, server))
        assert events.counters.garbage == len(PAYLOADS)
        assert troubles(events) == {"garbage"}

    def test_unreadable_events_are_counted_change_nothing_and_the_others_are_read(
        self, server: Server, events: KVEventSubscriber
    ) -> None:
        (gone,) = server.store()
        server.remove(gone)
        stores = [
            event for event in EVENTS.values() if isinstance(event, dict) and event.get("parent_block_hash", 0) is None
        ]
        wrong = [*EVENTS.values(), *(event | {"parent_block_hash": gone} for event in stores)]
        for number, event in enumerate([*wrong, *UNKNOWN.values()]):
            server.publish(event)
            server.store(tokens=[number + 1000] * BLOCK)
        # Of a refused store no name is known.
        server.publish(stored([b"child"], TOKENS, 1))
        assert eventually(lambda: follows(events, server) and events.counters.orphans == 1)
        assert events.counters.garbage == len(wrong)
        assert troubles(events) == {"garbage", "orphans"}

    def test_odd_tokens_are_blocks_of_their_own(self, server: Server, subscribe: Subscribe) -> None:
        for tokens in ([7] * BLOCK, [-1] * BLOCK, [True, False] * (BLOCK // 2), [2**63 - 1] * BLOCK):
            server.store(tokens=tokens)
        events = subscribe(server, settled=False)
        assert events.wait_until_synchronised(60)
        assert follows(events, server)

    @pytest.mark.parametrize("number", [4, 1000, 2**63, 2**64 - 2, 2**64 - 1])
    def test_a_number_far_ahead_is_not_believed(self, server: Server, events: KVEventSubscriber, number: int) -> None:
        for _ in range(3):
            server.store()
        server.send(server.topic, number.to_bytes(8, "big"), msgpack.encode([1.0, [stored([1], TOKENS)]]))
        server.store()
        # What is missing comes by a replay, before the message itself is disbelieved.
        assert eventually(lambda: follows(events, server) and troubles(events) == {"gaps", "garbage"})
        assert events.counters.batches == 4

    def test_earlier_batches_change_nothing_repeated_or_forged(self, server: Server, events: KVEventSubscriber) -> None:
        (block,) = server.store()
        server.remove(block)
        replays = events.counters.replays
        for number, payload in list(server.buffer):
            server.send(server.topic, number.to_bytes(8, "big"), payload)
        server.store()
        assert eventually(lambda: follows(events, server))
        assert events.counters.batches == 3
        assert events.counters.replays == replays
        for number in range(3):
            server.send(server.topic, number.to_bytes(8, "big"), msgpack.encode([1.0, [{"type": "AllBlocksCleared"}]]))
        server.store()
        assert eventually(lambda: follows(events, server) and events.counters.batches >= 4)
        assert troubles(events) == set()

    def test_a_forged_next_batch_is_found_out(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, check_interval_s=0.2)
        server.store()
        server.send(server.topic, (1).to_bytes(8, "big"), msgpack.encode([1.0, [stored([1], TOKENS)]]))
        assert eventually(lambda: follows(events, server) and events.counters.restarts > 0)
        assert troubles(events) == {"restarts"}

    def test_a_good_batch_is_read_after_thousands_of_bad_ones(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, check_interval_s=0.2)
        sent = Counter[str]()

        @settings(max_examples=examples(100), database=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(messages(), min_size=25, max_size=40))
        def babble(babbled: list[tuple[bytes, ...]]) -> None:
            for message in babbled:
                server.send(*message)
            sent["messages"] += len(babbled)
            server.store()

        babble()
        assert sent["messages"] >= 20 * examples(100)
        server.store(blocks=2)
        assert eventually(lambda: follows(events, server) and events.synchronised)
        assert "garbage" in troubles(events)
        (block,) = server.store()
        server.remove(block)
        assert eventually(lambda: follows(events, server))


def messages() -> st.SearchStrategy[tuple[bytes, ...]]:
    """Frames of any number and content, most of them nearly right."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.binary(max_size=9),
    )
    anything = st.recursive(
        scalars | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
    hashes = st.lists(st.integers(0, 9) | st.binary(max_size=2), max_size=3) | anything
    tokens = st.lists(st.integers(0, 9), min_size=BLOCK, max_size=BLOCK) | anything
    events = st.one_of(
        st.builds(stored, hashes, tokens, hashes, extra_keys=anything, medium=scalars, group_idx=scalars),
        st.builds(lambda event: as_array(event), st.builds(stored, hashes, tokens, hashes, medium=scalars)),
        st.builds(removed, hashes, scalars),
        st.just({"type": "AllBlocksCleared"}),
        anything,
    )
    batches = st.one_of(
        st.tuples(scalars, st.lists(events, max_size=3), scalars),
        st.builds(dict, ts=scalars, events=anything),
        anything,
    )
    payloads = st.one_of(batches.map(msgpack.encode), st.binary(max_size=20))
    numbers = st.one_of(
        st.integers(0, 2**64 - 1).map(lambda number: number.to_bytes(8, "big")),
        st.integers(0, 150).map(lambda number: number.to_bytes(8, "big")),
        st.binary(max_size=9),
    )
    topic = st.just(TOPIC.encode())
    return st.one_of(
        st.tuples(topic, numbers, payloads),
        st.tuples(topic | topic.map(lambda name: name + b"2"), numbers, payloads),
        st.lists(st.binary(max_size=9), max_size=4).map(lambda rest: (TOPIC.encode(), *rest)),
    )


class TestWrongSizes:
    """What is too large is never taken into memory, and what cannot be is never advised."""

    def test_a_frame_beyond_the_bound_is_refused_and_the_next_batch_is_taken(
        self, server: Server, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_events, "LARGEST_MESSAGE_BYTES", 1 << 16)
        events = subscribe(server)
        server.send(TOPIC.encode(), bytes(8), bytes((1 << 16) + 1))
        server.store()
        assert eventually(lambda: follows(events, server))
        assert events.counters.garbage == 0, "it never arrived"

    def test_no_block_size_is_advised_that_the_tokens_do_not_bear_out(
        self, server: Server, subscribe: Subscribe, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "ragorder")
        for size in (-18, 0, True, 2.5, None, "2", [2], 7, 10**6, 1 << 63):
            server.publish(stored([1, 2], TOKENS * 2, block_size=size), stored([], [], block_size=size))
        server.publish(stored([1, 2], TOKENS, block_size=BLOCK // 2))
        server.publish(stored([3], [1], block_size=1))
        assert subscribe(server, settled=False).wait_until_synchronised(60)
        advice = [record.getMessage() for record in caplog.records]
        assert advice == [f"the engine's KV blocks have 2 tokens, the orderer's {BLOCK}: give block_size=2"]
