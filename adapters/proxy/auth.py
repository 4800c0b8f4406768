"""The proxy's own API key."""

from __future__ import annotations

import hmac
from base64 import b64decode

from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.http_server.errors import ProxyError

__all__ = ["RequireKey"]

_CHALLENGES = [(b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="ragorder", charset="UTF-8"')]


class RequireKey:
    """Lets only requests pass that bring the key: as Bearer token, or as password of basic authentication, whatever the
    user, so that a browser can ask for it. `open_paths` need none."""

    def __init__(self, app: ASGIApp, key: str, *, open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        # Secrets are often kept in files that end in a newline, which no header can bring.
        self._key = key.strip().encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._brings_key(scope):
            error = ProxyError(
                401,
                "The proxy wants its API key: send it as Authorization: Bearer KEY, which the api_key of an OpenAI "
                "client is.",
                code="invalid_api_key",
                headers=_CHALLENGES,
            )
            await error.send(send)
        else:
            await self._app(scope, receive, send)

    def _brings_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_secret(given[0]), self._key)


def _secret(authorization: bytes) -> bytes:
    """The token or password of an Authorization header; b"" for none, which is nobody's key."""
    scheme, _, secret = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return secret.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(secret.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""
