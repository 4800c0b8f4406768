"""`ragorder plan` as a process of its own, with the processor time and the memory of all its processes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["PlanFailedError", "run_plan"]

_EVERY_S = 0.2
_PAGE = resource.getpagesize()


class PlanFailedError(RuntimeError):
    """The command has failed; the message is what it said."""


def run_plan(source: Path, folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest, and facts. Raises PlanFailedError."""
    before = _core_s()
    command = [sys.executable, "-m", "ragorder", "plan", str(source), "--out", str(folder), *options]
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        memory = _Memory(process.pid)
        memory.start()
        said = process.communicate()[1]
        memory.stop()
    if process.returncode:
        raise PlanFailedError(said.strip())
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
    tokens = [shard["tokens"] for shard in manifest["shards"]]
    facts = {
        "core_s": round(_core_s() - before, 2),
        "peak_bytes": memory.peak_bytes,
        "largest": round(max(tokens) * len(tokens) / max(1, sum(tokens)), 3),
    }
    return manifest, facts


def _core_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Memory(threading.Thread):
    """Most resident memory of a process and its children together, looked at five times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident_bytes, _family(self._pid))))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    except OSError:
        children = []
    return [pid, *(each for child in children for each in _family(int(child)))]


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
