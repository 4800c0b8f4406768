"""Headers, whose names are in lower case."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)


def end_to_end(headers: Iterable[tuple[bytes, bytes]], *dropped: bytes) -> Headers:
    """Return headers in lower case, without `dropped` and hop-by-hop ones (RFC 9110 7.6.1)."""
    lowered = [(name.lower(), value) for name, value in headers]
    left_out = _HOP_BY_HOP.union(dropped)
    for name, value in lowered:
        if name == b"connection":
            left_out |= {option.strip().lower() for option in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in left_out]


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for each, value in headers if each == name), None)


def is_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    kind = (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json")


def without(headers: Headers, name: bytes) -> Headers:
    return [(each, value) for each, value in headers if each != name]
