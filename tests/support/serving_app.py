"""ASGI applications on ports of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from support.waiting import eventually

_GRACE_S = 2


@contextmanager
def serving() -> Iterator[Callable[[Any], str]]:
    """Serves applications, with their lifespan; gives their addresses. The block's end stops them."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(app: Any) -> str:
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        # The parser that `ragorder serve` has, and no headers but the application's.
        plain: dict[str, Any] = {"http": "h11", "ws": "none", "server_header": False, "date_header": False}
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, **plain))
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
