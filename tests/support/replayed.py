"""Logs of requests as `ragorder replay` reads them, in its own format."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ragorder.eval.data.arrivals import Arrival
from ragorder.eval.data.workloads import Workload
from ragorder.eval.replay import Log, read_log

Line = dict[str, Any]


def line(ids: Sequence[Any] = "ab", time: Any = 0, **fields: Any) -> Line:
    return {"time": time, "documents": list(ids), **fields}


def packed(*lines: Any) -> bytes:
    """Lines as a log holds them; bytes stand as they are."""
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def read(*lines: Any, **options: Any) -> Log:
    return read_log(io.BytesIO(packed(*lines)), **options)


def written(folder: Path, *lines: Any, name: str = "log.jsonl") -> Path:
    path = folder / name
    data = packed(*lines)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def rankings(log: Log) -> list[list[int]]:
    return [log.ranking(row) for row in range(len(log))]


def exported(workload: Workload, arrivals: Sequence[Arrival] = (), limit: int | None = None) -> Log:
    """A synthetic workload as the log that an application would have written of it."""
    lines = []
    for number, ranking in enumerate(workload.rankings[:limit]):
        documents = [workload.documents[document] for document in ranking]
        arrival = arrivals[number] if arrivals else Arrival(number)
        told = {} if arrival.output_tokens is None else {"output_tokens": arrival.output_tokens}
        tokens = [each.token_count for each in documents]
        lines.append(line([each.id for each in documents], arrival.at_s, tokens=tokens, **told))
    return read(*lines)


class Steps:
    """What a progress bar would show."""

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}
        self.done: dict[str, int] = {}

    def __call__(self, description: str, steps: int) -> Callable[[], None]:
        self.announced[description] = steps
        self.done[description] = 0

        def advance() -> None:
            self.done[description] += 1

        return advance
