"""Untrusted JSON: values counted before decoding, lone surrogates replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ragorder.errors import RagorderError

MAX_VALUES = 1 << 16
"""Most values of a body that become Python objects: members of JSON objects and items of lists at all depths."""

VALUE_BYTES = 200
"""Most bytes of such an object besides its text."""

NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""A decoder's errors for unreadable content."""

_WINDOW = 1 << 18

# JSON may have escapes of lone surrogates, which Python's decoder keeps and UTF-8 cannot encode. While a body is
# processed, the last 2,048 code points, which no character uses, stand for them; `HiddenSurrogates.show` restores them.
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?:%s)?|%s" % (_LOW, _LOW))
_FIRST, _FIRST_HIDDEN = 0xD800, 0x10F800
_ESCAPE = 6
_MOST_SURROGATES = 4096
_HIDDEN = re.compile(rb"\xf4\x8f[\xa0-\xbf][\x80-\xbf]")
_HIDDEN_ESCAPED = re.compile(rb"\\u[dD][bB][fF][eEfF]\\u[dD][c-fC-F]")
_BACKSLASH = ord("\\")


class TooManyValuesError(RagorderError, ValueError):
    """A JSON text has too many values."""


def count_values(content: bytes | msgspec.Raw, limit: int) -> int:
    """Return an upper bound, without decoding. Raises TooManyValuesError above `limit`."""
    content = bytes(content)
    # Each value except the outermost follows a comma, or is the first of its list or object.
    quick = 1 + sum(map(content.count, (b",", b"[", b"{")))
    return quick if quick <= limit else count_outside_texts(content, limit)


def count_outside_texts(content: bytes, limit: int) -> int:
    """Count as `count_values`, but not in texts (JSON strings)."""
    found, texts, start, in_text = 1, 0, 0, False
    while start < len(content):
        window = content[start : start + _WINDOW]
        # The window must not end within an escape.
        if (len(window) - len(window.rstrip(b"\\"))) % 2 and len(window) > 1:
            window = window[:-1]
        start += len(window)
        window = window.replace(b"\\\\", b"").replace(b'\\"', b"")
        place, quote = 0, 0
        while quote >= 0:
            quote = window.find(b'"', place)
            end = len(window) if quote < 0 else quote
            if not in_text:
                found += sum(window.count(each, place, end) for each in (b",", b"[", b"{"))
            if quote >= 0:
                in_text = not in_text
                texts += in_text
                place = quote + 1
            # A value has at most two texts: its name, and itself.
            if found > limit or texts > 2 * limit:
                raise TooManyValuesError(f"a JSON text has more than {limit:,} values")
    return found


class HiddenSurrogates(NamedTuple):
    """JSON with characters for lone surrogates. `form` formats their escapes, in upper or lower case."""

    content: bytes
    form: bytes

    def show(self, content: bytes) -> bytes:
        return _spliced(content, ((*each.span(), _shown(each[0], self.form)) for each in _HIDDEN.finditer(content)))


def hide_surrogates(content: bytes) -> HiddenSurrogates | None:
    """Replace lone surrogates, which decoders refuse, by other characters; return None if there are none, or more than
    4,096, or if the content already has such characters."""
    places = list(islice(_lone_surrogates(content), _MOST_SURROGATES + 1))
    if not 0 < len(places) <= _MOST_SURROGATES or _HIDDEN.search(content) or _HIDDEN_ESCAPED.search(content):
        return None
    escapes = [content[at : at + _ESCAPE] for at in places]
    is_upper = any(each[2:] != each[2:].lower() for each in escapes)
    changes = ((at, at + _ESCAPE, _hidden(each)) for at, each in zip(places, escapes, strict=True))
    return HiddenSurrogates(_spliced(content, changes), b"\\u%04X" if is_upper else b"\\u%04x")


def replace_surrogates(content: bytes) -> bytes:
    """Replace lone surrogates by U+FFFD, which tokenizers accept."""
    places = islice(_lone_surrogates(content), _MOST_SURROGATES)
    return _spliced(content, ((at, at + _ESCAPE, b"\\ufffd") for at in places))


def encode_any(value: object) -> bytes:
    """Raises TypeError or ValueError if JSON cannot represent the value."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def decode_any(content: bytes) -> Any:
    """Decode what `count_values` has accepted. Raises ValueError for invalid JSON."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)


def _lone_surrogates(content: bytes) -> Iterator[int]:
    for each in _SURROGATE.finditer(content):
        at, end = each.span()
        # If its backslash is itself escaped, the match does not begin with an escape but with plain text. The second
        # half of a pair is then lone.
        if not _is_escaped(content, at):
            if end - at == _ESCAPE:
                yield at
        elif end - at > _ESCAPE:
            yield at + _ESCAPE


def _is_escaped(content: bytes, at: int) -> bool:
    first = at
    while first and content[first - 1] == _BACKSLASH:
        first -= 1
    return (at - first) % 2 == 1


def _hidden(escape: bytes) -> bytes:
    return chr(int(escape[2:], 16) - _FIRST + _FIRST_HIDDEN).encode()


def _shown(hidden: bytes, form: bytes) -> bytes:
    return form % (ord(hidden.decode()) - _FIRST_HIDDEN + _FIRST)


def _spliced(content: bytes, changes: Iterable[tuple[int, int, bytes]]) -> bytes:
    spliced, last = bytearray(), 0
    for start, end, becomes in changes:
        spliced += content[last:start]
        spliced += becomes
        last = end
    if not last:
        return content
    spliced += content[last:]
    return bytes(spliced)
