"""Records of a data set, with errors that name file, record and field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from ragorder.eval.data.corpora.base import CorpusError
from ragorder.jsonl import JSONLines, decode, kind_of

__all__ = ["SourceRecord", "read_records"]


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A JSON object and its place. Errors quote none of its texts."""

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
            self.fail(f"{field!r} must be a string, got {kind_of(value)}")
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
                self.fail(f"{field}[{place}] must be a string, got {kind_of(value)}")
        return values

    def array(self, field: str) -> Any:
        value = self.value(field)
        if not isinstance(value, list):
            self.fail(f"{field!r} must be a list, got {kind_of(value)}")
        return value

    def record(self, field: str) -> SourceRecord:
        value = self.value(field)
        if not isinstance(value, Mapping):
            self.fail(f"{field!r} must be an object, got {kind_of(value)}")
        return SourceRecord(f"{self.where}, {field}", value)

    def records(self, field: str) -> list[SourceRecord]:
        """A list of objects, or an object of lists as in the package `datasets`."""
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
                self.fail(f"{field}[{place}] must be an object, got {kind_of(row)}")
        return [SourceRecord(f"{self.where}, {field}[{place}]", row) for place, row in enumerate(rows)]

    def pairs(self, field: str, first: str, second: str) -> list[SourceRecord]:
        """A list of pairs [first, second], or `records`."""
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
    """The objects of a file, plain or gzipped: JSON lines, a JSON list, or the list in the field `container` of an
    object. Raises CorpusError."""
    # A whole data set may be one line.
    lines = iter(JSONLines(path, error=CorpusError, max_line_bytes=None))
    first = next(lines, None)
    if first is None:
        raise CorpusError(f"{path}: the file holds no records: name a file of the data set")
    start = first[1].lstrip()[:1]
    if start == b"[" or (start == b"{" and container is not None):
        yield from _listed(path, b"".join(line for _, line in chain([first], lines)), container)
        return
    for number, line in chain([first], lines):
        where = f"{path}:{number}"
        yield SourceRecord(where, _object(where, _parse(where, line)))


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
        return decode(data)
    except ValueError as error:
        raise CorpusError(f"{where}: {error}: download the file again") from None


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: must be an object, got {kind_of(value)}: is this the data set's official format?")
    return value
