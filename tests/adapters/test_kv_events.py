"""KV events: whatever a server sends, loses or repeats, the table in the end says what its engine holds."""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from email.message import Message
from functools import partial
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.http_server import PageServer
from support.inside import contents_in, held_in, set_bounds, writers_lock_of
from support.rings import examples, grid
from support.waiting import eventually

from ragorder import DegradedWarning, Document, Orderer, PromptBuilder
from ragorder.adapters.vllm import kv_events
from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.settings import Settings
from ragorder.trie.residency.blocks import Content, EngineBlocks, block_content, chain_root

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgspec").msgpack

BLOCK = 4
TOPIC = "kv-events"
END = (-1).to_bytes(8, "big", signed=True)
NEVER_S = 600.0
STRETCH = 500

Event = dict[str, Any]
Subscribe = Callable[..., KVEventSubscriber]
Python = Callable[..., "CompletedProcess[str]"]


class Server:
    """A fake server: an engine's blocks, and their events as vLLM's ZmqEventPublisher puts them on the wire.

    `held` is the plain model: the contents that the engine holds, by its hashes. `ever` are all contents it ever held.
    """

    def __init__(self, folder: Path, *, topic: str = TOPIC, buffer: int = 10_000, dialect: str = "vLLM") -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.topic, self.dialect = topic.encode(), dialect
        self.held: dict[Hashable, Content] = {}
        self.ever: set[Content] = set()
        # Whether batches reach subscribers and stay for replays, and whether anybody answers.
        self.heard = self.kept = self.answering = True
        # From this batch of an answer on, the line is too slow for every other stretch of it.
        self.line: int | None = None
        self.answers = self._life = 0
        self._buffer_steps = buffer
        self._random = random.Random(buffer)
        self._context: Any = None

    def start(self) -> None:
        """Another engine: nothing cached, other hashes, batches counted from 0."""
        self._life += 1
        self.held.clear()
        self._next = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self._buffer_steps)
        self._gone = threading.Event()
        self._context = zmq.Context()
        # As PUB on the wire, but it tells of subscriptions.
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self._router.setsockopt(zmq.SNDHWM, 100_000)
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay_endpoint)
        self._thread = threading.Thread(target=self._answer, name="played server", daemon=True)
        self._thread.start()

    def die(self) -> None:
        if self._context is not None:
            self._gone.set()
            self._thread.join()
            self._context.destroy(linger=0)
            self._context = None

    def restart(self) -> None:
        self.die()
        self.start()

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(10_000), "nobody subscribes"
        assert self._pub.recv()[1:] == self.topic

    # The engine.

    def store(
        self,
        parent: Hashable | None = None,
        blocks: int = 1,
        *,
        salt: str | None = None,
        medium: str = "GPU",
        tokens: Sequence[int] | None = None,
    ) -> list[Hashable]:
        """Fill blocks in a row after a held one; return their hashes."""
        if tokens is None:
            tokens = [self._random.getrandbits(17) for _ in range(blocks * BLOCK)]
        content = chain_root(salt) if parent is None else self.held[parent]
        hashes: list[Hashable] = []
        for start in range(0, len(tokens), BLOCK):
            content = block_content(content, tokens[start : start + BLOCK])
            hashes.append(self._hash(content))
            self.held[hashes[-1]] = content
        self.ever.update(self.held.values())
        keys = [[salt], *[None] * (len(hashes) - 1)] if salt else None
        self.publish(stored(hashes, tokens, parent, extra_keys=keys, medium=medium))
        return hashes

    def remove(self, *hashes: Hashable) -> None:
        for each in hashes:
            del self.held[each]
        self.publish(removed(hashes))

    def clear(self) -> None:
        self.held.clear()
        self.publish({"type": "AllBlocksCleared"})

    def act(self, chance: random.Random) -> None:
        """Whatever an engine does."""
        held = list(self.held)
        what = chance.choices(("begin", "follow", "remove", "clear"), (4, 6, 5, 0.2))[0]
        if what == "begin" or not held:
            self.store(blocks=chance.randint(1, 4), salt=chance.choice((None, "tenant a", "tenant b")))
        elif what == "follow":
            self.store(chance.choice(held), chance.randint(1, 3))
        elif what == "remove":
            self.remove(*chance.sample(held, min(len(held), chance.randint(1, 3))))
        else:
            self.clear()

    def _hash(self, content: Content) -> Hashable:
        digest = blake2b(content, digest_size=7, key=bytes([self._life])).digest()
        return int.from_bytes(digest, "big") if self.dialect == "SGLang" else digest

    # The wire.

    def publish(self, *events: Any) -> None:
        """One batch."""
        if self.dialect == "SGLang":
            events = tuple(map(as_array, events))
        batch: Any = [time.time(), events, 0]
        if self.dialect == "older vLLM":
            batch = {"ts": time.time(), "events": events}
        self.publish_payload(msgpack.encode(batch))

    def publish_payload(self, payload: bytes) -> None:
        if self.kept:
            self.buffer.append((self._next, payload))
        if self.heard:
            self.send(self.topic, self._next.to_bytes(8, "big"), payload)
        self._next += 1

    def send(self, *frames: bytes) -> None:
        """A message of any kind."""
        self._pub.send_multipart(frames)

    @contextmanager
    def losing(self, *, also_for_replays: bool = False) -> Iterator[None]:
        """Batches do not reach any subscriber."""
        self.heard, self.kept = False, not also_for_replays
        yield
        self.heard = self.kept = True

    def _answer(self) -> None:
        while not self._gone.is_set():
            if self._router.poll(20) and self.answering:
                client, _, start = self._router.recv_multipart()
                first = int.from_bytes(start, "big")
                answer = [(number, payload) for number, payload in list(self.buffer) if number >= first]
                head = [client, b""] if self.dialect != "vLLM" else [client, b"", self.topic]
                for position, (number, payload) in enumerate(answer):
                    if self._passes(position):
                        self._router.send_multipart([*head, number.to_bytes(8, "big"), payload])
                if self._passes(len(answer)):
                    self._router.send_multipart([*head[:2], b"", END, b""][-5 if self.dialect == "vLLM" else 0 :])
                self.answers += 1
            elif not self.answering:
                time.sleep(0.01)

    def _passes(self, position: int) -> bool:
        return self.line is None or position < self.line or (position - self.line) // STRETCH % 2 == 1


Serve = Callable[..., Server]


def stored(hashes: Any, token_ids: Any, parent: Any = None, **fields: Any) -> Event:
    """The event as vLLM sends it, with some fields of its own."""
    block = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids, "block_size": BLOCK}
    return {"type": "BlockStored", **block, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


def removed(hashes: Any, medium: Any = "GPU") -> Event:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def as_array(event: Event) -> list[Any]:
    """The event as SGLang and older vLLM send it."""
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return [event["type"], *(event[name] for name in names if name in event)]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts fake servers, each on endpoints of its own."""
    numbers = count()
    with ExitStack() as stack:

        def make(*, start: bool = True, **options: Any) -> Server:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            server = Server(folder, **options)
            stack.callback(server.die)
            if start:
                server.start()
            return server

        yield make


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    """Subscribes to a server and waits until nothing of the beginning is under way any more."""
    with ExitStack() as stack:

        def make(
            server: Server, *, replay: bool = True, settled: bool = True, max_blocks: int = 1 << 18, **options: Any
        ) -> KVEventSubscriber:
            blocks = EngineBlocks(BLOCK, max_blocks)
            options = {"topic": TOPIC, "check_interval_s": NEVER_S} | options
            answers = server.answers
            events = KVEventSubscriber(blocks, server.endpoint, server.replay_endpoint if replay else None, **options)
            stack.callback(events.close)
            if settled:
                server.wait_for_subscriber()
                # One answer at the start, one for the new connection.
                assert eventually(lambda: not replay or (events.synchronised and server.answers >= answers + 2))
            return events

        yield make


@pytest.fixture
def events(server: Server, subscribe: Subscribe) -> KVEventSubscriber:
    return subscribe(server)


def agrees(events: KVEventSubscriber, server: Server) -> bool:
    """Whether the table is exactly what the engine holds."""
    held = set(server.held.values())
    return {content for content in server.ever if events.blocks.holds(content)} == held == held_in(events.blocks).keys()


def troubles(events: KVEventSubscriber) -> set[str]:
    """What happened besides stores and removals, replays apart."""
    counters = events.counters
    names = ("cleared", "gaps", "start_overs", "restarts", "silences", "garbage", "other_topics", "orphans")
    return {name for name in names if getattr(counters, name)}


class TestTheTableIsWhatTheEngineHolds:
    """For any delay of the subscription, any loss, any engine."""

    @pytest.mark.parametrize("batches", [0, 40, 2400])
    def test_at_once_after_a_late_start(self, server: Server, subscribe: Subscribe, batches: int) -> None:
        """Also if the line is too slow for a long answer: of 2,400 batches the end is lost as well."""
        server.line = 1000
        chance = random.Random(batches)
        for _ in range(batches):
            server.act(chance)
        events = subscribe(server, settled=False)
        assert events.wait_until_synchronised(60)
        assert agrees(events, server)
        assert events.counters.batches == batches
        assert events.counters.replays
        assert troubles(events) <= {"cleared"}

    def test_while_it_stores_and_removes_and_clears(self, server: Server, events: KVEventSubscriber) -> None:
        replays = events.counters.replays
        chance = random.Random(7)
        for _ in range(300):
            server.act(chance)
        assert eventually(lambda: agrees(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        server.clear()
        server.store(blocks=3)
        assert eventually(lambda: agrees(events, server))
        assert (events.blocks.generation, events.blocks.epoch) == (generation + 1, epoch)
        assert events.counters.batches == 302
        assert events.counters.replays == replays, "nothing was missed"
        assert troubles(events) == {"cleared"}
        assert events.counters.stored and events.counters.removed

    def test_after_a_gap(self, server: Server, events: KVEventSubscriber) -> None:
        first, second = server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))
        before = events.blocks.generation, events.blocks.epoch, events.counters.replays
        with server.losing():
            server.remove(second)
            server.store(first, 3)
        server.store()
        assert eventually(lambda: agrees(events, server))
        assert troubles(events) == {"gaps"}
        after = events.blocks.generation, events.blocks.epoch, events.counters.replays
        assert after == (*before[:2], before[2] + 1), "all was told: nobody need look at each block again"

    @pytest.mark.parametrize(
        ("lost", "heard"), [(0, 2), (0, 0), (3, 1)], ids=["told", "nothing said yet", "the next batch by number"]
    )
    def test_after_a_restart(self, server: Server, events: KVEventSubscriber, lost: int, heard: int) -> None:
        for _ in range(3):
            server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        server.restart()
        with server.losing():
            for _ in range(lost):
                server.store()
        if lost:
            server.wait_for_subscriber()
        for _ in range(heard):
            server.store()
        assert eventually(lambda: agrees(events, server))
        assert len(events.blocks) == lost + heard
        assert troubles(events) == {"restarts"}
        assert events.blocks.generation > generation
        assert events.blocks.epoch == epoch + 1

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_happens_at_any_point(
        self, server: Server, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        # Who dies over a question does not answer it.
        set_bounds(monkeypatch, replay_timeout_s=1.0)
        chance = random.Random(seed)
        for _ in range(chance.randint(0, 30)):
            server.act(chance)
        events = subscribe(server, settled=chance.random() < 0.5, check_interval_s=0.2)
        for _ in range(chance.randint(100, 200)):
            server.heard = chance.random() < 0.8
            server.act(chance)
            if chance.random() < 0.03:
                server.restart()
            if chance.random() < 0.05:
                time.sleep(0.05 * chance.random())
        assert eventually(lambda: agrees(events, server) and events.synchronised)
        assert troubles(events) <= {"cleared", "gaps", "restarts", "garbage", "silences"}

    @pytest.mark.parametrize("dialect", ["vLLM", "older vLLM", "SGLang"])
    def test_events_of_any_publisher(self, serve: Serve, subscribe: Subscribe, dialect: str) -> None:
        server = serve(dialect=dialect)
        server.store(blocks=2)
        events = subscribe(server)
        first, second, third = server.store(blocks=3)
        server.remove(second)
        server.store(first)
        with server.losing():
            server.remove(third)
        server.store()
        assert eventually(lambda: agrees(events, server))
        assert len(events.blocks) == 5
        assert troubles(events) == {"gaps"}


class TestStartingOver:
    """What was lost for good is not believed any more."""

    def test_a_late_start_takes_what_the_server_still_has(self, serve: Serve, subscribe: Subscribe) -> None:
        server = serve(buffer=3)
        first, *_ = [server.store()[0] for _ in range(3)]
        server.store(first, 2)
        late = [server.store()[0] for _ in range(2)]
        events = subscribe(server, settled=False)
        assert events.wait_until_synchronised(60)
        assert troubles(events) == {"start_overs", "orphans"}
        assert events.counters.orphans == 2, "nobody knows what stands before them"
        assert held_in(events.blocks).keys() == {server.held[each] for each in late}
        server.clear()
        server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))

    def test_a_gap_too_long_begins_with_what_the_server_still_has(self, serve: Serve, subscribe: Subscribe) -> None:
        server = serve(buffer=3)
        events = subscribe(server)
        (known,) = server.store()
        assert eventually(lambda: agrees(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        with server.losing():
            for _ in range(10):
                server.store()
        (child,) = server.store(known)
        assert eventually(lambda: events.blocks.holds(server.held[child]))
        assert events.blocks.holds(server.held[known]), "its name is remembered, and a block comes after it"
        assert len(events.blocks) == 4
        assert troubles(events) == {"gaps", "start_overs"}
        assert events.blocks.generation > generation
        assert events.blocks.epoch == epoch, "it is the same engine"
        server.clear()
        server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))

    @pytest.mark.parametrize("late", [False, True])
    def test_a_batch_that_the_server_lost_is_skipped(self, server: Server, subscribe: Subscribe, late: bool) -> None:
        events = subscribe(server) if not late else None
        before, other = server.store()[0], server.store()[0]
        with server.losing(also_for_replays=True):
            server.remove(other)
            server.store()
        after = server.store(blocks=2)
        if events is None:
            events = subscribe(server)
        held = {server.held[each] for each in after}
        assert eventually(lambda: held_in(events.blocks).keys() == held)
        assert troubles(events) == ({"start_overs"} if late else {"start_overs", "gaps"})
        replays = events.counters.replays
        server.store(before)
        server.clear()
        server.store()
        assert eventually(lambda: agrees(events, server))
        assert events.counters.replays == replays, "it is asked for no more"

    def test_without_losses_blocks_are_not_scanned(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, check_interval_s=0.02)
        generation = events.blocks.generation
        for blocks in (0, 3):
            if blocks:
                server.store(blocks=blocks)
            replays = events.counters.replays
            assert eventually(lambda replays=replays: events.counters.replays > replays + 3 and agrees(events, server))
            assert events.blocks.generation == generation

    def test_a_replay_of_an_engines_first_batches_is_no_new_start(self, server: Server, subscribe: Subscribe) -> None:
        """What was served but not reported yet must not look lost."""
        events = subscribe(server, check_interval_s=0.05)
        generation = events.blocks.generation
        with server.losing():
            server.store(blocks=3)
        assert eventually(lambda: agrees(events, server) and len(events.blocks) == 3)
        assert events.blocks.generation == generation
        assert troubles(events) == set()


class TestWithoutAReplayEndpoint:
    """What is missed is missed: the table is emptied, and goes on."""

    def test_a_late_start_follows_later_events(self, server: Server, subscribe: Subscribe) -> None:
        (early,) = server.store()
        events = subscribe(server, replay=False)
        assert not events.synchronised
        server.store(early)
        late = server.store(blocks=2)
        assert eventually(lambda: held_in(events.blocks).keys() == {server.held[each] for each in late})
        assert events.synchronised
        assert troubles(events) == {"start_overs", "orphans"}
        assert not events.counters.replays

    def test_a_gap_empties_the_table(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, replay=False)
        server.store()
        assert eventually(lambda: agrees(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        with server.losing():
            server.store()
        after = server.store()
        assert eventually(lambda: held_in(events.blocks).keys() == {server.held[each] for each in after})
        assert troubles(events) == {"gaps", "start_overs"}
        assert events.blocks.generation > generation
        assert events.blocks.epoch == epoch
        server.clear()
        server.store()
        assert eventually(lambda: agrees(events, server))

    def test_smaller_numbers_are_those_of_another_engine(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, replay=False)
        for _ in range(3):
            server.store()
        assert eventually(lambda: agrees(events, server))
        epoch = events.blocks.epoch
        server.restart()
        server.wait_for_subscriber()
        server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))
        assert troubles(events) == {"restarts"}
        assert events.blocks.epoch == epoch + 1


class TestTenants:
    """The same tokens under another salt are another content."""

    def test_salted_blocks_are_others_than_unsalted_ones(self, server: Server, events: KVEventSubscriber) -> None:
        tokens = list(range(3 * BLOCK))
        for salt in ("one", "two"):
            server.store(salt=salt, tokens=tokens)
        assert eventually(lambda: len(events.blocks) == 6 and agrees(events, server))
        assert not events.blocks.holds(block_content(chain_root(), tokens[:BLOCK]))
        server.store(tokens=tokens)
        assert eventually(lambda: len(events.blocks) == 9 and agrees(events, server))
        assert troubles(events) == set()

    @given(st.lists(st.one_of(st.none(), st.text()), min_size=2, max_size=2, unique_by=lambda salt: salt or None))
    @example(["('a',)", "a"])
    @example(["a", "a',"])
    @example([None, "None"])
    def test_two_salts_are_never_equal(self, salts: list[str | None]) -> None:
        tokens = [1] * BLOCK
        contents = set()
        for salt in salts:
            contents |= set(contents_of(tokens * 2, salt))
            blocks = EngineBlocks(BLOCK)
            blocks.store([1, 2], None, tokens * 2, [[salt], None] if salt else None)
            assert all(map(blocks.holds, contents_of(tokens * 2, salt)))
        assert len(contents) == 4

    @pytest.mark.parametrize(
        "fields",
        [
            {"lora_id": 1, "lora_name": "adapter", "extra_keys": [["adapter"], ["adapter"]]},
            {"lora_id": 1, "lora_name": "adapter", "extra_keys": [["adapter", "salt"], ["adapter"]]},
            {"lora_id": 1},
        ],
        ids=["an adapter", "an adapter and a salt", "an adapter as older engines tell it"],
    )
    def test_an_adapters_blocks_are_neither_the_models_nor_a_tenants(
        self, server: Server, events: KVEventSubscriber, fields: Event
    ) -> None:
        tokens = list(range(2 * BLOCK))
        server.publish(stored([b"1", b"2"], tokens, **fields))
        assert eventually(lambda: len(events.blocks) == 2)
        for salt in (None, "adapter", "salt"):
            assert not any(map(events.blocks.holds, contents_of(tokens, salt)))
        server.publish(removed([b"1", b"2"]))
        assert eventually(lambda: len(events.blocks) == 0)
        assert troubles(events) == set()

    def test_blocks_of_other_layers_or_machines_do_not_count(self, server: Server, events: KVEventSubscriber) -> None:
        tokens = list(range(BLOCK))
        server.publish(stored([b"1"], tokens, group_idx=1), stored([b"2"], tokens, locality="REMOTE"))
        (block,) = server.store(tokens=tokens)
        server.publish(removed([block]) | {"group_idx": 1}, removed([block]) | {"locality": "REMOTE"})
        assert eventually(lambda: events.counters.batches == 3)
        assert agrees(events, server)


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
    """No message does any harm."""

    def test_messages_of_another_shape_are_counted(self, server: Server, events: KVEventSubscriber) -> None:
        for message in MESSAGES.values():
            server.store()
            server.send(*message)
        server.store()
        assert eventually(lambda: agrees(events, server))
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
        assert eventually(lambda: agrees(events, server))
        assert events.counters.garbage == len(PAYLOADS)
        assert troubles(events) == {"garbage"}

    def test_unreadable_events_are_counted_and_the_others_read(self, server: Server, events: KVEventSubscriber) -> None:
        for number, event in enumerate([*EVENTS.values(), *UNKNOWN.values()]):
            server.publish(event)
            server.store(tokens=[number + 1000] * BLOCK)
        assert eventually(lambda: agrees(events, server))
        assert events.counters.garbage == len(EVENTS)
        assert troubles(events) == {"garbage"}

    def test_odd_tokens_are_blocks_of_their_own(self, server: Server, subscribe: Subscribe) -> None:
        for tokens in ([7] * BLOCK, [-1] * BLOCK, [True, False] * (BLOCK // 2), [2**63 - 1] * BLOCK):
            server.store(tokens=tokens)
        events = subscribe(server, settled=False)
        assert events.wait_until_synchronised(60)
        assert agrees(events, server)

    @pytest.mark.parametrize("number", [4, 1000, 2**63, 2**64 - 2, 2**64 - 1])
    def test_a_number_far_ahead_is_not_believed(self, server: Server, events: KVEventSubscriber, number: int) -> None:
        for _ in range(3):
            server.store()
        server.send(server.topic, number.to_bytes(8, "big"), msgpack.encode([1.0, [stored([1], TOKENS)]]))
        server.store()
        # What is missing comes by a replay, before the message itself is disbelieved.
        assert eventually(lambda: agrees(events, server) and troubles(events) == {"gaps", "garbage"})
        assert events.counters.batches == 4

    def test_a_number_before_changes_nothing(self, server: Server, events: KVEventSubscriber) -> None:
        for _ in range(3):
            server.store()
        for number in range(3):
            server.send(server.topic, number.to_bytes(8, "big"), msgpack.encode([1.0, [{"type": "AllBlocksCleared"}]]))
        server.store()
        assert eventually(lambda: agrees(events, server) and events.counters.batches >= 4)
        assert troubles(events) == set()

    def test_a_batch_that_comes_twice_is_taken_once(self, server: Server, events: KVEventSubscriber) -> None:
        (block,) = server.store()
        server.remove(block)
        replays = events.counters.replays
        for number, payload in list(server.buffer):
            server.send(server.topic, number.to_bytes(8, "big"), payload)
        server.store()
        assert eventually(lambda: agrees(events, server))
        assert events.counters.batches == 3
        assert events.counters.replays == replays
        assert troubles(events) == set()

    def test_a_forged_next_batch_is_found_out(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, check_interval_s=0.2)
        server.store()
        server.send(server.topic, (1).to_bytes(8, "big"), msgpack.encode([1.0, [stored([1], TOKENS)]]))
        assert eventually(lambda: agrees(events, server) and events.counters.restarts > 0)
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
        assert eventually(lambda: agrees(events, server) and events.synchronised)
        assert "garbage" in troubles(events)
        (block,) = server.store()
        server.remove(block)
        assert eventually(lambda: agrees(events, server))


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
        assert eventually(lambda: agrees(events, server))
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


class TestAServerThatIsNotThere:
    """Waiting for it happens on a thread of its own."""

    def test_a_server_that_comes_up_later_is_followed_then(self, serve: Serve, subscribe: Subscribe) -> None:
        server = serve(start=False)
        events = subscribe(server, settled=False)
        assert not events.wait_until_synchronised(0.3)
        assert not events.synchronised
        server.start()
        server.store(blocks=2)
        assert events.wait_until_synchronised(60)
        assert eventually(lambda: agrees(events, server))
        server.store()
        assert eventually(lambda: agrees(events, server))
        assert troubles(events) <= {"silences"}

    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, replay_timeout_s=0.5)

    @pytest.mark.usefixtures("impatient")
    def test_a_server_that_goes_and_comes_back_is_another_one(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, check_interval_s=0.1)
        server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))
        server.die()
        assert eventually(lambda: not events.synchronised)
        server.start()
        server.store()
        assert eventually(lambda: events.synchronised and agrees(events, server))
        assert troubles(events) == {"silences", "restarts"}

    @pytest.mark.usefixtures("impatient")
    def test_a_server_that_hangs_is_asked_again(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server)
        server.store(blocks=2)
        assert eventually(lambda: agrees(events, server))
        generation = events.blocks.generation
        server.answering = False
        with server.losing():
            server.store()
        server.store()
        assert eventually(lambda: not events.synchronised)
        server.answering = True
        assert eventually(lambda: events.synchronised and agrees(events, server))
        assert troubles(events) == {"silences", "gaps"}
        assert events.blocks.generation == generation, "the same engine went on where it stood"

    @pytest.mark.usefixtures("impatient")
    def test_an_answer_that_breaks_off_is_asked_for_from_the_start(self, server: Server, subscribe: Subscribe) -> None:
        for _ in range(5):
            server.store()
        server.line = 3
        events = subscribe(server, settled=False)
        assert eventually(lambda: events.counters.silences > 0)
        assert not events.synchronised
        assert len(events.blocks) == 0, "half of the story is not told"
        server.line = None
        assert eventually(lambda: events.synchronised)
        assert agrees(events, server)

    @pytest.mark.parametrize("state", ["synchronised", "down", "hanging", "without replays", "answering at length"])
    def test_closing_is_quick_and_leaves_nothing(
        self, serve: Serve, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch, state: str
    ) -> None:
        set_bounds(monkeypatch, replay_timeout_s=600.0)
        server = serve(start=state != "down")
        server.answering = state != "hanging"
        if state == "answering at length":
            server.line = 1000
            for _ in range(1400):
                server.store()
        events = subscribe(server, settled=False, replay=state != "without replays")
        if state == "synchronised":
            assert events.wait_until_synchronised(60)
        elif state in ("hanging", "answering at length"):
            assert eventually(lambda: events.counters.replays > 0)
        start = time.monotonic()
        events.close()
        assert time.monotonic() - start < 60, "it waits for no answer, which would take 600 seconds"
        events.close()
        assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there are no file descriptors to be counted")
    def test_no_file_is_left_open(self, server: Server) -> None:
        closed = []

        def cycle() -> None:
            blocks = EngineBlocks(BLOCK)
            with KVEventSubscriber(blocks, server.endpoint, server.replay_endpoint) as events:
                assert events.wait_until_synchronised(60)
            assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}
            with pytest.raises(ValueError, match="endpoint"):
                KVEventSubscriber(blocks, server.endpoint, "nonsense")
            closed.append(events)

        server.store()
        for _ in range(2):
            cycle()
        before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            cycle()
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert threading.active_count() == threads


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:5557", "http://localhost:5557", "tcp://localhost", "tcp://*:5557", "tcp://"]
)
def test_an_invalid_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    for endpoints in ((endpoint,), ("tcp://127.0.0.1:5557", endpoint)):
        with pytest.raises(ValueError, match=r"tcp://127\.0\.0\.1:5557"):
            KVEventSubscriber(EngineBlocks(BLOCK), *endpoints)
    assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}


class Recorder:
    """A watcher."""

    def __init__(self) -> None:
        self.changed: dict[Content, None] = {}

    def told(self) -> set[Content]:
        told = set(self.changed)
        self.changed.clear()
        return told


def contents_of(tokens: Sequence[int], salt: str | None = None) -> list[Content]:
    """The contents of the blocks of a prompt."""
    content = chain_root(salt)
    found = []
    for start in range(0, len(tokens), BLOCK):
        content = block_content(content, tokens[start : start + BLOCK])
        found.append(content)
    return found


# Store, remove, clear; a token; the number of a block; a tier.
OPERATIONS = st.tuples(st.sampled_from("ssssrrrc"), st.integers(0, 2), st.integers(0, 9), st.sampled_from("GC"))


class TestEngineBlocks:
    """The table alone."""

    def test_a_removed_block_that_gets_a_child_has_a_copy(self) -> None:
        blocks, watcher = EngineBlocks(BLOCK), Recorder()
        tokens = list(range(2 * BLOCK))
        for _ in range(2):
            blocks.store([1], None, tokens[:BLOCK])
        blocks.remove([1])
        blocks.watch(contents_of(tokens)[0], watcher)
        blocks.store([2], 1, tokens[BLOCK:])
        assert all(map(blocks.holds, contents_of(tokens)))
        assert watcher.told() == {contents_of(tokens)[0]}

    @pytest.mark.parametrize(
        "arguments",
        [
            ([2], 1, TOKENS[:-1]),
            ([2, 3], 1, TOKENS),
            ([2], 1, TOKENS, [["a"], None]),
            ([2, 3], 1, [*TOKENS, *TOKENS[:-1], 2**63]),
            ([2, 3], 1, [*TOKENS, *TOKENS[:-1], "a"]),
            ([2, []], 1, TOKENS * 2),
        ],
    )
    def test_an_event_that_is_refused_changes_nothing(self, arguments: tuple[Any, ...]) -> None:
        blocks = EngineBlocks(BLOCK)
        blocks.store([1], None, TOKENS)
        blocks.remove([1])
        with pytest.raises((ValueError, TypeError, OverflowError)):
            blocks.store(*arguments)
        assert len(blocks) == 0
        blocks.store([4], 2, TOKENS)
        assert blocks.orphans == 1

    @pytest.mark.parametrize("same_engine", [True, False])
    def test_a_successor_replaces_the_table_at_once(self, same_engine: bool) -> None:
        blocks = EngineBlocks(BLOCK)
        tokens = list(range(2 * BLOCK))
        blocks.store([1], None, tokens[:BLOCK])
        successor = blocks.make_successor(same_engine=same_engine)
        successor.store([2], 1, tokens[BLOCK:])
        successor.store([3], None, [9] * BLOCK)
        assert list(map(blocks.holds, contents_of(tokens))) == [True, False], "nothing has changed yet"
        generation, epoch = blocks.generation, blocks.epoch
        blocks.replace(successor, same_engine=same_engine)
        assert list(map(blocks.holds, contents_of(tokens))) == [same_engine] * 2, "another engine has other hashes"
        assert blocks.holds(contents_of([9] * BLOCK)[0])
        assert blocks.orphans == (not same_engine)
        assert blocks.generation == generation + 1
        assert blocks.epoch == epoch + (not same_engine)

    def test_the_last_watcher_gets_changes_until_it_stops(self) -> None:
        blocks = EngineBlocks(BLOCK)
        (content,) = contents_of(TOKENS)
        first, last = Recorder(), Recorder()
        blocks.watch(content, first)
        blocks.watch(content, last)
        blocks.unwatch(content, first)
        blocks.store([1], None, TOKENS)
        assert (first.told(), last.told()) == (set(), {content})
        blocks.unwatch(content, last)
        blocks.unwatch(content, last)
        blocks.remove([1])
        assert (first.told(), last.told()) == (set(), set())

    def test_memory_is_bounded_and_what_is_held_stays_up_to_half_of_it(self) -> None:
        blocks = EngineBlocks(BLOCK, max_blocks=40)
        chance = random.Random(5)
        held: dict[int, Content] = {}
        for number in range(1000):
            while len(held) >= 20:
                block = chance.choice(list(held)[1:])
                blocks.remove([block])
                del held[block]
            tokens = [number] * BLOCK
            blocks.store([number], None, tokens)
            (held[number],) = contents_of(tokens)
            assert len(contents_in(blocks)) <= 40
            assert held_in(blocks).keys() == set(held.values())
        assert 0 in held, "however old it is"

    @pytest.mark.parametrize("held", [True, False])
    @pytest.mark.parametrize(("new_hashes", "new_tokens"), [(True, True), (True, False), (False, True)])
    def test_ever_new_hashes_or_blocks_fill_no_memory(self, held: bool, new_hashes: bool, new_tokens: bool) -> None:
        blocks = EngineBlocks(BLOCK, max_blocks=10)
        for number in range(100):
            name, tokens = number * new_hashes, [number * new_tokens] * BLOCK
            blocks.store([name], None, tokens)
            assert blocks.holds(*contents_of(tokens))
            if not held:
                blocks.remove([name])
            assert len(blocks) <= len(contents_in(blocks)) <= 10
        assert (len(blocks) > 0) == held

    def test_a_block_costs_the_same_however_many_were_forgotten(self) -> None:
        table = EngineBlocks(BLOCK, 1 << 16)
        numbers = count()

        def cost(blocks: int) -> float:
            start = time.thread_time()
            for number in islice(numbers, blocks):
                table.store([number], None, [number, 1, 1, 1])
                table.remove([number])
            return (time.thread_time() - start) / blocks

        first = cost(1 << 14)
        cost(3 << 15)
        # It grew 24 times.
        assert max(cost(1 << 13) for _ in range(12)) < 6 * first
        assert len(contents_in(table)) == 1 << 16

    def test_no_call_of_an_orderer_waits_for_a_writer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A finaliser may run within `store` on the same thread, and finish, order or close an orderer there."""
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 2)
        table = EngineBlocks(BLOCK)
        orderer = Orderer(
            block_size=BLOCK,
            capacity_tokens=40 * BLOCK,
            blocks=table,
            prefix_ids=[1] * BLOCK,
            prefix_tokens=BLOCK,
            tokens=lambda _: 2 * BLOCK,
            token_ids=lambda document: [DOCUMENTS.index(document) + 2] * 2 * BLOCK,
        )
        table.store([1], None, [1] * BLOCK)

        def use() -> None:
            for number in range(20):
                ordering = orderer.order(DOCUMENTS[number % 4 : number % 4 + 5], scope=f"tenant {number % 3}")
                ordering.confirm(0) if number % 2 else ordering.discard()
                orderer.predict_cached_tokens(DOCUMENTS[:3], scope=f"tenant {number % 3}")
            orderer.close()

        with writers_lock_of(table):
            thread = threading.Thread(target=use, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        assert not orderer.fallbacks

    @given(st.lists(OPERATIONS))
    def test_watchers_hear_of_every_change_when_it_happens(self, operations: list[tuple[str, int, int, str]]) -> None:
        blocks = EngineBlocks(BLOCK)
        watcher = Recorder()

        def content_of(chain: tuple[int, ...]) -> Content:
            return contents_of([each for each in chain for _ in range(BLOCK)])[-1]

        # Three tokens and chains of up to three blocks: every block comes and goes more than once.
        known: list[tuple[int, ...]] = [()]
        tiers: dict[tuple[int, ...], set[str]] = {}
        generation = 0
        for what, token, number, medium in operations:
            before = {chain for chain, media in tiers.items() if media}
            chain = known[number % len(known)]
            if what == "s":
                grown = (*chain[:2], token)
                above = grown[:-1]
                if above:
                    tiers[above].add(medium)
                if grown not in known:
                    known.append(grown)
                    blocks.watch(content_of(grown), watcher)
                tiers.setdefault(grown, set()).add(medium)
                blocks.store([grown], above or None, [token] * BLOCK, None, medium)
            elif what == "r":
                tiers.get(chain, set()).discard(medium)
                blocks.remove([chain], medium)
            else:
                for media in tiers.values():
                    media.clear()
                blocks.clear()
                generation += 1
                before = set()
            after = {chain for chain, media in tiers.items() if media}
            assert set(map(content_of, after)) == held_in(blocks).keys()
            assert watcher.told() == set(map(content_of, before ^ after))
            assert blocks.generation == generation


METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="4",engine="0",enable_prefix_caching="True",mamba_cache_mode="none",'
    'num_gpu_blocks="101"} 1.0\n'
)
TIERS = (
    'vllm:ragorder_policy{engine="0",policy="forecast"} 1.0\n'
    'vllm:ragorder_capacity_bytes{engine="0",tier="device"} 4000.0\n'
    'vllm:ragorder_capacity_bytes{engine="0",tier="host"} 16000.0\n'
    'vllm:ragorder_capacity_bytes{engine="0",tier="disk"} 1.6e+05\n'
)
SECRET = "sk-0123456789"  # noqa: S105


@pytest.fixture
def metrics() -> Iterator[str]:
    """The address of a server that publishes its metrics to clients with the key."""

    def page(path: str, headers: Message) -> tuple[int, str]:
        known = path == "/metrics" and headers["Authorization"] in (None, f"Bearer {SECRET}")
        return (200, METRICS) if known else (404, "")

    with PageServer(page) as server:
        yield server.base_url


@pytest.fixture(scope="module")
def builder(tokenizers: dict[str, Any]) -> PromptBuilder:
    return PromptBuilder(tokenizer=tokenizers["chatml"])


DOCUMENTS = [Document(f"d{number}", f"secret {number} of the house, told nobody.") for number in range(12)]
NOWHERE = "http://127.0.0.1:9"


def serve_requests(orderer: Orderer, seed: int = 0) -> list[tuple[list[int], float]]:
    """What an orderer does with a number of requests."""
    chance = random.Random(seed)
    done = []
    for _ in range(40):
        ordering = orderer.order(chance.sample(DOCUMENTS, 5))
        done.append((ordering.permutation, ordering.cached_tokens))
        ordering.confirm()
    assert not orderer.fallbacks
    return done


class TestOrdererForVLLM:
    """What is wrong in every call is an error; what a live server does not tell is done without, and said once."""

    @pytest.fixture(autouse=True)
    def log(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        caplog.set_level(logging.DEBUG, "ragorder")
        return caplog

    @pytest.fixture
    def follow(self, metrics: str, server: Server, builder: PromptBuilder) -> Callable[..., Orderer]:
        """Makes orderers that follow the server's events."""
        endpoints = {"events_endpoint": server.endpoint, "replay_endpoint": server.replay_endpoint}
        return partial(Orderer.for_vllm, metrics, builder=builder, events_topic=TOPIC, **endpoints)

    @pytest.mark.parametrize("url", [NOWHERE, f"http://user:{SECRET}@127.0.0.1:9/v1"])
    def test_no_server_at_the_address_is_an_error_that_names_it(self, url: str) -> None:
        with pytest.raises(RuntimeError, match=r"^http://127\.0\.0\.1:9 cannot be reached .*check host and port"):
            Orderer.for_vllm(url, api_key=SECRET, block_size=BLOCK, capacity_tokens=400)

    @pytest.mark.parametrize("given", [{}, {"block_size": BLOCK, "capacity_tokens": 400}], ids=["asked", "by hand"])
    @pytest.mark.parametrize("is_up", [True, False])
    def test_a_proxy_of_ours_is_recognised(self, given: dict[str, Any], is_up: bool, metrics: str) -> None:
        """It has metrics of its own, and what an application has ordered it would order again."""
        pytest.importorskip("starlette")
        from starlette.responses import PlainTextResponse
        from starlette.routing import Route
        from support.serving_app import serving

        from ragorder.adapters.proxy import make_app

        own = Route("/metrics", lambda request: PlainTextResponse("# HELP ragorder_tree_nodes"))
        with serving() as serve:
            url = serve(make_app(Orderer(), upstream=metrics if is_up else NOWHERE, routes=[own]))
            with pytest.warns(DegradedWarning, match="is ragorder serve, which orders itself: give the address of"):
                orderer = Orderer.for_vllm(url, **given)
        assert len(orderer.degraded) == 1

    def test_a_server_that_is_not_up_yet_is_no_proxy_of_ours(self) -> None:
        with PageServer(lambda *_: (503, b"")) as server, pytest.warns(DegradedWarning, match="HTTP 503"):
            assert len(Orderer.for_vllm(server.base_url).degraded) == 1

    def test_a_server_that_does_not_speak_http_is_an_error(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True)
            thread.start()
            with pytest.raises(RuntimeError, match="check the port, and http or https"):
                Orderer.for_vllm(f"http://127.0.0.1:{listener.getsockname()[1]}")
            thread.join()

    @pytest.mark.parametrize("builder", [None, PromptBuilder()], ids=["no builder", "no tokenizer"])
    def test_an_unusable_endpoint_is_an_error(
        self, metrics: str, server: Server, builder: PromptBuilder | None
    ) -> None:
        threads = threading.active_count()
        with pytest.raises(ValueError, match=r"events_endpoint needs builder=PromptBuilder\(tokenizer=…\)"):
            Orderer.for_vllm(metrics, builder=builder, events_endpoint=server.endpoint)
        assert eventually(lambda: threading.active_count() == threads)

    def test_missing_metrics_are_warned_about_once_and_stay_in_degraded(
        self, metrics: str, builder: PromptBuilder, log: pytest.LogCaptureFixture
    ) -> None:
        with pytest.warns(DegradedWarning, match="/metrics") as warned:
            orderer = Orderer.for_vllm(f"{metrics}/elsewhere", builder=builder, api_key=SECRET)
            assert len(orderer.degraded) == 1
            assert "/metrics" in repr(orderer)
            expected = Orderer(prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
            assert serve_requests(orderer) == serve_requests(expected)
            orderer.close()
            orderer.close()
            assert serve_requests(orderer, 1) == serve_requests(expected, 1)
        assert len(warned) == 1
        assert SECRET not in log.text + str(warned[0].message)
        assert "secret" not in log.text

    def test_sizes_given_by_hand_need_no_warning(self, metrics: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            orderer = Orderer.for_vllm(f"{metrics}/elsewhere", block_size=BLOCK, capacity_tokens=400)
            assert orderer.degraded == ()
            assert Orderer.for_vllm(metrics, api_key=SECRET).degraded == (), "events are asked for, or not"

    @pytest.mark.parametrize(
        ("changed", "found"),
        [
            (("", ""), (1600, 16_000, "forecast")),
            (('policy="forecast"', 'policy="of-tomorrow"'), (0, 0, "pgdsf")),
            (('tier="device"', 'tier="other"'), (0, 0, "pgdsf")),
            (("1.6e+05", "much"), (1600, 0, "forecast")),
        ],
    )
    def test_sizes_of_tiers_are_the_servers(
        self, metrics: str, monkeypatch: pytest.MonkeyPatch, changed: tuple[str, str], found: tuple[int, int, str]
    ) -> None:
        """Its 100 blocks of 4 tokens take 4,000 bytes."""
        monkeypatch.setattr(sys.modules[__name__], "METRICS", METRICS + TIERS.replace(*changed))
        settings = Orderer.for_vllm(metrics).settings
        assert (settings.host_tokens, settings.disk_tokens, settings.tier_policy) == found
        by_hand = Orderer.for_vllm(metrics, host_tokens=7).settings
        assert (by_hand.host_tokens, by_hand.disk_tokens, by_hand.tier_policy) == (7, 0, "pgdsf")

    @pytest.mark.parametrize(
        ("page", "reason"),
        [
            (METRICS.replace('caching="True"', 'caching="False"'), "prefix cache is off"),
            (METRICS + METRICS.splitlines(keepends=True)[-1].replace('engine="0"', 'engine="1"'), "2 engines"),
        ],
    )
    def test_what_the_server_lacks_is_in_degraded(
        self, metrics: str, monkeypatch: pytest.MonkeyPatch, page: str, reason: str
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "METRICS", page)
        with pytest.warns(DegradedWarning, match=reason):
            assert reason in "".join(Orderer.for_vllm(metrics).degraded)

    @pytest.mark.filterwarnings("ignore:no KV events")
    @pytest.mark.parametrize("wrong", ["topic", "endpoint"])
    def test_events_that_never_come_are_warned_of_once_the_orderer_is_used(
        self, metrics: str, server: Server, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch, wrong: str
    ) -> None:
        set_bounds(monkeypatch, silence_s=0.3, synchronise_s=0.0)
        endpoint = server.endpoint + "-elsewhere" * (wrong == "endpoint")
        with pytest.warns(DegradedWarning, match="no replay_endpoint"):
            orderer = Orderer.for_vllm(
                metrics, builder=builder, events_endpoint=endpoint, events_topic=TOPIC + "-wrong" * (wrong == "topic")
            )
        with orderer:
            server.store()
            time.sleep(0.5)
            assert len(orderer.degraded) == 1, "an orderer that is not used misses nothing"
            serve_requests(orderer)
            assert eventually(lambda: len(orderer.degraded) == 2)
            assert "no KV events" in orderer.degraded[1]
            assert serve_requests(orderer, 1)

    @pytest.mark.filterwarnings("ignore:no KV events")
    def test_another_topics_events_are_reported_as_a_wrong_topic(
        self, server: Server, follow: Callable[..., Orderer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, silence_s=0.3)
        with follow(events_topic=TOPIC + "-wrong") as orderer:
            server.store()
            assert eventually(lambda: orderer.events.counters.other_topics)
            serve_requests(orderer)
            assert eventually(lambda: bool(orderer.degraded))
            assert "of this topic: correct events_topic" in orderer.degraded[-1]
            assert not orderer.events.counters.garbage

    @pytest.mark.filterwarnings("ignore:no KV events")
    def test_a_server_that_falls_silent_later_is_warned_of_once(
        self, server: Server, follow: Callable[..., Orderer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A server that answers late on a busy machine is not silent.
        set_bounds(monkeypatch, silence_s=2.0, replay_timeout_s=1.0)
        with follow() as orderer:
            server.store()
            serve_requests(orderer)
            assert eventually(lambda: orderer.events.counters.batches == 1)
            time.sleep(0.5)
            assert orderer.degraded == ()
            server.die()
            assert eventually(lambda: bool(orderer.degraded))
            time.sleep(0.5)
            assert len(orderer.degraded) == 1

    def test_an_orderer_finds_what_another_one_had_computed_until_the_engine_forgets_it_and_logs_nothing(
        self, server: Server, follow: Callable[..., Orderer], builder: PromptBuilder, log: pytest.LogCaptureFixture
    ) -> None:
        with follow() as first, follow() as second:
            assert first.events.synchronised
            computed = first.order([DOCUMENTS[number] for number in (3, 1, 2)])
            prompt = builder.build("Who?", computed).token_ids
            assert prompt is not None
            server.store(tokens=prompt[: len(prompt) // BLOCK * BLOCK], salt=None)
            assert eventually(lambda: all(agrees(each.events, server) for each in (first, second)))
            computed.confirm()
            ids = [*builder.prefix_ids, *chain.from_iterable(builder.document_ids(DOCUMENTS[n]) for n in (3, 1, 2))]
            for orderer in (first, second):
                ordering = orderer.order(DOCUMENTS[:4])
                assert ordering.permutation == [3, 1, 2, 0]
                assert ordering.cached_tokens == len(ids) // BLOCK * BLOCK
                ordering.confirm()
            assert second.order(DOCUMENTS[:4], scope="tenant").permutation == [0, 1, 2, 3]
            server.clear()
            assert eventually(lambda: all(agrees(each.events, server) for each in (first, second)))
            assert first.order(DOCUMENTS[:4]).cached_tokens == second.order(DOCUMENTS[:4]).cached_tokens == 0
        for orderer in (first, second):
            assert not orderer.degraded and not orderer.fallbacks
        assert not log.records
        assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}

    def test_blocks_of_all_tiers_are_remembered(self, follow: Callable[..., Orderer]) -> None:
        with follow() as alone, follow(host_tokens=1 << 20) as tiered:
            assert tiered.events.blocks.max_blocks >= 2 * (1 << 20) // BLOCK > alone.events.blocks.max_blocks

    def test_explicit_options_win(self, metrics: str, builder: PromptBuilder) -> None:
        given = {"block_size": 32, "capacity_tokens": 640, "prefix_tokens": 7}
        for name, value in given.items():
            for options in ({name: value}, {"settings": Settings(**{name: value})}):
                settled = Orderer.for_vllm(f"{metrics}/v1", builder=builder, **options).settings
                read = {"block_size": 4, "capacity_tokens": 400, "prefix_tokens": builder.prefix_tokens}
                assert {each: getattr(settled, each) for each in given} == read | {name: value}

    def test_events_that_are_not_there_yet_are_warned_of_once_and_come_later(
        self,
        metrics: str,
        serve: Serve,
        builder: PromptBuilder,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        set_bounds(monkeypatch, synchronise_s=0.2)
        server = serve(start=False)
        endpoints = {"events_endpoint": server.endpoint, "replay_endpoint": server.replay_endpoint}
        with pytest.warns(DegradedWarning, match="no answer from replay_endpoint yet"):
            orderer = Orderer.for_vllm(metrics, builder=builder, events_topic=TOPIC, **endpoints)
        try:
            assert len(orderer.degraded) == 1
            serve_requests(orderer)
            server.start()
            server.store()
            assert eventually(lambda: orderer.events.synchronised and agrees(orderer.events, server))
            serve_requests(orderer)
            assert len(orderer.degraded) == 1
        finally:
            orderer.close()

    @pytest.mark.parametrize("package", grid(["zmq", "msgspec", "httpx2"], 1))
    def test_a_missing_package_is_named_with_its_extra(self, python: Python, metrics: str, package: str) -> None:
        done = python(
            "-c",
            "from ragorder import Orderer, PromptBuilder\n"
            "builder = PromptBuilder()\n"
            "builder._head_ids = [1]\n"
            f"Orderer.for_vllm('{metrics}', builder=builder, events_endpoint='tcp://127.0.0.1:5557')\n",
            blocked=(package,),
        )
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError") and package in last and "'.[live]'" in last
