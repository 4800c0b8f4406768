"""Storage of results: JSON lines, appended and never overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ragorder.common.files import try_lock
from ragorder.common.jsonl import JSONLines, decode
from ragorder.errors import RagorderError
from ragorder.eval.running.record import RESULTS

Line = Mapping[str, Any]


class StoreError(RagorderError, ValueError):
    """Results cannot be kept in this folder. The message says what to change."""


class Store:
    """The results in a folder: a context manager, for one writing process at a time. Each line is on the disk when
    `append` returns; a line torn by a crash is ended and passed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._places: dict[str, int] = {}
        self._sessions: list[Line] = []
        self._measured: dict[str, list[tuple[str, str, int]]] = {}

    def __enter__(self) -> Self:
        """Raises StoreError for a folder that cannot be written to, or is being written to."""
        path = self.folder / RESULTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error})") from None
        if not try_lock(self._file, unsupported=True):
            self._file.close()
            raise StoreError(f"{path}: another process is writing there: wait for it, or choose another folder")
        try:
            self._read()
        except StoreError:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None

    @classmethod
    @contextmanager
    def reading(cls, folder: Path) -> Iterator[Store]:
        """A store for reading only: nothing is made, locked or completed."""
        store = cls(folder)
        path = folder / RESULTS
        if path.is_file():
            with path.open("rb") as file:
                for place, line in _lines(file):
                    store._know(line, place)
        yield store

    @property
    def sessions(self) -> list[Line]:
        return list(self._sessions)

    def has(self, type: str, **key: Any) -> bool:
        return _name({"type": type, **key}) in self._places

    def find(self, type: str, **key: Any) -> Line | None:
        """The line that `has` knows of; None: there is none."""
        place = self._places.get(_name({"type": type, **key}))
        return None if place is None else self._line(place)

    def append(self, line: Line) -> None:
        """Raises OSError."""
        file = self._file
        assert file is not None, "use the store in a `with` block"
        place = file.seek(0, os.SEEK_END)
        file.write((json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
        self._know(line, place)

    def measured(self, measurement: str, policies: tuple[str, ...]) -> list[Line] | None:
        """Lines of another suite that measured the same, in one session."""
        groups: dict[str, dict[str, int]] = {}
        for together, policy, place in self._measured.get(measurement, ()):
            groups.setdefault(together, {})[policy] = place
        for found in groups.values():
            if all(policy in found for policy in policies):
                return [self._line(found[policy]) for policy in policies]
        return None

    def _read(self) -> None:
        file = self._file
        assert file is not None
        for place, line in _lines(file):
            self._know(line, place)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
                file.flush()

    def _line(self, place: int) -> Line:
        assert self._file is not None
        self._file.seek(place)
        line: Line = decode(self._file.readline())
        return line

    def _know(self, line: Line, place: int) -> None:
        if line.get("type") == "session":
            self._sessions.append({name: value for name, value in line.items() if name != "environment"})
            return
        self._places[_name(line)] = place
        if line.get("type") == "run" and "measurement" in line:
            measured = self._measured.setdefault(line["measurement"], [])
            measured.append((f"{line['suite']} {line['session']}", line["policy"], place))


_MEASURED = ("suite", "cell", "seed", "policy", "dry_run")
_KEYS = {
    "unavailable": ("suite", "cell", "policy", "reason"),
    "check": ("name", "suite", "cell", "seed", "policy", "dry_run"),
}
"""What makes a line of its type one of a kind; all others are measurements."""


def _name(line: Line) -> str:
    keys = _KEYS.get(str(line.get("type")), _MEASURED)
    return json.dumps([line.get("type"), *(line.get(key) for key in keys)], sort_keys=True)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, Line]]:
    """Each object with its place in the file. Raises StoreError."""
    file.seek(0)
    for _, line in JSONLines(file, error=StoreError, max_line_bytes=None):
        try:
            value = decode(line)
        except ValueError:
            continue
        # A line without its end is one that a crash has torn, whatever it says.
        if isinstance(value, dict) and line.endswith(b"\n"):
            yield file.tell() - len(line), value
