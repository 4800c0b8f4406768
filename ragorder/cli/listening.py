"""Serving an ASGI application on a socket."""

from __future__ import annotations

import gc
import ipaddress
import socket
from contextlib import suppress

import click
import uvicorn
from starlette.types import ASGIApp

__all__ = ["is_loopback", "listen", "run_server"]

_BACKLOG = 2048
# Clients keep a connection for less: it is them who close it, and never while the other side begins a request.
_KEEP_ALIVE_S = 75


def run_server(app: ASGIApp, listening: socket.socket, *, grace_s: int) -> None:
    """Serve until the process is told to stop; requests in flight then have `grace_s` seconds to end."""
    _allow_many_connections()
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )
    try:
        with suppress(KeyboardInterrupt):
            _Server(config).run(sockets=[listening])
    finally:
        # What stays frozen is not torn down at the end, and there are extensions that complain of it then.
        gc.unfreeze()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What has been loaded stays: a collector that looks through it again and again holds up every stream.
        gc.collect()
        gc.freeze()
        for listening in sockets or ():
            click.echo(f"Serving on {_address(listening)}/v1", err=True)


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


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _allow_many_connections() -> None:
    """Every request in flight takes two file descriptors; many systems allow 1,024 unless a program asks for more."""
    try:
        import resource
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
