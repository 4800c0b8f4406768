"""Serving an ASGI application on a socket."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import sys
from contextlib import suppress

import click
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.cli.connection import HEAD_LIMIT, timed_connections

__all__ = ["address_of", "is_loopback", "listen", "run_server", "server_config"]

_BACKLOG = 2048
# Clients keep a connection for less: it is them who close it, and never while the other side begins a request.
_KEEP_ALIVE_S = 75
_OTHER_FILES = 64


# How long a thread may keep the interpreter, in seconds, while others wait for it: the event loop does so several times
# in each request, and after five milliseconds, as is usual, behind every thread that works on a body.
_SWITCH_S = 5e-4


def run_server(
    app: ASGIApp, listening: socket.socket, *, grace_s: int, client_s: float = 30.0, connections: int = 1024
) -> None:
    """Serve until the process is told to stop; requests in flight then have `grace_s` seconds to end. Clients have
    `client_s` seconds for each thing that they are waited for, and at most `connections` connections."""
    most = min(connections, _allow_many_connections())
    sys.setswitchinterval(_SWITCH_S)
    try:
        with suppress(KeyboardInterrupt):
            _Server(server_config(app, grace_s=grace_s, client_s=client_s, connections=most)).run(sockets=[listening])
    finally:
        # What stays frozen is not torn down at the end, and there are extensions that complain of it then.
        gc.unfreeze()


def server_config(app: ASGIApp, *, grace_s: int, client_s: float, connections: int) -> uvicorn.Config:
    """How uvicorn is to serve the application. The parser is h11 whatever is installed: httptools, which uvicorn
    prefers, takes headers without end."""
    return uvicorn.Config(
        _cancelled_quietly(app),
        http=timed_connections(client_s, connections),
        h11_max_incomplete_event_size=HEAD_LIMIT,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )


def _cancelled_quietly(app: ASGIApp) -> ASGIApp:
    """The application; of each request that is cancelled when the grace is over uvicorn logs one line, no traceback."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise

    return run


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What has been loaded stays: a collector that looks through it again and again holds up every stream.
        gc.collect()
        gc.freeze()
        for listening in sockets or ():
            click.echo(f"Serving on {address_of(listening)}/v1", err=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises click.ClickException if it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Connections inherit it. asyncio sees to it only for sockets that it made itself, and an answer in two pieces
        # would wait 40 ms for the first one to be acknowledged.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise click.ClickException(f"{host} port {port}: {error.strerror}: give another --host or --port") from None


def address_of(listening: socket.socket) -> str:
    """The URL at which clients reach it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _allow_many_connections() -> int:
    """How many requests there can be at a time: each takes two file descriptors, of which many systems allow 1,024
    unless a program asks for more."""
    try:
        import resource
    except ImportError:
        return sys.maxsize
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else max(1, (allowed - _OTHER_FILES) // 2)
