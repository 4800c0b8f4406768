"""Requests that a web page makes a browser send (cross-site requests, DNS rebinding)."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.http_server.errors import ProxyError

__all__ = ["THIS_MACHINE", "RequireHost"]

THIS_MACHINE = frozenset({"127.0.0.1", "::1", "localhost"})


class RequireHost:
    """Lets only requests pass that were sent to one of the `hosts` (names without ports), and by no web page of another
    one. `open_paths` are for all. It is for a proxy that has no key, and is meant for this machine alone."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], *, open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or self._is_foreign(b"//" + hosts[0]):
                raise _refused("It was sent to a host", "Host", "foreign_host")
            if any(self._is_foreign(value) for name, value in scope["headers"] if name == b"origin"):
                raise _refused("It comes from a web page of a host", "Origin", "foreign_origin")
        await self._app(scope, receive, send)

    def _is_foreign(self, address: bytes) -> bool:
        try:
            return b"@" in address or urlsplit(address.decode("latin-1")).hostname not in self._hosts
        except ValueError:
            return True


def _refused(what: str, header: str, code: str) -> ProxyError:
    message = f"{what} ({header}) that this proxy does not know: allow it (--allow-host), or ask for a key (--api-key)."
    return ProxyError(403, message, code=code)
