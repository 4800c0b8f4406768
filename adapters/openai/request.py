"""Checked options of a request, with the tenant's salt."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["checked_options", "checked_salt"]

_OWNED = ("messages", "model", "prompt", "stream", "stream_options")
# Refused by vLLM 0.32 (validate_cache_salt); versions without that check refuse an empty salt only.
_MAX_SALT_LENGTH = 128
_NOT_IN_SALT = frozenset("@/\\\0")


def checked_options(options: dict[str, Any], scope: Hashable, send_salt: bool) -> dict[str, Any]:
    """The caller's options for create(), without those that are None, with the scope's salt.

    Raises TypeError or ValueError for options that the client sets itself, ValueError for a scope that cannot be a
    salt. The errors name options, never their values.
    """
    sent = {name: value for name, value in options.items() if value is not None}
    body = sent["extra_body"] = dict(sent.get("extra_body", ()))
    for name in _OWNED:
        if name in sent or name in body:
            raise TypeError(f"{name} is not an option of a request: the client sets it")
    if (sent | body).get("n") not in (None, 1):
        raise ValueError("n must be 1: an ordered request has one answer")
    if "max_completion_tokens" in sent:
        sent.pop("max_tokens", None)
    if send_salt and (scope is None or isinstance(scope, str)):
        if body.get("cache_salt", scope) != scope:
            raise ValueError("extra_body has a cache_salt that is not the scope: give it as scope, and only there")
        if scope is not None:
            body["cache_salt"] = checked_salt(scope)
    return sent


def checked_salt(scope: str) -> str:
    """The scope. Raises ValueError for one that cannot be sent as a salt."""
    if 0 < len(scope) <= _MAX_SALT_LENGTH and _NOT_IN_SALT.isdisjoint(scope):
        return scope
    raise ValueError(
        "a scope is sent as cache_salt, and vLLM refuses one that is empty, has more than 128 characters, or has "
        "@, /, \\ or NUL in it: give None for no tenant, scope=hashlib.sha256(name.encode()).hexdigest() for this name"
    )
