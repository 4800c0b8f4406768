"""JSON lines, plain or compressed, read as objects or pydantic models."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ragorder.errors import RagorderError

_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\x00"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PROGRESS_STEPS = 100
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    type(None): "null",
}
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}

M = TypeVar("M", bound=BaseModel)


class JSONLinesError(RagorderError, ValueError):
    """A file of JSON lines cannot be read. The message quotes no content."""


class JSONLines:
    """The lines of a file (plain, gzip or xz), by path or as an open binary file, which stays open.

        for number, request in JSONLines("requests.jsonl").read(Request):
            ...

    Lines are numbered from 1; empty ones are skipped. What cannot be read raises `error` with one message, and the
    valid line `example`.
    """

    def __init__(
        self,
        source: str | Path | IO[bytes],
        *,
        error: Callable[[str], Exception] = JSONLinesError,
        example: str = "",
        max_line_bytes: int | None = 1 << 26,
        progress: Callable[[str, int], Callable[[], None]] | None = None,
    ) -> None:
        self.name = str(source) if isinstance(source, str | Path) else name_of(source)
        self._source = source
        self._error = error
        self._example = f"a line looks like {example}" if example else ""
        self._max_line_bytes = -1 if max_line_bytes is None else max_line_bytes
        self._progress = progress

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if not isinstance(self._source, str | Path):
            yield from self._lines(self._source)
            return
        try:
            file = open(self._source, "rb")  # noqa: SIM115
        except OSError as error:
            raise self._error(f"{self.name}: {error.strerror}: name a file that can be read") from None
        with file:
            yield from self._lines(file)

    def read(self, model: type[M]) -> Iterator[tuple[int, M]]:
        for number, line in self:
            yield number, self.validate(model, number, line)

    def objects(
        self, skip: Callable[[Exception], object] | None = None, *, containing: bytes = b""
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each line that is an object, from a file whose writer may have been interrupted.

        Lines without the bytes `containing` are not decoded. `skip` receives the error of any other line.
        """
        for number, line in self:
            if containing not in line:
                continue
            try:
                value = decode(line)
                problem = f"must be an object, not {kind_of(value)}"
            except ValueError as error:
                value, problem = None, str(error)
            if isinstance(value, dict):
                yield number, value
            elif skip is not None:
                skip(self.error(number, problem))

    def validate(self, model: type[M], number: int, line: bytes) -> M:
        try:
            value = decode(line)
        except ValueError as error:
            raise self.error(number, self._with_example(str(error))) from None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            said = problem_of(error, value)
            like_a_line = isinstance(value, dict) and not _missing_fields(error)
            raise self.error(number, said if like_a_line else self._with_example(said)) from None

    def _with_example(self, problem: str) -> str:
        return f"{problem}: {self._example}" if self._example else problem

    def error(self, number: int, problem: str) -> Exception:
        return self._error(f"{self.name}:{number}: {problem}")

    def _lines(self, source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        buffered: Any = source if hasattr(source, "peek") else BufferedReader(source)
        stream = buffered
        size, advance_to = self._watch(source)
        number = 0
        try:
            start = stream.peek(len(_XZ_MAGIC))
            if start.startswith(_GZIP_MAGIC):
                stream = gzip.GzipFile(fileobj=stream)
            elif start.startswith(_XZ_MAGIC):
                stream = lzma.LZMAFile(stream)  # noqa: SIM115
            while line := stream.readline(self._max_line_bytes):
                number += 1
                if len(line) == self._max_line_bytes:
                    raise self.error(number, f"longer than {self._max_line_bytes >> 20} MiB: write one object a line")
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if size and not number % 256:
                    advance_to(source.tell())
                if line.strip():
                    yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError):
            kind = "xz" if isinstance(stream, lzma.LZMAFile) else "gzip"
            raise self.error(number + 1, f"damaged {kind} data: compress or download the file again") from None
        except OSError as error:
            raise self.error(number + 1, f"{error.strerror}: name a file that can be read") from None
        finally:
            advance_to(size)
            if buffered is not source and not source.closed:
                buffered.detach()

    def _watch(self, source: IO[bytes]) -> tuple[int, Callable[[int], None]]:
        try:
            size = os.fstat(source.fileno()).st_size
            source.tell()
        except (OSError, ValueError, AttributeError):
            size = 0
        if self._progress is None or not size:
            return 0, lambda position: None
        advance = self._progress(f"reading {Path(self.name).name}", _PROGRESS_STEPS)
        done = 0

        def advance_to(position: int) -> None:
            nonlocal done
            while done < min(_PROGRESS_STEPS, position * _PROGRESS_STEPS // size):
                done += 1
                advance()

        return size, advance_to


def name_of(source: IO[bytes]) -> str:
    name = getattr(source, "name", "-")
    return name if isinstance(name, str) and name not in ("-", "<stdin>") else "<stdin>"


def decode(data: bytes) -> Any:
    """Return a JSON text's value. Raise ValueError, whose message quotes no content."""
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError:
        problem = "not UTF-8"
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        problem = f"not JSON ({line}column {error.colno}: {error.msg})"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:
        problem = "a number in it cannot be read (NaN, infinite or too many digits)"
    raise ValueError(problem)


def decode_toml(data: bytes) -> dict[str, Any]:
    """Return a TOML text's fields. Raise ValueError as `decode` does."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        problem = "not UTF-8"
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (line [0-9]+, column [0-9]+|end of document)\)$", str(error))
        problem = f"not TOML{f' ({place[1]})' if place else ''}"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:
        problem = "a date or a number in it cannot be read"
    raise ValueError(problem)


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), "an object")


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def problem_of(error: ValidationError, value: Any, *, missing: str = "is missing: add it") -> str:
    """Return an object's first problem, without quoting its content. `missing` follows the name of a missing field.

    For a union the best-fitting alternative counts.
    """
    details = [(_path(each["loc"], each["type"] == "missing", value), each) for each in error.errors(include_url=False)]
    start = details[0][0]
    path = max((path for path, _ in details if path == start or path.startswith((f"{start}.", f"{start}["))), key=len)
    found = [each for other, each in details if other == path]
    subject = f'"{path}" ' if path else ""
    # A value of the right type that is refused for another reason fits better than a value of another type.
    told = next((each for each in found if each["type"] not in _EXPECTED), None)
    if told is None:
        expected = list(dict.fromkeys(_EXPECTED[each["type"]] for each in found))
        return f"{subject}must be {_any_of(expected)}, not {kind_of(found[0]['input'])}"
    context = told.get("ctx", {})
    match told["type"]:
        case "missing":
            return f"{subject}{missing}"
        case "string_too_short":
            return f"{subject}must not be empty"
        case "greater_than_equal":
            return f"{subject}must be at least {context['ge']:,}"
        case "less_than_equal":
            return f"{subject}must be at most {context['le']:,}"
        case _:
            return f"{subject}{told['msg'].removeprefix('Value error, ')}"


def _missing_fields(error: ValidationError) -> bool:
    return any(each["type"] == "missing" and len(each["loc"]) == 1 for each in error.errors(include_url=False))


def _path(location: tuple[int | str, ...], missing: bool, value: Any) -> str:
    path = ""
    for place, part in enumerate(location):
        if isinstance(part, int) and isinstance(value, list):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            path, value = f"{path}.{part}" if path else str(part), value[part]
        elif missing and place == len(location) - 1:
            path = f"{path}.{part}" if path else str(part)
    return path


def _any_of(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
