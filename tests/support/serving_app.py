"""ASGI applications on ports of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from ragorder.adapters.http_server.server import server_config
from support.waiting import eventually

_GRACE_S = 2


@contextmanager
def serving() -> Iterator[Callable[[Any], str]]:
    """Serves applications, with their lifespan; gives their addresses. The block's end stops them."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(app: Any) -> str:
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        server = uvicorn.Server(server_config(app, grace_s=_GRACE_S, client_s=60.0, connections=10_000))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        started.append((server, thread))
        assert eventually(lambda: server.started)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    try:
        yield serve
    finally:
        for server, _ in started:
            server.should_exit = True
        for server, thread in started:
            thread.join(_GRACE_S)
            # An answer without end would keep it, and a forced end leaves out that of the lifespan.
            server.force_exit = True
            thread.join(60)
