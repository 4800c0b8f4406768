"""Requests on disk: numbers in one file, texts of results in another."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self

from ragorder.trie.shards import ShardRequest

# Number in the input, tenant or -1, bytes of text, documents.
_HEADER = Struct("<QqQI")
# No prompt is longer.
_MOST_TOKENS = 1 << 40
# Of one file, and of all.
_BUFFER_BYTES = 1 << 16
_BUFFERED_BYTES = 1 << 27


class Row(NamedTuple):
    number: int
    text_bytes: int
    request: ShardRequest

    def encoded(self) -> bytes:
        documents, tokens, scope = self.request
        words = array("Q", documents)
        words.extend(min(each, _MOST_TOKENS) for each in tokens)
        header = _HEADER.pack(self.number, -1 if scope is None else scope, self.text_bytes, len(documents))
        return header + words.tobytes()


class Spill:
    def __init__(self, folder: Path, name: str) -> None:
        self.rows_path = folder / f"{name}.rows"
        self.texts_path = folder / f"{name}.texts"

    @property
    def size(self) -> int:
        return self.rows_path.stat().st_size + self.texts_path.stat().st_size

    def rows(self) -> Iterator[Row]:
        with self.rows_path.open("rb") as file:
            while header := file.read(_HEADER.size):
                number, scope, text_bytes, documents = _HEADER.unpack(header)
                words = array("Q")
                words.frombytes(file.read(2 * documents * words.itemsize))
                request = ShardRequest(words[:documents], words[documents:], None if scope < 0 else scope)
                yield Row(number, text_bytes, request)

    def rows_with_texts(self) -> Iterator[tuple[Row, bytes]]:
        with self.texts_path.open("rb") as texts:
            for row in self.rows():
                yield row, texts.read(row.text_bytes)

    def remove(self) -> None:
        for path in (self.rows_path, self.texts_path):
            path.unlink(missing_ok=True)


class SpillWriter:
    """Writes requests into several spills, even more than files may be open."""

    def __init__(self, spills: Sequence[Spill]) -> None:
        self._paths = [path for spill in spills for path in (spill.rows_path, spill.texts_path)]
        self._waiting = [bytearray() for _ in self._paths]
        self._most = min(_BUFFER_BYTES, _BUFFERED_BYTES // max(1, len(self._paths)))
        for path in self._paths:
            path.write_bytes(b"")

    def add(self, row: Row, text: bytes, spill: int = 0) -> None:
        for place, data in ((2 * spill, row.encoded()), (2 * spill + 1, text)):
            self._waiting[place] += data
            if len(self._waiting[place]) >= self._most:
                self._write(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for place in range(len(self._paths) if kind is None else 0):
            self._write(place)

    def _write(self, place: int) -> None:
        with self._paths[place].open("ab") as file:
            file.write(self._waiting[place])
        self._waiting[place].clear()
