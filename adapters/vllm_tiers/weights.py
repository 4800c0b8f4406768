"""Identity of an engine's weights: digests over every byte of their files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from ragorder.common.jsonl import decode
from ragorder.errors import RagorderError
from ragorder.kernels.store.hashing import digest_in_pieces, digest_threads

__all__ = ["MEMORY", "UnknownWeightsError", "WeightDigests"]

MEMORY = "weights.json"
"""File of cached digests, in the folder of the disk tier."""

_TOKENS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "chat_template", "generation_config")
_NOT_THE_MODEL = (".", "README", "LICENSE", *_TOKENS)
_NOT_WEIGHTS = frozenset({".md", ".txt", ".jinja", ".png", ".jpg"})
# A file changed this shortly before it was read may change again within the same time stamp.
_SETTLED_NS = 2 * 10**9
_MAX_MEMORY_BYTES = 1 << 20


class UnknownWeightsError(RagorderError): ...


class WeightDigests:
    """Digests of models, over all bytes of their files; cached in the file `memory` by inode, size and times, including
    ctime, which no copying tool sets back. A memory that other users can write is ignored."""

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory
        self._known = _read(memory) if memory is not None else {}

    def of(self, model: str, revision: str | None = None, *, dummy: bool = False, hub: Path | None = None) -> str:
        """`model`: a folder, a file, or a name on the Hub with its commit `revision`. `dummy` weights are made from the
        configuration. Raises UnknownWeightsError, OSError."""
        path = Path(model)
        if path.is_file():
            return "file " + self._digest([path])
        if path.is_dir():
            files = _files(path)
            if dummy or any(file.suffix != ".json" for file in files):
                return "files " + self._digest(files)
            raise UnknownWeightsError(f"the weights of {model} cannot be identified: the folder has none")
        commits = _commits(model, hub)
        if revision is None or len(revision) != 40:
            if len(commits) != 1:
                found = f"{len(commits)} revisions of it are" if commits else "it is not"
                raise UnknownWeightsError(
                    f"the weights of {model} cannot be identified ({found} in the cache of the Hugging Face hub): give "
                    "vLLM the folder of the model, or --revision with a whole commit"
                )
            [revision] = commits
        # The commit identifies the download, the files any change since then.
        files = _files(commits[revision]) if revision in commits else []
        return f"commit {revision} of {model}, files {self._digest(files)}"

    def _digest(self, files: Iterable[Path]) -> str:
        found = sha256()
        with digest_threads() as threads:
            for path in sorted(files, key=lambda path: path.name):
                found.update(f"{path.name}\n{self._file(path.resolve(), threads)}\n".encode("utf-8", "surrogateescape"))
        self._remember()
        return found.hexdigest()

    def _file(self, path: Path, threads: Executor) -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            facts = _facts(os.fstat(descriptor))
            known = self._known.get(str(path))
            if known is not None and known[:-1] == facts:
                return str(known[-1])
            began = time.time_ns()
            digest = digest_in_pieces(
                lambda start, end: _read_piece(descriptor, start, end), os.fstat(descriptor).st_size, threads
            )
            if _facts(os.fstat(descriptor)) != facts:
                raise UnknownWeightsError(
                    f"the weights in {path} cannot be identified: the file changes while it is read"
                )
        finally:
            os.close(descriptor)
        if began - max(facts[-2:]) > _SETTLED_NS:
            self._known[str(path)] = [*facts, digest]
        return digest

    def _remember(self) -> None:
        if self._memory is None:
            return
        with suppress(OSError):
            self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._memory.with_name(f"{self._memory.name}.{os.getpid()}.tmp")
            with suppress(FileNotFoundError):
                temporary.unlink()
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(self._known, file)
            temporary.replace(self._memory)


def _files(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(_NOT_THE_MODEL) and file.suffix not in _NOT_WEIGHTS
    ]


def _facts(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_piece(descriptor: int, start: int, end: int) -> bytes:
    read = os.pread(descriptor, end - start, start)
    while len(read) < end - start:
        more = os.pread(descriptor, end - start - len(read), start + len(read))
        if not more:
            raise UnknownWeightsError("the model's weights cannot be identified: a file shrinks while it is read")
        read += more
    return read


def _read(memory: Path) -> dict[str, list[int | str]]:
    try:
        descriptor = os.open(memory, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return {}
        found = decode(os.read(descriptor, _MAX_MEMORY_BYTES))
    except (OSError, ValueError):
        return {}
    finally:
        os.close(descriptor)
    if not isinstance(found, dict):
        return {}
    return {path: facts for path, facts in found.items() if isinstance(facts, list) and len(facts) == 6}


def _commits(model: str, hub: Path | None) -> dict[str, Path]:
    if hub is None:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE
        except ImportError:
            return {}
        hub = Path(HF_HUB_CACHE)
    snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    return {path.name: path for path in sorted(snapshots.iterdir())} if snapshots.is_dir() else {}
