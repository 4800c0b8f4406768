"""What goes on the wire: the caller's options, checked, with the tenant's salt."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["checked_options"]

_OWNED = ("messages", "model", "prompt", "stream", "stream_options")
# What vLLM 0.32 accepts (validate_cache_salt); earlier versions only refuse an empty one.
_MAX_SALT_LENGTH = 128
_NOT_IN_SALT = frozenset("@/\\\0")


def checked_options(options: dict[str, Any], scope: Hashable, send_salt: bool) -> dict[str, Any]:
    """The caller's options for create(), with the scope's salt; None leaves an option to the server.

    Raises TypeError or ValueError for what is not the caller's to set, ValueError for a scope that cannot be a salt.
    The errors name options, and never show what is in them.
    """
    body = dict(options.get("extra_body") or {})
    for name in _OWNED:
        if name in options or name in body:
            raise TypeError(f"{name} is not an option of a request: the client sets it")
    if any(given.get("n") not in (None, 1) for given in (options, body)):
        raise ValueError("n must be 1: an ordered request has one answer")
    if send_salt:
        _add_salt(body, scope)
    sent = {name: value for name, value in (options | {"extra_body": body or None}).items() if value is not None}
    if "max_completion_tokens" in sent:
        sent.pop("max_tokens", None)
    return sent


def _add_salt(body: dict[str, Any], scope: Hashable) -> None:
    salt = body.get("cache_salt")
    if salt is not None and salt != scope and (scope is None or isinstance(scope, str)):
        raise ValueError("extra_body has a cache_salt that is not the scope: give it as scope, and only there")
    if not isinstance(scope, str):
        return
    if not 0 < len(scope) <= _MAX_SALT_LENGTH or not _NOT_IN_SALT.isdisjoint(scope):
        raise ValueError(
            "a scope is sent as cache_salt, and vLLM refuses one that is empty, has more than 128 characters, or has "
            "@, /, \\ or NUL among them: give None for no tenant, and for a name like this one "
            "scope=hashlib.sha256(name.encode()).hexdigest()"
        )
    body["cache_salt"] = scope
