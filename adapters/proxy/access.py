"""Access control of the proxy."""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import header

__all__ = ["THIS_MACHINE", "APIKeyMiddleware", "HostMiddleware"]

THIS_MACHINE = frozenset({"127.0.0.1", "::1", "localhost"})
# Without it a page of another origin cannot read an error. Its key or its origin has been checked, or the error only
# says that a key is needed.
_READABLE = (b"access-control-allow-origin", b"*")
_CHALLENGES = [(b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="ragorder", charset="UTF-8"')]


class APIKeyMiddleware:
    """Requires the key, as Bearer token, as the password of basic authentication (browsers), or as x-api-key
    (Anthropic's clients). Browsers ask without the key whether a page may send a request: the server answers that, as
    vLLM does."""

    def __init__(self, app: ASGIApp, key: str, *, open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        # Secrets are often kept in files that end in a newline, which no header can contain.
        self._key = key.strip().encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and scope["path"] not in self._open_paths
        if is_checked and not self._has_key(scope) and not _is_preflight(scope):
            raise HTTPError(
                401,
                "The proxy requires its API key: send it as Authorization: Bearer KEY or x-api-key: KEY (the api_key "
                "of an OpenAI or Anthropic client).",
                code="invalid_api_key",
                headers=[*_CHALLENGES, _READABLE],
            )
        await _run(self._app, scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        secrets = [_secret(value) for name, value in scope["headers"] if name == b"authorization"]
        secrets = secrets or [value for name, value in scope["headers"] if name == b"x-api-key"]
        return len(secrets) == 1 and hmac.compare_digest(secrets[0], self._key)


class HostMiddleware:
    """Refuses requests for other hosts, and web pages from elsewhere (DNS rebinding). For a proxy without a key."""

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
        await _run(self._app, scope, receive, send)

    def _is_foreign(self, address: bytes) -> bool:
        try:
            return b"@" in address or urlsplit(address.decode("latin-1")).hostname not in self._hosts
        except ValueError:
            return True


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await app(scope, receive, send)
    except HTTPError as error:
        error.headers = [*error.headers, _READABLE]
        raise


def _is_preflight(scope: Scope) -> bool:
    """Without a body, which is not for a stranger to send."""
    headers = scope["headers"]
    return (
        scope["method"] == "OPTIONS"
        and header(headers, b"origin") is not None
        and header(headers, b"access-control-request-method") is not None
        and header(headers, b"transfer-encoding") is None
        and header(headers, b"content-length") in (None, b"0")
    )


def _secret(authorization: bytes) -> bytes:
    scheme, _, secret = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return secret.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(secret.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _refused(what: str, header: str, code: str) -> HTTPError:
    message = f"{what} ({header}) that is not allowed: allow it (--allow-host), or require a key (--api-key)."
    return HTTPError(403, message, code=code)
