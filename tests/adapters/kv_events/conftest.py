"""Servers that publish KV events, and subscribers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.waiting import eventually

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from support.event_server import BLOCK, TOPIC, Server, event_servers

from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.trie.residency.blocks import EngineBlocks

NEVER_S = 600.0

Serve = Callable[..., Server]
Subscribe = Callable[..., KVEventSubscriber]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with event_servers(tmp_path) as serve:
        yield serve


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    """Subscribes to a server and waits until nothing of the beginning is under way any more."""
    with ExitStack() as stack:

        def make(server: Server, *, replay: bool = True, settled: bool = True, **options: Any) -> KVEventSubscriber:
            blocks = EngineBlocks(BLOCK)
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
