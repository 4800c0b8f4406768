"""Manifest of a build: its documents, their tokens and neighbours."""

from __future__ import annotations

import json
import os
import sqlite3
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from ragorder.common.jsonl import decode
from ragorder.errors import RagorderError
from ragorder.kernels.store import ChunkStore
from ragorder.kernels.store.format import variant_content, variant_key

_NAME = "documents.sqlite"
_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS documents (
    place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content BLOB NOT NULL, tokens BLOB NOT NULL,
    neighbours BLOB NOT NULL, vector BLOB
);
CREATE INDEX IF NOT EXISTS contents ON documents (content);
"""
_COLUMNS = "id, content, tokens, neighbours, vector"
_CONTENT_BYTES = 32
_TOKEN_BYTES = 8
_FLOAT_BYTES = 4
_MOST_TOKENS = 1 << 31
# Required facts of a begun build.
_FACTS = {"format": int, "identity": str, "prefix_key": str, "prefix_tokens": int, "token_bytes": int}


class BuildError(RagorderError, ValueError):
    """A build cannot begin or continue."""


class ManifestError(BuildError): ...


class NoBuildError(ManifestError): ...


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """`content` has 32 bytes, `neighbours` are contents, `vector` is float32."""

    id: str
    content: bytes
    token_ids: Sequence[int]
    neighbours: tuple[bytes, ...] = ()
    vector: bytes | None = None

    @property
    def key(self) -> bytes:
        if not self.neighbours:
            return self.content
        return variant_key(self.content, b"neighbours:" + b"".join(self.neighbours))


class Manifest:
    """Documents in order of computation, and JSON `facts` of the build. A change is on disk when its method returns, or
    has not happened. Only the owner can read the file; all that is read is checked. Raises ManifestError, which quotes
    nothing of it."""

    def __init__(self, folder: Path, *, vocabulary: int = _MOST_TOKENS, read_only: bool = False) -> None:
        path = folder / _NAME
        self._vocabulary = vocabulary
        try:
            if read_only:
                # Not mode=ro, which cannot undo what a killed process has begun; write-protected files are read, too.
                self._db = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=rw", uri=True)
            else:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
                self._db = sqlite3.connect(path)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else _reason(error)
            raise ManifestError(f"{folder} has no readable build ({reason}): give the folder of a build") from None
        self._path = path
        with self._reading():
            # A begun build without its tables is damaged, not empty.
            if not read_only and not (self._has_facts() and self.facts):
                self._db.executescript(_SCHEMA)
            made = self.facts.get("format", _FORMAT)
        if made != _FORMAT:
            self.close()
            raise ManifestError(f"{path} has another format: build into another folder")

    @classmethod
    def of(cls, folder: Path) -> Self:
        if not (folder / _NAME).is_file():
            raise NoBuildError(f"{folder} has no build: name the folder of one, or make it with `ragorder fuse build`")
        manifest = cls(folder, read_only=True)
        if not manifest.facts:
            manifest.close()
            raise ManifestError(f"the build in {folder} was interrupted before it began: build again")
        return manifest

    def _has_facts(self) -> bool:
        return self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone() is not None

    @property
    def facts(self) -> dict[str, Any]:
        with self._reading():
            rows = self._db.execute("SELECT name, value FROM facts").fetchall()
            if any(not isinstance(each, str) for row in rows for each in row):
                raise ValueError("a fact is not text")
            facts = {name: decode(value.encode("utf-8", "surrogatepass")) for name, value in rows}
            wrong = [name for name, kind in _FACTS.items() if type(facts.get(name)) is not kind]
            if facts and (wrong or not isinstance(facts.get("recipe", {}), dict)):
                raise ValueError(f'the fact "{wrong[0] if wrong else "recipe"}" is missing, or of another type')
            return facts

    def __len__(self) -> int:
        with self._reading():
            (count,) = self._db.execute("SELECT count(*) FROM documents").fetchone()
        return int(count)

    def __iter__(self) -> Iterator[PlannedDocument]:
        with self._reading():
            for row in self._db.execute(f"SELECT {_COLUMNS} FROM documents ORDER BY place"):  # noqa: S608
                yield self._document(row)

    def find(self, id: str) -> PlannedDocument | None:
        return self._one("id", id)

    def with_content(self, content: bytes) -> PlannedDocument | None:
        return self._one("content", content)

    def contents(self) -> Iterator[bytes]:
        """Yield contents alone, fast for millions."""
        with self._reading():
            for (content,) in self._db.execute("SELECT content FROM documents"):
                if not isinstance(content, bytes) or len(content) != _CONTENT_BYTES:
                    raise ValueError("the content of a document has another form")
                yield content

    def contents_only_of(self, ids: Iterable[str]) -> set[bytes]:
        named = set(ids)
        contents: tuple[set[bytes], set[bytes]] = set(), set()
        for document in self:
            contents[document.id in named].add(document.content)
        return contents[True] - contents[False]

    def begin(self, facts: Mapping[str, Any], documents: Iterable[PlannedDocument]) -> None:
        with self._writing():
            self._db.execute("DELETE FROM facts")
            self._db.execute("DELETE FROM documents")
            values = {**facts, "format": _FORMAT}
            self._db.executemany("INSERT INTO facts VALUES (?, ?)", [(n, json.dumps(v)) for n, v in values.items()])
            self._put(documents)

    def put(self, documents: Iterable[PlannedDocument]) -> None:
        with self._writing():
            self._put(documents)

    def remove(self, ids: Iterable[str]) -> None:
        with self._writing():
            self._db.executemany("DELETE FROM documents WHERE id = ?", [(id,) for id in ids])

    def close(self) -> None:
        self._db.close()

    def _put(self, documents: Iterable[PlannedDocument]) -> None:
        rows = (
            (each.id, each.content, array("q", each.token_ids).tobytes(), b"".join(each.neighbours), each.vector)
            for each in documents
        )
        self._db.executemany(
            f"INSERT INTO documents ({_COLUMNS}) VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "  # noqa: S608
            "content = excluded.content, tokens = excluded.tokens, neighbours = excluded.neighbours, "
            "vector = excluded.vector",
            rows,
        )

    def _one(self, column: str, value: object) -> PlannedDocument | None:
        with self._reading():
            row = self._db.execute(
                f"SELECT {_COLUMNS} FROM documents WHERE {column} = ? ORDER BY place LIMIT 1",  # noqa: S608
                (value,),
            ).fetchone()
            return None if row is None else self._document(row)

    def _document(self, row: tuple[Any, ...]) -> PlannedDocument:
        id, content, tokens, joined, vector = row
        if not (isinstance(id, str) and id):
            raise ValueError("the id of a document is not text")
        if not all(isinstance(each, bytes) for each in (content, tokens, joined, b"" if vector is None else vector)):
            raise ValueError("a column of a document has another type")
        if len(content) != _CONTENT_BYTES or len(joined) % _CONTENT_BYTES:
            raise ValueError("the content or the neighbours of a document have another length")
        if not tokens or len(tokens) % _TOKEN_BYTES or (vector is not None and len(vector) % _FLOAT_BYTES):
            raise ValueError("the tokens or the vector of a document have another length")
        token_ids = array("q", tokens)
        if min(token_ids) < 0 or max(token_ids) >= self._vocabulary:
            raise ValueError("a document has tokens outside the model's vocabulary")
        neighbours = tuple(joined[start : start + _CONTENT_BYTES] for start in range(0, len(joined), _CONTENT_BYTES))
        return PlannedDocument(id, content, token_ids, neighbours, vector)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ManifestError:
            raise
        except (sqlite3.Error, ValueError) as error:
            raise ManifestError(f"{self._path} cannot be read ({_reason(error)}): {_remedy(error)}") from None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._db:
                yield
        except (sqlite3.Error, UnicodeError) as error:
            raise ManifestError(f"{self._path} cannot be written: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Leave out SQLite's words, which may quote a column."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorname", None) or "a column is not UTF-8 text"
    return "a text is not Unicode" if isinstance(error, UnicodeError) else str(error)


def _remedy(error: Exception) -> str:
    name = getattr(error, "sqlite_errorname", None) or ""
    if name == "SQLITE_BUSY":
        return "another process is changing it: try again later"
    if name.startswith("SQLITE_READONLY") or name == "SQLITE_IOERR_DELETE":
        return "a change was interrupted and must be undone: make the folder and its files writable, and try again"
    return "build into another folder"


def remove_documents(manifest: Manifest, store: ChunkStore, ids: Iterable[str]) -> None:
    """Remove documents, and KV that no other document has. Raises BuildError."""
    names = list(dict.fromkeys(ids))
    for name in names:
        if manifest.find(name) is None:
            raise BuildError(f"the build has no document {name!r}: nothing was removed")
    drop_copies(store, manifest.contents_only_of(names))
    manifest.remove(names)


def drop_copies(store: ChunkStore, contents: Container[bytes]) -> None:
    """Remove all KV of these contents. Raises BuildError."""
    for key in store:
        if variant_content(key) in contents and not store.remove(key):
            raise BuildError("a file of the build cannot be removed: make its folder writable, and try again")
