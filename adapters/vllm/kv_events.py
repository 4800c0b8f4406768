"""Subscription to KV events of vLLM and SGLang over ZMQ."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from threading import Event, Thread
from typing import Any, NamedTuple, Self

from ragorder.common.extras import needs
from ragorder.trie.residency import TierLevel
from ragorder.trie.residency.blocks import EngineBlocks

__all__ = ["LARGEST_MESSAGE_BYTES", "EventCounters", "KVEventSubscriber", "endpoint_of_rank", "events_in"]

LARGEST_MESSAGE_BYTES = 1 << 26
"""Batches have some kilobytes. Without a limit a message is read into memory first."""
# Events are maps; from SGLang and older vLLM, arrays in this order.
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
# Names of vLLM and SGLang; other media count as the device.
_PLACES: dict[Any, TierLevel] = {
    "GPU": TierLevel.DEVICE,
    "CPU": TierLevel.HOST,
    "CPU_PINNED": TierLevel.HOST,
    "STORAGE": TierLevel.DISK,
    "DISK": TierLevel.DISK,
}
_BELOW = (TierLevel.HOST, TierLevel.DISK)
_logger = logging.getLogger("ragorder")
_POLL_MS = 100
_REPLAY_TIMEOUT_S = 5.0
# In longer answers a server drops messages that the connection does not take at once, including the end.
_WHOLE_ANSWER = 1000
_PAUSE_S = 0.5
_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 5.0
_REMEMBERED_BATCHES = 4096
_END = (-1).to_bytes(8, "big", signed=True)


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one of vLLM's data-parallel ranks: the rank is added to the port, unless that is 0."""
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or int(port) == 0:
        return endpoint
    return f"{address}:{int(port) + rank}"


def events_in(batch: Any) -> tuple[list[Any], int]:
    """Return a decoded batch's events and its data-parallel rank."""
    if isinstance(batch, dict):
        # Some versions of vLLM send a map.
        events, rank = batch["events"], batch.get("data_parallel_rank")
    else:
        _, events, *rest = batch
        rank = rest[0] if rest else 0
    return list(events), rank if isinstance(rank, int) else 0


@dataclass(slots=True)
class EventCounters:
    """`start_overs`: without the engine's first events; `restarts`: new engines; `silences`: unanswered replays;
    `garbage`: unreadable messages and events; `orphans`: stored blocks with an unknown parent."""

    batches: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    gaps: int = 0
    replays: int = 0
    start_overs: int = 0
    restarts: int = 0
    silences: int = 0
    garbage: int = 0
    other_topics: int = 0
    orphans: int = 0


class EventReader:
    def __init__(self, decode: Callable[[bytes], Any], counters: EventCounters) -> None:
        self.counters = counters
        self._decode = decode
        self._warned_block_size = False

    def read(self, payload: bytes, blocks: EngineBlocks) -> None:
        """Skip unreadable parts."""
        self.counters.batches += 1
        try:
            events, _ = events_in(self._decode(payload))
        except Exception:
            self.counters.garbage += 1
            return
        for event in events:
            try:
                self._apply(event, blocks)
            except Exception:
                self.counters.garbage += 1

    def _apply(self, event: Any, blocks: EngineBlocks) -> None:
        kind, fields = _fields(event)
        # Other groups of a hybrid model have their own blocks for the same tokens.
        if fields.get("group_idx") or fields.get("locality") == "REMOTE":
            return
        hashes, medium = fields.get("block_hashes", ()), fields.get("medium")
        medium = _PLACES.get(medium, medium)
        if kind == "BlockStored" and medium in _BELOW and not fields.get("extra_keys"):
            # vLLM omits the salt here: only a block known from the device has known content.
            self.counters.orphans += blocks.keep(hashes, medium)
            self.counters.stored += len(hashes)
        elif kind == "BlockStored":
            parent, token_ids, extra_keys = fields["parent_block_hash"], fields["token_ids"], fields.get("extra_keys")
            self._compare(fields.get("block_size"), len(token_ids), len(hashes), blocks.block_size)
            adapter = fields.get("lora_name") or fields.get("lora_id")
            if adapter:
                # In the extra keys it looks like a salt; older engines omit it there.
                extra_keys = [("LoRA", adapter, *(keys or ())) for keys in extra_keys or [None] * len(hashes)]
            orphans = blocks.orphans
            blocks.store(hashes, parent, token_ids, extra_keys, medium)
            self.counters.orphans += blocks.orphans - orphans
            self.counters.stored += len(hashes)
        elif kind == "BlockRemoved":
            blocks.remove(hashes, medium)
            self.counters.removed += len(hashes)
        elif kind == "AllBlocksCleared":
            blocks.clear()
            self.counters.cleared += 1

    def _compare(self, theirs: Any, tokens: int, blocks: int, ours: int) -> None:
        """Warn once of another block size, if the event's own tokens confirm it."""
        if theirs == ours or not (tokens and tokens == theirs * blocks) or self._warned_block_size:
            return
        self._warned_block_size = True
        _logger.warning(
            "the engine's KV blocks have %d tokens, the orderer's %d: give block_size=%d", theirs, ours, theirs
        )


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return event["type"], event
    kind, *values = event
    return kind, dict(zip(_FIELDS.get(kind, ()), values, strict=False))


class _EventBatch(NamedTuple):
    number: int
    payload: bytes


_NOTHING = _EventBatch(-1, b"")


class KVEventSubscriber:
    """Synchronises `blocks` with an engine, on its own thread, until closed.

        events = KVEventSubscriber(blocks, "tcp://host:5557", "tcp://host:5657")

    With a `replay_endpoint` it can start late, fills gaps, and after `check_interval_s` without news checks for missed
    batches and restarts; without one a gap empties `blocks`. `on_pause` is called on that thread when idle. Raises
    ImportError without ragorder[live], ValueError for an invalid endpoint.
    """

    def __init__(
        self,
        blocks: EngineBlocks,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        check_interval_s: float = 1.0,
        on_pause: Callable[[KVEventSubscriber], None] | None = None,
    ) -> None:
        with needs("live", "the subscription to KV events"):
            import zmq
            from msgspec.msgpack import decode
        self._zmq: Any = zmq
        self.blocks = blocks
        self.counters = EventCounters()
        self._reader = EventReader(decode, self.counters)
        self._topic = topic.encode()
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._check_interval_s = check_interval_s
        self._on_pause = on_pause
        self._next = 0
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._synchronised = Event()
        self._stop = Event()
        self._context = self._zmq.Context()
        try:
            self._socket = self._context.socket(self._zmq.SUB)
            watched = self._zmq.EVENT_HANDSHAKE_SUCCEEDED | self._zmq.EVENT_DISCONNECTED
            self._connections = self._socket.get_monitor_socket(watched)
            self._socket.setsockopt(self._zmq.SUBSCRIBE, self._topic)
            self._connect(self._socket, endpoint)
            if replay_endpoint is not None:
                with self._context.socket(self._zmq.DEALER) as socket:
                    self._connect(socket, replay_endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"the endpoint is invalid ({error}): give one like tcp://127.0.0.1:5557") from None
        self._thread = Thread(target=self._run, name="ragorder-kv-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def synchronised(self) -> bool:
        return self._synchronised.is_set()

    def wait_until_synchronised(self, timeout_s: float | None = None) -> bool:
        return self._synchronised.wait(timeout_s)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _connect(self, socket: Any, endpoint: str) -> None:
        zmq = self._zmq
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(1000 * _LONGEST_BACK_OFF_S))
        socket.connect(endpoint)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._synchronise()
                    self._listen()
                except Exception as error:
                    # An error's message may quote tokens: only its type is logged.
                    _logger.debug("KV events: %s", type(error).__name__)
                    self.counters.garbage += 1
                    self._stop.wait(_FIRST_BACK_OFF_S)
        finally:
            self._context.destroy(linger=0)

    def _synchronise(self) -> None:
        wait_s = _FIRST_BACK_OFF_S
        while self._replay_endpoint is not None and not self.synchronised and not self._stop.is_set():
            if self._catch_up():
                return
            self._pause()
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_BACK_OFF_S)

    def _pause(self) -> None:
        if self._on_pause is not None:
            self._on_pause(self)

    def _listen(self) -> None:
        news = time.monotonic()
        while not self._stop.is_set():
            frames = self._socket.recv_multipart() if self._socket.poll(_POLL_MS) else None
            if frames is None:
                self._pause()
            # A new connection may be to another engine, with the same batch numbers.
            check = self._has_new_connection() or time.monotonic() - news >= self._check_interval_s
            if check and self._replay_endpoint is not None:
                if not self._catch_up():
                    return
                news = time.monotonic()
            if frames is not None:
                self._take(frames)
                news = time.monotonic()
            if self._replay_endpoint is not None and not self.synchronised:
                return

    def _has_new_connection(self) -> bool:
        is_new = False
        while self._connections.poll(0):
            event = int.from_bytes(self._connections.recv_multipart()[0][:2], sys.byteorder)
            if event == self._zmq.EVENT_DISCONNECTED:
                # ZMQ itself never reconnects to a server that sent a message beyond the limit.
                with suppress(self._zmq.ZMQError):
                    self._socket.disconnect(self._endpoint)
                self._socket.connect(self._endpoint)
            else:
                is_new = True
        return is_new

    def _take(self, frames: list[bytes]) -> None:
        batch = self._read(frames)
        if batch is None or self._is_repeated(batch):
            return
        if batch.number == self._next and (self._next or self._replay_endpoint is not None):
            self._apply(self.blocks, batch)
        elif self._replay_endpoint is None:
            self._lose_track(same_engine=batch.number >= self._next)
            self._start_over([batch])
        elif batch.number > self._next:
            self.counters.gaps += 1
            if self._catch_up() and not self._is_repeated(batch):
                # No replay has the batch: it never came from this engine.
                self.counters.garbage += 1
        else:
            self._catch_up()

    def _catch_up(self) -> bool:
        """Return False without an answer."""
        self.counters.replays += 1
        known = self._next - 1
        told = self._replay(max(0, known))
        try:
            if known < 0 and not self.synchronised:
                self._start_over(told)
            elif known < 0 or self._is_repeated(first := next(told, _NOTHING)):
                for batch in told:
                    if batch.number == self._next:
                        self._apply(self.blocks, batch)
                    else:
                        # The server has lost the batches before this one.
                        self._lose_track(same_engine=True)
                        self._start_over(chain([batch], told))
            else:
                # Another batch or no batch has this number: another engine. A later number: too much was missed.
                told.close()
                self._lose_track(same_engine=first.number > known)
                self._start_over(self._replay(0))
        except TimeoutError:
            self.counters.silences += 1
            self._synchronised.clear()
            return False
        finally:
            told.close()
        self._synchronised.set()
        return True

    def _lose_track(self, *, same_engine: bool) -> None:
        if not self._next:
            return
        self._next = 0
        if same_engine:
            self.counters.gaps += 1
        else:
            self.counters.restarts += 1
            self.blocks.replace(self.blocks.make_successor(same_engine=False), same_engine=False)

    def _start_over(self, told: Iterable[_EventBatch]) -> None:
        blocks = self.blocks.make_successor(same_engine=True)
        self._recent.clear()
        self._next = 0
        try:
            for batch in told:
                if batch.number != self._next:
                    # Earlier batches are no longer available.
                    self.counters.start_overs += 1
                    blocks.clear()
                self._apply(blocks, batch)
        except Exception:
            self._next = 0
            self._synchronised.clear()
            raise
        self.blocks.replace(blocks, same_engine=True)
        self._synchronised.set()

    def _replay(self, first: int) -> Generator[_EventBatch, None, None]:
        """Yield available batches. Raises TimeoutError without an answer."""
        wanted, heard = first, _WHOLE_ANSWER
        while heard >= _WHOLE_ANSWER:
            heard = 0
            with closing(self._ask(wanted)) as answer:
                for batch in answer:
                    if heard >= _WHOLE_ANSWER and batch.number != wanted:
                        break
                    if batch.number >= wanted:
                        yield batch
                        wanted, heard = batch.number + 1, heard + 1

    def _ask(self, first: int) -> Generator[_EventBatch, None, None]:
        """Yield the batches of a replay. A long answer may lack batches and its end."""
        heard = 0
        with self._context.socket(self._zmq.DEALER) as socket:
            self._connect(socket, self._replay_endpoint or "")
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            deadline = time.monotonic() + _REPLAY_TIMEOUT_S
            while not self._stop.is_set() and time.monotonic() < deadline:
                if not socket.poll(_POLL_MS):
                    continue
                frames = socket.recv_multipart()[1:]
                if frames[-2:-1] == [_END]:
                    return
                # Older vLLM omits the topic here.
                batch = self._read(frames if len(frames) == 3 else [self._topic, *frames])
                if batch is not None:
                    yield batch
                    heard += 1
                    deadline = time.monotonic() + (_REPLAY_TIMEOUT_S if heard < _WHOLE_ANSWER else _PAUSE_S)
            if heard < _WHOLE_ANSWER or self._stop.is_set():
                raise TimeoutError

    def _read(self, frames: list[bytes]) -> _EventBatch | None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.counters.garbage += 1
        elif self._topic and frames[0] != self._topic:
            self.counters.other_topics += 1
        else:
            return _EventBatch(int.from_bytes(frames[1], "big"), frames[2])
        return None

    def _is_repeated(self, batch: _EventBatch) -> bool:
        """Return whether the live stream or a replay has already brought this batch."""
        return self._recent.get(batch.number) == hash(batch.payload)

    def _apply(self, blocks: EngineBlocks, batch: _EventBatch) -> None:
        self._next = batch.number + 1
        self._recent[batch.number] = hash(batch.payload)
        if len(self._recent) > _REMEMBERED_BATCHES:
            self._recent.popitem(last=False)
        self._reader.read(batch.payload, blocks)
