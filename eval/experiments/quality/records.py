"""Records of a data set, with errors that name file, record and field."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ragorder.eval.data.corpora.base import CorpusError

__all__ = ["SourceRecord", "read_records"]


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A JSON object and its place, "file:line" or "file: record 3" (from 1). Errors quote none of its texts."""

    where: str
    fields: Mapping[str, Any]

    def fail(self, message: str) -> NoReturn:
        raise CorpusError(f"{self.where}: {message}")

    def __contains__(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def value(self, field: str) -> Any:
        if field not in self:
            self.fail(
                f"the field {field!r} is missing: is this the data set's official format, and not its test split?"
            )
        return self.fields[field]

    def string(self, *names: str) -> str:
        """The first of these fields that exists: a string with text."""
        field = next((name for name in names if name in self), names[0])
        value = self.text(field)
        if not value.strip():
            self.fail(f"{field!r} is empty: leave this record out")
        return value

    def text(self, field: str) -> str:
        """A string, which may be empty."""
        value = self.value(field)
        if not isinstance(value, str):
            self.fail(f"{field!r} must be a string, got {_kind(value)}")
        return value

    def name(self, *names: str) -> str:
        """An identifier: a string or an integer."""
        field = next((name for name in names if name in self), names[0])
        value = self.value(field)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.string(field)

    def strings(self, field: str) -> list[str]:
        values: list[str] = self.array(field)
        for place, value in enumerate(values):
            if not isinstance(value, str):
                self.fail(f"{field}[{place}] must be a string, got {_kind(value)}")
        return values

    def array(self, field: str) -> Any:
        value = self.value(field)
        if not isinstance(value, list):
            self.fail(f"{field!r} must be a list, got {_kind(value)}")
        return value

    def record(self, field: str) -> SourceRecord:
        value = self.value(field)
        if not isinstance(value, Mapping):
            self.fail(f"{field!r} must be an object, got {_kind(value)}")
        return SourceRecord(f"{self.where}, {field}", value)

    def records(self, field: str) -> list[SourceRecord]:
        """A list of objects, or an object of lists (the form of the package `datasets`)."""
        value = self.value(field)
        if isinstance(value, Mapping):
            columns = {name: column for name, column in value.items() if isinstance(column, list)}
            lengths = {len(column) for column in columns.values()}
            if len(columns) != len(value) or len(lengths) > 1:
                self.fail(f"{field!r} must be a list of objects, or an object of lists of one length")
            rows: Sequence[Any] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        else:
            rows = self.array(field)
        for place, row in enumerate(rows):
            if not isinstance(row, Mapping):
                self.fail(f"{field}[{place}] must be an object, got {_kind(row)}")
        return [SourceRecord(f"{self.where}, {field}[{place}]", row) for place, row in enumerate(rows)]

    def pairs(self, field: str, first: str, second: str) -> list[SourceRecord]:
        """A list of pairs [first, second], or `records`, as objects."""
        value = self.value(field)
        if isinstance(value, list) and all(isinstance(row, list) and len(row) == 2 for row in value):
            return [
                SourceRecord(f"{self.where}, {field}[{place}]", {first: row[0], second: row[1]})
                for place, row in enumerate(value)
            ]
        if isinstance(value, Mapping) or (isinstance(value, list) and all(isinstance(row, Mapping) for row in value)):
            return self.records(field)
        self.fail(f"{field!r} must be a list of pairs [{first}, {second}]")


def read_records(path: Path, container: str | None = None) -> Iterator[SourceRecord]:
    """The objects of a file, plain or .gz: JSON lines, a JSON list, or the list in the field `container` of an object.
    Raises CorpusError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf").lstrip()[:1]
            file.seek(0)
            if start == b"[" or (start == b"{" and container is not None):
                yield from _listed(path, file.read(), container)
            else:
                yield from _lines(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: cannot be read ({error}): name a file of the data set") from error


def _lines(path: Path, lines: Any) -> Iterator[SourceRecord]:
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = True
            where = f"{path}:{number}"
            yield SourceRecord(where, _object(where, _parse(where, line)))
    if not found:
        raise CorpusError(f"{path}: the file holds no records: name a file of the data set")


def _listed(path: Path, data: bytes, container: str | None) -> Iterator[SourceRecord]:
    parsed = _parse(str(path), data)
    if isinstance(parsed, dict) and container is not None:
        parsed = parsed.get(container)
        if not isinstance(parsed, list):
            raise CorpusError(f"{path}: the field {container!r} must hold the records: name an official file")
    if not parsed:
        raise CorpusError(f"{path}: the file holds no records: name a file of the data set")
    for number, value in enumerate(parsed, 1):
        where = f"{path}: record {number}"
        yield SourceRecord(where, _object(where, value))


def _parse(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise CorpusError(f"{where}: not JSON ({error.msg}, {at}): download the file again") from None
    except (ValueError, RecursionError):
        raise CorpusError(f"{where}: not JSON in UTF-8: download the file again") from None


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: must be an object, got {_kind(value)}: is this the data set's official format?")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
