"""Check of KV events, by the blocks of a test prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ragorder.adapters.doctor.case import Finding
from ragorder.adapters.http_client import ServerError
from ragorder.adapters.vllm.kv_events import LARGEST_MESSAGE_BYTES, endpoint_of_rank, events_in
from ragorder.common.extras import needs
from ragorder.common.jsonl import printable

_END = (-1).to_bytes(8, "big", signed=True)
_FAR_AWAY = 1 << 62
_HEAD_TOKENS = 16
_LONGEST_WAIT_S = 10.0
_HANDSHAKE_S = 3.0
_FIRST_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Events:
    """ZMQ endpoints of a server's KV events, such as tcp://HOST:5557."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class _HeardEvents:
    connected: bool
    batch: int | None = None
    rank: int = 0
    topic: str = ""


def check_events(
    events: Events | None, host: str, engines: int, serve: Callable[[], Sequence[int]], timeout_s: float
) -> list[Finding]:
    """Listen to the engines' events while `serve` computes prompts and returns their tokens, then replay one. Raises
    ImportError without ragorder[live]."""
    if events is None:
        found = "not checked: without KV events, cached documents are estimated by an LRU mirror of the block pool"
        return [Finding("KV events", "unknown", found, _how_to_publish(host, engines))]
    timeout_s = min(timeout_s, _LONGEST_WAIT_S)
    try:
        heard = _listen([endpoint_of_rank(events.endpoint, rank) for rank in range(engines)], serve, timeout_s)
    except ServerError as error:
        return [Finding("KV events", "unknown", str(error), "fix the request first, then check the events again")]
    except ValueError as error:
        return [_no_endpoint("KV events", events.endpoint, error)]
    return [_judge(events, heard, _how_to_publish(host, engines), timeout_s), _check_replay(events, heard, timeout_s)]


def _judge(events: Events, heard: _HeardEvents, how_to_publish: str, timeout_s: float) -> Finding:
    at = printable(events.endpoint)
    if not heard.connected:
        return Finding("KV events", "bad", f"there is no publisher at {at}", how_to_publish)
    if heard.batch is None:
        found = f"{at} sent no event for the computed prompts within {timeout_s:g} s"
        return Finding("KV events", "bad", found, f"give this server's own endpoint; {how_to_publish}")
    topic = printable(heard.topic)
    if not heard.topic.startswith(events.topic):
        advice = f'subscribe to it with --events-topic "{topic}", or start the server with your topic'
        return Finding("KV events", "bad", f'{at} publishes under the topic "{topic}"', advice)
    at = printable(endpoint_of_rank(events.endpoint, heard.rank))
    return Finding("KV events", "good", f"{at} published the blocks of a test prompt, topic {topic!r}")


def _check_replay(events: Events, heard: _HeardEvents, timeout_s: float) -> Finding:
    if events.replay_endpoint is None:
        found = "no replay endpoint given: missed events cannot be replayed"
        advice = "give the replay_endpoint of the server's --kv-events-config as --replay-endpoint"
        return Finding("event replay", "unknown", found, advice)
    endpoint = endpoint_of_rank(events.replay_endpoint, heard.rank)
    at = printable(endpoint)
    try:
        replayed = _replayed(endpoint, heard.batch, timeout_s)
    except ValueError as error:
        return _no_endpoint("event replay", endpoint, error)
    if replayed is None:
        advice = "give the replay_endpoint of the server's --kv-events-config, with an address reachable from here"
        return Finding("event replay", "bad", f"there is no answer from {at}", advice)
    if not replayed:
        advice = "give this server's own replay endpoint, and raise buffer_steps in its --kv-events-config"
        return Finding("event replay", "bad", f"{at} does not have the last published batch", advice)
    if heard.batch is None:
        return Finding("event replay", "unknown", f"{at} answers, but there was no event to ask for", "see KV events")
    return Finding("event replay", "good", f"{at} replays published events")


def _no_endpoint(check: str, endpoint: str, error: ValueError) -> Finding:
    advice = "give it as tcp://HOST:PORT, with the server's host name instead of *"
    return Finding(check, "bad", f"{printable(endpoint)} is not a valid endpoint ({error})", advice)


def _how_to_publish(host: str, engines: int) -> str:
    config: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
    if host in ("127.0.0.1", "localhost", "::1") and engines == 1:
        # vLLM binds a tcp endpoint for events on every interface, or not at all.
        endpoint, replay_endpoint = "ipc:///tmp/vllm-events", "tcp://127.0.0.1:5657"
        kept = "keep them to this machine, and use tcp://*:5557 only for a server in a container"
    else:
        # Data-parallel ranks use consecutive ports.
        endpoint, replay_endpoint = "tcp://*:5557", "tcp://*:5657"
        kept = "keep these ports to a private network"
    config |= {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
    host = f"[{host}]" if ":" in host else host
    return (
        f"start vLLM with --enable-prefix-caching --kv-events-config '{json.dumps(config)}' and look there with "
        f"--events-endpoint {endpoint.replace('*', host)} --replay-endpoint {replay_endpoint.replace('*', host)}; "
        f"events carry the tokens of every prompt: {kept}"
    )


def _listen(endpoints: Sequence[str], serve: Callable[[], Sequence[int]], timeout_s: float) -> _HeardEvents:
    deadline = time.monotonic() + timeout_s
    with _socket("SUB", endpoints) as (zmq, socket, shaken):
        # All topics, to tell a wrong topic from silence.
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        if not shaken.poll(int(1000 * min(_HANDSHAKE_S, timeout_s))):
            return _HeardEvents(connected=False)
        prompts: list[list[int]] = []
        patience_s = _FIRST_PATIENCE_S
        # More than one prompt: the subscription may reach the publisher after the first prompt has reached its engine.
        while time.monotonic() < deadline:
            prompts.append(list(serve()))
            served = time.monotonic()
            for frames in _frames(socket, min(served + patience_s, max(deadline, served + 1))):
                # Other messages may be published there.
                with suppress(Exception):
                    topic, number, payload = frames
                    stored, rank = _stored(payload)
                    # The endpoint of an engine alone is given as it is, whatever the engine's rank.
                    rank = rank if len(endpoints) > 1 else 0
                    if len(number) == 8 and any(_begins(prompt, stored) for prompt in prompts):
                        return _HeardEvents(True, int.from_bytes(number, "big"), rank, topic.decode("utf-8", "replace"))
            patience_s *= 2
    return _HeardEvents(connected=True)


def _replayed(endpoint: str, batch: int | None, timeout_s: float) -> bool | None:
    """Return whether the batch (None: anything) was replayed, or None without an answer."""
    with _socket("DEALER", [endpoint]) as (_, socket, _shaken):
        wanted = (_FAR_AWAY if batch is None else batch).to_bytes(8, "big")
        socket.send_multipart([b"", wanted])
        for frames in _frames(socket, time.monotonic() + timeout_s):
            # Frames are [b"", topic, number, payload].
            number = frames[-2] if len(frames) > 1 else b""
            if number in (wanted, _END):
                return number == wanted or batch is None
    return None


@contextmanager
def _socket(kind: str, endpoints: Sequence[str]) -> Iterator[tuple[Any, Any, Any]]:
    with needs("live", "talking to a server"):
        import msgspec  # noqa: F401
        import zmq
    context = zmq.Context()
    try:
        socket = context.socket(getattr(zmq, kind))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE_BYTES)
        shaken = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for endpoint in dict.fromkeys(endpoints):
            socket.connect(endpoint)
        yield zmq, socket, shaken
    except zmq.ZMQError as error:
        raise ValueError(str(error)) from None
    finally:
        context.destroy(linger=0)


def _frames(socket: Any, deadline: float) -> Iterator[list[bytes]]:
    while (left := deadline - time.monotonic()) > 0:
        if socket.poll(int(1000 * left) + 1):
            yield socket.recv_multipart()


def _stored(payload: bytes) -> tuple[list[int], int]:
    import msgspec

    events, rank = events_in(msgspec.msgpack.decode(payload))
    tokens: list[int] = []
    for event in events:
        # Events are maps; from SGLang and older vLLM arrays.
        kind = event["type"] if isinstance(event, dict) else event[0]
        if kind == "BlockStored":
            tokens += event["token_ids"] if isinstance(event, dict) else event[3]
    return tokens, rank


def _begins(prompt: list[int], stored: list[int]) -> bool:
    head = prompt[:_HEAD_TOKENS]
    return any(stored[start : start + len(head)] == head for start in range(len(stored) - len(head) + 1))
