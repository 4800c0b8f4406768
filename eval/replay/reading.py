"""Reading a log of requests: JSON lines; strict about what a replay needs.

A line is {"time", "tenant", "documents", "tokens", "prefix_tokens", "suffix_tokens", "prompt_tokens", "output_tokens"};
only time and documents must be there. Plain or gzipped.

- `time`: seconds as a number, from any origin, or ISO 8601 (UTC where no offset is given). Lines may be out of order.
- `tenant`: who asked, a string. Tenants never share blocks.
- `documents`: what was retrieved, best first: ids (strings or integers), or objects {"id", "tokens"}. The same id with
  another length is another document.
- `tokens`: the lengths in the prompt, headers included: one for each document, or one number for all.
- `prefix_tokens`: the length of what stands in front of the documents, `suffix_tokens` of what stands behind (question
  and template, at least 1), `output_tokens` of the answer. `prompt_tokens` is that of the whole prompt: in place of
  `suffix_tokens`, which is then what prefix and documents leave of it.

Other fields, of a line or of a document, are passed over, and counted in `Log.passed_over`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ragorder.adapters.http_client import printable
from ragorder.eval.replay.lines import name_of, numbered_lines
from ragorder.eval.replay.log import Log, LogBuilder, LogError

if TYPE_CHECKING:
    from ragorder.eval.running.progress import Progress

__all__ = ["FIELDS", "Lengths", "read_log"]

_EXAMPLE = '{"time": 12.5, "documents": ["a", "b"], "tokens": [210, 190]}'
FIELDS = (
    "time",
    "tenant",
    "documents",
    "tokens",
    "prefix_tokens",
    "suffix_tokens",
    "prompt_tokens",
    "output_tokens",
)
_MOST_NAMES = 100
_LONGEST_NAME = 40
_MAX_TOKENS = 10_000_000
_MAX_TIME_S = 1e11


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens where the log does not say: of a document, of what stands in front of the documents and behind
    them, of an answer. Raises ValueError for lengths that no prompt has."""

    document_tokens: int = 256
    prefix_tokens: int = 64
    suffix_tokens: int = 20
    output_tokens: int = 32

    def __post_init__(self) -> None:
        for name, least in (("document", 0), ("prefix", 0), ("suffix", 1), ("output", 0)):
            if not least <= getattr(self, f"{name}_tokens") <= _MAX_TOKENS:
                raise ValueError(f"--{name}-tokens must be from {least} to {_MAX_TOKENS:,}")


def read_log(
    source: str | Path | IO[bytes],
    *,
    lengths: Lengths | None = None,
    top_k: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Log:
    """The requests of a log: a path, or an open binary file. Only the first `top_k` documents of each, and only the
    first `limit` lines that hold one.

    Raises LogError naming file, line and what to change; it quotes nothing of the line.
    """
    with ExitStack() as stack:
        if isinstance(source, str | Path):
            try:
                source = stack.enter_context(Path(source).open("rb"))
            except OSError as error:
                raise LogError(f"{source}: {error.strerror}: name a file that can be read") from None
        name = name_of(source)
        read = _Reader(lengths or Lengths(), top_k)
        for number, line in numbered_lines(source, name, progress):
            try:
                read.line(line)
            except _LineError as error:
                raise LogError(f"{name}:{number}: {error}") from None
            if len(read.builder) == limit:
                break
    if not len(read.builder):
        raise LogError(f"{name}: no requests in it: a line looks like {_EXAMPLE}")
    return read.builder.build(Path(name).name, read.passed_over)


class _LineError(ValueError):
    """What is wrong with a line."""


class _Reader:
    """Reads lines into a builder."""

    def __init__(self, lengths: Lengths, top_k: int | None) -> None:
        self.builder = LogBuilder()
        self.passed_over: dict[str, int] = {}
        self._lengths = lengths
        self._top_k = top_k

    def line(self, line: bytes) -> None:
        """Raises _LineError."""
        fields, default = _fields(line), self._lengths
        for name in fields:
            if name not in FIELDS:
                self._pass_over(name)
        ids, tokens = _documents(fields, default.document_tokens, self._pass_over)
        prefix_tokens = _length(fields, "prefix_tokens", 0, default.prefix_tokens)
        output_tokens = _length(fields, "output_tokens", 0, default.output_tokens)
        suffix_tokens = _length(fields, "suffix_tokens", 1, default.suffix_tokens)
        if fields.get("prompt_tokens") is not None:
            if fields.get("suffix_tokens") is not None:
                _fail('"prompt_tokens" and "suffix_tokens" say the same: leave one of them out')
            suffix_tokens = _length(fields, "prompt_tokens", 1, 0) - prefix_tokens - sum(tokens)
            if suffix_tokens < 1:
                _fail(
                    f'"prompt_tokens" must be more than prefix and documents together, which are '
                    f"{prefix_tokens + sum(tokens):,} tokens: correct it, or leave it out"
                )
        tenant = fields.get("tenant")
        if tenant is not None and not isinstance(tenant, str):
            _fail(f'"tenant" must be a string, not {_kind(tenant)}')
        self.builder.add(
            _time_s(fields.get("time")),
            ids[: self._top_k],
            tokens[: self._top_k],
            tenant=tenant,
            prefix_tokens=prefix_tokens,
            suffix_tokens=suffix_tokens,
            output_tokens=output_tokens,
        )

    def _pass_over(self, name: str) -> None:
        """A log of another kind may have a field of its own in every line: only so many are kept apart."""
        name = printable(name)[:_LONGEST_NAME]
        if name in self.passed_over or len(self.passed_over) < _MOST_NAMES:
            self.passed_over[name] = self.passed_over.get(name, 0) + 1


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        _fail("not UTF-8: write the log as UTF-8")
    except json.JSONDecodeError as error:
        _fail(f"no JSON (column {error.colno}: {error.msg}): a line looks like {_EXAMPLE}")
    except RecursionError:
        _fail(f"no JSON that can be read (nested too deeply): a line looks like {_EXAMPLE}")
    except ValueError:
        _fail("a number in it cannot be read (NaN, Infinity or too many digits): write finite numbers")
    if not isinstance(fields, dict):
        _fail(f"{_kind(fields)} instead of an object: a line looks like {_EXAMPLE}")
    return fields


def _documents(
    fields: dict[str, Any], default_tokens: int, pass_over: Callable[[str], None]
) -> tuple[list[Hashable], list[int]]:
    """Ids and lengths."""
    entries, tokens = fields.get("documents"), fields.get("tokens")
    if not isinstance(entries, list):
        _fail(f'"documents" must be a list, best document first: a line looks like {_EXAMPLE}')
    if isinstance(tokens, list):
        if len(tokens) != len(entries):
            _fail(f'"tokens" has {len(tokens):,} entries and "documents" has {len(entries):,}: give one for each')
        for place, length in enumerate(tokens):
            if type(length) is not int or not 0 <= length <= _MAX_TOKENS:
                _bad_length(f'"tokens"[{place}]', length, 0)
        known = tokens
    else:
        known = [_length(fields, "tokens", 0, default_tokens)] * len(entries)
    ids: list[Hashable] = []
    others: dict[str, None] = {}
    for place, entry in enumerate(entries):
        if isinstance(entry, dict):
            if tokens is not None:
                _fail('give the lengths in "tokens" or in the documents, not in both')
            known[place] = _length(entry, "tokens", 0, default_tokens, f'"documents"[{place}].')
            for name in entry:
                if name not in ("id", "tokens"):
                    others[f"documents[].{name}"] = None
            entry = entry.get("id")
        if type(entry) is not str and type(entry) is not int:
            _fail(f'"documents"[{place}] must be an id (a string or an integer) or {{"id", "tokens"}}: {_kind(entry)}')
        ids.append(entry)
    for name in others:
        pass_over(name)
    return ids, known


def _length(fields: dict[str, Any], name: str, least: int, default: int, where: str = "") -> int:
    length = fields.get(name)
    if length is None:
        return default
    if type(length) is not int or not least <= length <= _MAX_TOKENS:
        _bad_length(f'{where}"{name}"', length, least)
    return length


def _bad_length(name: str, length: object, least: int) -> NoReturn:
    what = "another one" if type(length) is int else _kind(length)
    _fail(f"{name} must be an integer from {least} to {_MAX_TOKENS:,}, not {what}")


def _time_s(time: object) -> float:
    """Seconds, from a number of them or an ISO date and time."""
    if isinstance(time, str):
        try:
            moment = datetime.fromisoformat(time)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            _fail('"time" is no ISO 8601 date and time: write 2025-01-31T12:00:00Z, or seconds as a number')
    if type(time) is not int and type(time) is not float:
        _fail(f'"time" must be seconds as a number or an ISO 8601 string, not {_kind(time)}')
    if not -_MAX_TIME_S <= time <= _MAX_TIME_S:
        _fail('"time" must be in seconds and is too large for that: divide milliseconds by 1,000')
    return float(time)


def _fail(problem: str) -> NoReturn:
    raise _LineError(problem)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", float: "a fraction"}
    return "nothing" if value is None else kinds.get(type(value), "an integer")
