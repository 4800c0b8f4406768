"""Requests of a plan, in an SQLite file beside its shards."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from ragorder.trie.shards import ShardRequest

_TABLES = """
create table requests (number integer primary key, documents blob, tokens blob, scope integer);
create table results (number integer primary key, text blob);
create table shards (shard integer, number integer, primary key (shard, number)) without rowid;
"""
_ALL = "select number, documents, tokens, scope from requests order by number"
_OF_A_SHARD = """
select number, documents, tokens, scope from shards join requests using (number) where shard = ? order by number
"""
# No prompt is longer.
_MOST_TOKENS = 1 << 40


class RequestStore:
    """Requests and their texts by number. One process writes; then any may read. Raises sqlite3.Error."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "requests.sqlite"
        self._file = sqlite3.connect(self.path)
        # A plan that is not finished is of no use.
        self._file.executescript("pragma journal_mode = off; pragma synchronous = off")

    def write(self, requests: Iterable[tuple[int, ShardRequest, bytes]]) -> None:
        with self._file as file:
            file.executescript(_TABLES)
            for number, (documents, tokens, scope), text in requests:
                arrays = array("Q", documents), array("Q", (min(each, _MOST_TOKENS) for each in tokens))
                file.execute("insert into requests values (?, ?, ?, ?)", (number, *arrays, scope))
                file.execute("insert into results values (?, ?)", (number, text))

    def deal(self, shards: Iterable[tuple[int, int]]) -> None:
        """Write pairs of a shard and the number of a request."""
        with self._file as file:
            file.executemany("insert into shards values (?, ?)", shards)

    def requests(self, shard: int | None = None) -> Iterator[tuple[int, ShardRequest]]:
        """Yield the requests of a shard, or all, by ascending number."""
        found = self._file.execute(_ALL) if shard is None else self._file.execute(_OF_A_SHARD, (shard,))
        for number, documents, tokens, scope in found:
            yield number, ShardRequest(array("Q", documents), array("Q", tokens), scope)

    def text(self, number: int) -> bytes:
        (text,) = self._file.execute("select text from results where number = ?", (number,)).fetchone()
        return bytes(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
