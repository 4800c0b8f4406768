"""Scope of a request: what it can share a cached prefix with."""

from __future__ import annotations

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.openai.endpoint import checked_salt
from ragorder.adapters.proxy.body import Body, PromptPrefix
from ragorder.adapters.proxy.digest import digest_of
from ragorder.adapters.proxy.schema import FIELD

__all__ = ["salt_of", "scope_of"]


def scope_of(body: Body, salt: str | None, prefix: PromptPrefix) -> bytes:
    """Of model, tenant and everything in front of the documents."""
    fields = (body.fields.get(name) for name in ("model", *body.shapes_prefix))
    return digest_of(
        body.route,
        salt,
        *(None if field is None else bytes(field) for field in fields),
        str(len(prefix.messages)),
        *map(bytes, prefix.messages),
        prefix.role,
        *map(bytes, prefix.parts),
        prefix.text,
    )


def salt_of(body: Body, scope: str | None) -> str | None:
    """The tenant's salt, from either field. Raises HTTPError."""
    salt = body.string("cache_salt")
    if scope is not None and salt not in (None, scope):
        message = f"{FIELD}.scope: is sent as cache_salt, but the body has a different one: give one of them."
        raise HTTPError(400, message, code="conflicting_scope", param=f"{FIELD}.scope")
    salt = scope if salt is None else salt
    if salt is None:
        return None
    try:
        return checked_salt(salt)
    except ValueError as error:
        raise HTTPError(400, f"cache_salt: {error}", code="invalid_cache_salt", param="cache_salt") from None
