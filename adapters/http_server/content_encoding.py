"""Compressed request bodies: gzip, deflate, and if installed zstd and br."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import Headers

_PIECE = 1 << 18
_READ = 1 << 16
# Its decoder takes no limit: from this many bytes it makes at most 8 MiB.
_READ_ZSTD = 256
_PACKAGES = {"zstd": "zstandard", "br": "brotli>=1.2"}
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS
# The limit of RFC 9659; a frame may ask for gigabytes.
_MOST_ZSTD_WINDOW = 8 << 20


def encoding_of(headers: Headers) -> str | None:
    named = b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1").lower()
    return ", ".join(each for name in named.split(",") if (each := name.strip()) not in ("", "identity")) or None


def is_decodable(encoding: str) -> bool:
    return encoding in _decodable()


def check_encoding(encoding: str) -> None:
    """Raises HTTPError for an unsupported encoding."""
    if is_decodable(encoding):
        return
    known, package = ", ".join(_decodable()), _PACKAGES.get(encoding)
    advice = f" ({encoding}: install the package {package} beside the server)" if package else ""
    message = f"The body has an unsupported Content-Encoding: send it uncompressed, or as {known}{advice}."
    headers = [(b"accept-encoding", known.encode()), (b"connection", b"close")]
    raise HTTPError(415, message, code="unknown_encoding", headers=headers)


def decoded(body: bytes, encoding: str) -> Iterator[bytes]:
    """Yield pieces of bounded length, some empty, each decoded on request. Raises HTTPError for damaged data."""
    if not body:
        return
    try:
        if encoding == "zstd":
            yield from _zstd_pieces(body)
        elif encoding == "br":
            yield from _brotli_pieces(body)
        else:
            yield from _zlib_pieces(body, encoding)
    except (zlib.error, EOFError):
        message = f"The body is not {encoding}, as its Content-Encoding says, ends too early, or does not end there."
        raise HTTPError(400, message, code="invalid_encoding") from None


def _decodable() -> list[str]:
    zstd = ["zstd"] if find_spec("zstandard") is not None else []
    return ["gzip", "x-gzip", "deflate", *zstd, *(["br"] if _has_brotli() else [])]


@cache
def _has_brotli() -> bool:
    """Return False also for a version whose decoder takes no limit."""
    if find_spec("brotli") is None:
        return False
    import brotli

    return hasattr(brotli.Decompressor, "can_accept_more_data")


def _zlib_pieces(body: bytes, encoding: str) -> Iterator[bytes]:
    # Some clients send deflate without the frame that HTTP gives it.
    is_bare = encoding == "deflate" and not _has_zlib_header(body)
    stream = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _ZLIB_OR_GZIP)
    for start in range(0, len(body), _READ):
        left = body[start : start + _READ]
        while left and not stream.eof:
            yield stream.decompress(left, _PIECE)
            left = stream.unconsumed_tail
        if stream.eof and start + _READ < len(body):
            raise EOFError
    while not stream.eof and (piece := stream.decompress(b"", _PIECE)):
        yield piece
    if not stream.eof or stream.unused_data:
        raise EOFError


def _has_zlib_header(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    import zstandard

    stream = zstandard.ZstdDecompressor(max_window_size=_MOST_ZSTD_WINDOW).decompressobj()
    pieces, length = [], 0
    try:
        for start in range(0, len(body), _READ_ZSTD):
            pieces.append(stream.decompress(body[start : start + _READ_ZSTD]))
            length += len(pieces[-1])
            if length >= _PIECE or start % _READ == 0:
                yield b"".join(pieces)
                pieces, length = [], 0
    except zstandard.ZstdError:
        raise EOFError from None
    yield b"".join(pieces)
    if not stream.eof or stream.unused_data:
        raise EOFError


def _brotli_pieces(body: bytes) -> Iterator[bytes]:
    import brotli

    stream = brotli.Decompressor()
    try:
        for start in range(0, len(body), _READ):
            yield stream.process(body[start : start + _READ], output_buffer_limit=_PIECE)
            while not stream.can_accept_more_data():
                yield stream.process(b"", output_buffer_limit=_PIECE)
        while not stream.is_finished() and (piece := stream.process(b"", output_buffer_limit=_PIECE)):
            yield piece
    except brotli.error:
        raise EOFError from None
    if not stream.is_finished():
        raise EOFError
