"""Safetensors checkpoint in a folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragorder.common.jsonl import decode
from ragorder.errors import RagorderError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The format allows headers of 100 MB.
_LONGEST_HEADER = 100_000_000
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(RagorderError, ValueError):
    """A folder without readable weights; the message says what is missing."""


class LayerReadError(RagorderError, OSError):
    """Weights could not be read while serving; the message names the file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    length: int


class Checkpoint:
    """A folder's safetensors, in one file or several with an index. Files are read, not mapped: a truncated mapped file
    would kill the process. A file that changes after it was opened is refused. Raises CheckpointError."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        self._files: dict[Path, tuple[int, os.stat_result]] = {}
        self._lock = threading.Lock()
        try:
            for file in _files_of(self.folder):
                self._open(file)
                self.entries.update((entry.name, entry) for entry in self._entries_of(file))
        except BaseException:
            self.close()
            raise

    def read(self, entry: TensorEntry, start: int, into: memoryview) -> None:
        """Read as `Source.read` does."""
        descriptor, opened = self._files.get(entry.file, (-1, None))
        if opened is None:
            raise LayerReadError(f"{entry.file}: the model's files are closed")
        try:
            now = os.fstat(descriptor)
            if (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
                raise LayerReadError(
                    f"{entry.file} has changed since the model was loaded ({opened.st_size} bytes then, {now.st_size} "
                    "now): load the model again"
                )
            place, left = entry.offset + start, into
            while left:
                count = os.preadv(descriptor, [left], place)
                if not count:
                    raise LayerReadError(f"{entry.file} ends at byte {place}, inside {entry.name}: restore the file")
                place, left = place + count, left[count:]
        except LayerReadError:
            raise
        except OSError as error:
            raise LayerReadError(f"{entry.file} cannot be read ({error.strerror or type(error).__name__})") from error

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        buffer = torch.empty(entry.length, dtype=torch.uint8)
        if entry.length:
            self.read(entry, 0, memoryview(buffer.numpy()))
        return buffer.view(entry.dtype).view(entry.shape)

    def forget_pages(self, entry: TensorEntry, start: int, length: int) -> None:
        descriptor, _ = self._files.get(entry.file, (-1, None))
        if descriptor >= 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, entry.offset + start, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, {}
        for descriptor, _ in files.values():
            os.close(descriptor)

    def _open(self, file: Path) -> None:
        try:
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{file}: its weights cannot be read: {error.strerror}") from error
        self._files[file] = descriptor, os.fstat(descriptor)

    def _entries_of(self, file: Path) -> Iterator[TensorEntry]:
        descriptor, stat = self._files[file]
        try:
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if not 0 < length <= min(_LONGEST_HEADER, stat.st_size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {stat.st_size}")
            header = decode(os.pread(descriptor, length, 8))
            for name, entry in header.items():
                if name != "__metadata__":
                    yield _entry(name, entry, file, 8 + length, stat.st_size)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{file} is not a safetensors file: {error}") from error


def _entry(name: str, entry: Mapping[str, Any], file: Path, data: int, size: int) -> TensorEntry:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {entry['dtype']}, which cannot be streamed")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    count = 1
    for side in shape:
        count *= side
    if end - begin != count * int(dtype.itemsize):
        raise ValueError(f"{name} has {end - begin} bytes, but its shape needs {count * int(dtype.itemsize)}")
    if data + end > size:
        raise CheckpointError(
            f"{file} is truncated: it has {size} bytes, but {name} ends at {data + end}: download or copy it again"
        )
    return TensorEntry(name, file, dtype, shape, data + begin, end - begin)


def _files_of(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not index.is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pt") for path in folder.glob(pattern))
        found = f" ({others[0]} has another format)" if others else ""
        raise CheckpointError(
            f"{folder} has no weights that can be streamed{found}: give a folder with {_SINGLE}, or with {_INDEX} "
            "and its files"
        )
    try:
        names = sorted(set(decode(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files with its weights: {', '.join(missing[:3])}"
        )
    return [folder / name for name in names]
