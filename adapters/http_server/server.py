"""ASGI applications on uvicorn, and their access log."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragorder.adapters.http_server.connection import HEAD_LIMIT, timed_connections


class Certificate(NamedTuple):
    """PEM files; without `key` the first one has both."""

    file: Path
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises OSError, or ValueError without a certificate and an unencrypted key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.file, self.key, password="")
        except ssl.SSLError as error:
            reason = (error.reason or "not in PEM format").lower().replace("_", " ")
            raise ValueError(
                f"no certificate with its key, or the key is encrypted ({reason}): give unencrypted PEM files"
            ) from None
        return context


_BACKLOG = 2048
_AT_ONCE = 16
# Longer than clients keep idle connections: they close them, so that the server never closes one as a request arrives.
_KEEP_ALIVE_S = 75
_OTHER_FILES = 64

# Seconds for which a thread may keep the interpreter while others wait. The event loop waits that long several times in
# each request, for every thread that works on a body. Python's default is five milliseconds.
_SWITCH_S = 5e-4


def run_server(
    app: ASGIApp,
    listening: socket.socket,
    *,
    on_started: Callable[[], None] = lambda: None,
    on_tick: Callable[[int], bool] = lambda count: False,
    **options: Any,
) -> None:
    """Serve, with the options of `server_config`, until the process is stopped, or `on_tick`, called ten times a
    second, returns True."""
    sys.setswitchinterval(_SWITCH_S)
    try:
        with suppress(KeyboardInterrupt):
            _UvicornServer(server_config(app, **options), on_started, on_tick).run(sockets=[listening])
    finally:
        # Python does not free frozen objects when the process ends; some extensions complain of that.
        gc.unfreeze()


def server_config(
    app: ASGIApp,
    *,
    grace_s: int,
    client_s: float,
    connections: int,
    probes: Collection[str] = (),
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """After a stop requests in flight have `grace_s` seconds. Other options are those of `timed_connections`, whose
    limit is `connections`. The parser is h11, as httptools accepts endless headers; warnings of single requests, with
    which clients could fill the log, are off."""
    encryption = None if certificate is None else certificate.context()
    return uvicorn.Config(
        _cancelled_quietly(app),
        http=timed_connections(client_s, connections, probes=probes, encryption=encryption),
        h11_max_incomplete_event_size=HEAD_LIMIT,
        ws="none",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )


def _cancelled_quietly(app: ASGIApp) -> ASGIApp:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise

    return run


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], on_tick: Callable[[int], bool]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_tick = on_tick

    # Not in `startup`: a server stopped there would end without the application's shutdown.
    async def main_loop(self) -> None:
        # Objects loaded now stay: a collector that scans them repeatedly would delay every stream.
        gc.collect()
        gc.freeze()
        self._on_started()
        await super().main_loop()

    async def on_tick(self, counter: int) -> bool:
        ends = self._on_tick(counter)
        return await super().on_tick(counter) or ends


class _Listening(socket.socket):
    """Accepts a few connections at a time: asyncio would accept all that wait before one counts against the limit."""

    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self._accepted = (self._accepted + 1) % _AT_ONCE
        if self._accepted == 0:
            raise BlockingIOError
        return super().accept()


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """If `shared`, other sockets may listen on the port. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.create_server(address[:2], family=family, backlog=_BACKLOG, reuse_port=shared)
    listening = _Listening(fileno=made.detach())
    # Connections inherit it. asyncio sets it only on its own sockets; without it the second part of an answer waits 40
    # ms for the acknowledgement of the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket, scheme: str = "http") -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def most_connections() -> int:
    """Raise the limit of open files (usually 1,024) to the system's maximum. Return how many connections it allows: a
    request takes two files, to its client and upstream."""
    try:
        import resource
    except ImportError:
        return sys.maxsize
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else max(1, (files - _OTHER_FILES) // 2)


_logger = logging.getLogger("ragorder.access")
_LONGEST_PATH = 200


class AccessLog:
    """Logs each request's method, path, status and seconds; nothing of body, headers or query."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, ended, start = 0, False, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status, ended
            status = message.get("status", status)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Percent-encoded, so that no path can add a line to the log.
            path = scope["raw_path"][:_LONGEST_PATH].decode("ascii", "backslashreplace")
            seconds = time.perf_counter() - start
            broken = "" if ended else " (cut off)" if status else " (no answer)"
            _logger.info("%s %s %s %.3f s%s", scope["method"], path, status or "-", seconds, broken)
