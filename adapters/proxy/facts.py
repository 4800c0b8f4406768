"""What a server with ragorder's tiers is told of a request, in the body that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ragorder.adapters.proxy.body import Fields, decode
from ragorder.adapters.request_facts import FACTS, FIELD, request_facts

__all__ = ["add_facts"]

_NULL = msgspec.Raw(b"null")


def add_facts(fields: Fields, document_ends: Sequence[int], salt: str | None, prefix_tokens: int = 0) -> None:
    """Put the facts of a request into its fields. What the client has put there itself stays as it is, byte by byte;
    facts of its own go before ours. What is no object is for the server to refuse."""
    given = fields.get(FIELD, _NULL)
    params = {} if given == _NULL else decode(given, Fields)
    own = {} if params is None or FACTS not in params else decode(params[FACTS], Fields)
    if params is None or own is None:
        return
    facts: dict[str, Any] = request_facts(document_ends, salt, prefix_tokens) | own
    if facts:
        fields[FIELD] = msgspec.Raw(msgspec.json.encode(params | {FACTS: facts}))
