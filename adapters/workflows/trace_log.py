"""File of traces."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ragorder.pipelining.workflow import WorkflowTrace

__all__ = ["TraceLog"]


class TraceLog:
    """Observer for a workflow server that appends a line of JSON for each request, without its text: for `ragorder
    workflow trace`. Thread-safe, a context manager.

        with TraceLog("trace.jsonl") as log:
            server = ordered_workflows(…, observers=[log])

    Raises OSError for a file that cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115
        self._lock = Lock()

    def __call__(self, trace: WorkflowTrace) -> None:
        line = json.dumps(trace.as_record(), ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
