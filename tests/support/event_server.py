"""A fake server that publishes KV events: an engine's blocks, and their events as vLLM puts them on the wire."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import zmq
from msgspec import msgpack

from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.trie.residency.blocks import Content, block_content, chain_root
from support.inside import held_in

BLOCK = 4
TOPIC = "kv-events"
END = (-1).to_bytes(8, "big", signed=True)
STRETCH = 500

Event = dict[str, Any]


def contents_of(tokens: Sequence[int], salt: str | None = None, block_size: int = BLOCK) -> list[Content]:
    """The contents of the blocks of a prompt."""
    content = chain_root(salt)
    found = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = block_content(content, tokens[start : start + block_size])
        found.append(content)
    return found


def stored(
    hashes: Any, token_ids: Any, parent: Any = None, *, medium: Any = "GPU", block_size: int = BLOCK, **fields: Any
) -> Event:
    """The event as vLLM sends it, with some fields of its own."""
    block = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids, "block_size": block_size}
    return {"type": "BlockStored", **block, "lora_id": None, "medium": medium, "lora_name": None} | fields


def removed(hashes: Any, medium: Any = "GPU") -> Event:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def as_array(event: Event) -> list[Any]:
    """The event as SGLang and older vLLM send it."""
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return [event["type"], *(event[name] for name in names if name in event)]


class Server:
    """`held` is the plain model: the contents that the engine holds, by its hashes. `ever` are all contents it ever
    held. SGLang's events say nothing of tenants."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = TOPIC,
        block_size: int = BLOCK,
        buffer: int = 10_000,
        dialect: str = "vLLM",
    ) -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self.topic, self.block_size, self.dialect = topic.encode(), block_size, dialect
        self.held: dict[Hashable, Content] = {}
        self.ever: set[Content] = set()
        self.rank = 0
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
        # A free port has a number now.
        self.endpoint, self.replay_endpoint = (
            each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (self._pub, self._router)
        )
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
        """Fill blocks in a row after a held one, with random tokens or with these as far as they fill blocks; return
        their hashes."""
        size = self.block_size
        if tokens is None:
            tokens = [self._random.getrandbits(17) for _ in range(blocks * size)]
        tokens = tokens[: len(tokens) // size * size]
        content = chain_root(salt) if parent is None else self.held[parent]
        hashes: list[Hashable] = []
        for start in range(0, len(tokens), size):
            content = block_content(content, tokens[start : start + size])
            hashes.append(self._hash(content))
            self.held[hashes[-1]] = content
        self.ever.update(self.held.values())
        keys = [[salt], *[None] * (len(hashes) - 1)] if salt else None
        self.publish(stored(hashes, tokens, parent, extra_keys=keys, medium=medium, block_size=size))
        return hashes

    def serve(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """Compute a prompt's blocks that are not held; return the tokens of the others."""
        hashes = [self._hash(each) for each in contents_of(prompt, salt, self.block_size)]
        found = sum(1 for _ in takewhile(self.held.__contains__, hashes))
        cached = found * self.block_size
        if found < len(hashes):
            parent = hashes[found - 1] if found else None
            self.store(parent, salt=None if found else salt, tokens=prompt[cached:])
        return cached

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
            salts = (None, "tenant a", "tenant b") if self.dialect != "SGLang" else (None,)
            self.store(blocks=chance.randint(1, 4), salt=chance.choice(salts))
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
        batch: Any = [time.time(), events, self.rank]
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
                    self._router.send_multipart([client, b"", b"", END, b""])
                self.answers += 1
            elif not self.answering:
                time.sleep(0.01)

    def _passes(self, position: int) -> bool:
        return self.line is None or position < self.line or (position - self.line) // STRETCH % 2 == 1


def follows(events: KVEventSubscriber, server: Server) -> bool:
    """Whether the subscriber's table is exactly what the engine holds."""
    held = set(server.held.values())
    return {content for content in server.ever if events.blocks.holds(content)} == held == held_in(events.blocks).keys()


def troubles(events: KVEventSubscriber) -> set[str]:
    """What happened besides stores and removals, replays apart."""
    counters = events.counters
    names = ("cleared", "gaps", "start_overs", "restarts", "silences", "garbage", "other_topics", "orphans")
    return {name for name in names if getattr(counters, name)}


@contextmanager
def event_servers(folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers in this folder, or on ports of this machine. The block's end stops them."""
    numbers = count()
    with ExitStack() as stack:

        def make(*, start: bool = True, ports: bool = False, **options: Any) -> Server:
            number = next(numbers)
            endpoints = [f"ipc://{folder}/{name}{number}" for name in ("pub", "replay")]
            server = Server(*["tcp://127.0.0.1:*"] * 2 if ports else endpoints, **options)
            stack.callback(server.die)
            if start:
                server.start()
            return server

        yield make
