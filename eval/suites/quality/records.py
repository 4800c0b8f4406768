"""Records of a data set, with errors that name file, record and field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from ragorder.common.jsonl import JSONLines, decode, kind_of, problem_of
from ragorder.eval.data.corpora.base import CorpusError

__all__ = ["Filled", "Name", "Rows", "SourceFields", "SourceRecord", "pairs", "read_records"]

_MISSING = "is missing: is this the data set's official format, and not its test split?"


class SourceFields(BaseModel):
    """The fields of a record, or of an object in it, that are read; null is the same as none."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping):
            return {name: value for name, value in fields.items() if value is not None}
        return fields


T = TypeVar("T")
F = TypeVar("F", bound=SourceFields)
S = TypeVar("S", str, list[str])


def _filled(value: S) -> S:
    if not (value.strip() if isinstance(value, str) else value):
        raise ValueError("is empty: leave this record out")
    return value


def _as_string(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _rows(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    if {type(column) for column in value.values()} - {list} or len({len(column) for column in value.values()}) > 1:
        raise ValueError("must be a list of objects, or an object of lists of one length")
    return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]


Filled = Annotated[T, AfterValidator(_filled)]
"""A string with text, or a list with an entry."""
Name = Annotated[str, BeforeValidator(_as_string), AfterValidator(_filled)]
"""An identifier: a string or an integer."""
Rows = Annotated[list[T], BeforeValidator(_rows)]
"""A list of objects, or an object of lists as in the package `datasets`."""


def pairs(first: str, second: str) -> BeforeValidator:
    """Reads a list of pairs as objects with these fields; or as `Rows`."""

    def read(value: object) -> object:
        if isinstance(value, list) and any(isinstance(row, list) for row in value):
            if not all(isinstance(row, list) and len(row) == 2 for row in value):
                raise ValueError(f"must be a list of pairs [{first}, {second}]")
            return [dict(zip((first, second), row, strict=True)) for row in value]
        return _rows(value)

    return BeforeValidator(read)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A JSON object and its place. Errors quote none of its texts."""

    where: str
    fields: Mapping[str, Any]

    def __contains__(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def fail(self, message: str) -> NoReturn:
        raise CorpusError(f"{self.where}: {message}")

    def read(self, kind: type[F]) -> F:
        """Its fields. Raises CorpusError."""
        try:
            return kind.model_validate(self.fields)
        except ValidationError as error:
            self.fail(problem_of(error, self.fields, missing=_MISSING))


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
        raise CorpusError(f"{where}: must be an object, not {kind_of(value)}: is this the data set's official format?")
    return value
