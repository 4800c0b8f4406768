"""Processes that plan shards."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from ragorder.cli.planning.folder import PlanError, PlanFolder, write_json
from ragorder.cli.planning.requests import order_line
from ragorder.trie.shards import PlannedRequest, plan_requests

OUT_OF_MEMORY = "memory ran out: give fewer --workers or more --shards"


def serve(tasks: Connection[Any, Any], path: Path) -> None:
    """Plan the shards whose numbers arrive, until the pipe closes. An answer is (figures, "") or (None, error)."""
    # An interrupt is the business of the process that asks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = PlanFolder(path)
    with suppress(EOFError, BrokenPipeError):
        while True:
            shard = tasks.recv()
            try:
                tasks.send((plan_shard(folder, shard), ""))
            except BrokenPipeError:
                raise
            except OSError as error:
                tasks.send((None, str(error)))
            except MemoryError:
                tasks.send((None, OUT_OF_MEMORY))


def plan_shard(folder: PlanFolder, shard: int) -> dict[str, Any]:
    spill = folder.spill(shard)
    rows = list(spill.rows())
    starts = array("Q", accumulate((row.text_bytes for row in rows), initial=0))
    figures: dict[str, Any] = {"file": folder.shard_path(shard).name, "requests": len(rows)}
    figures |= {"documents": 0, "tokens": 0, "saved_tokens": 0}
    written = folder.work / f"{folder.shard_path(shard).name}.{os.getpid()}"
    with _no_collection(), written.open("wb") as output, spill.texts_path.open("rb") as texts:
        for planned in plan_requests([row.request for row in rows]):
            row = rows[planned.number]
            texts.seek(starts[planned.number])
            line = _line(row.number, texts.read(row.text_bytes), planned)
            output.write(json.dumps(line).encode() + b"\n")
            figures["documents"] += len(row.request.documents)
            figures["tokens"] += sum(row.request.tokens)
            figures["saved_tokens"] += planned.shared_tokens
        output.flush()
        os.fsync(output.fileno())
    write_json(folder.counts_path(shard), figures, folder.work)
    os.replace(written, folder.shard_path(shard))
    return figures


@contextmanager
def _no_collection() -> Iterator[None]:
    """Run without the garbage collector: a plan is millions of objects without a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _line(index: int, text: bytes, planned: PlannedRequest) -> dict[str, Any]:
    echo, ids = json.loads(text)
    return order_line(echo, index, ids, planned.permutation, planned.shared_documents, planned.shared_tokens)


def _end_with_parent() -> None:
    """End at once if the parent was killed: its successor plans this shard again."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def plan_in_processes(
    folder: PlanFolder, shards: Iterable[int], processes: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (shard, figures) when a shard is ready; one worker is this process."""
    waiting = deque(shards)
    if processes == 1:
        for shard in waiting:
            yield shard, _planned(folder, shard)
        return
    workers: dict[Any, SpawnProcess] = {}
    busy: dict[Any, int] = {}
    try:
        for _ in range(min(processes, len(waiting))):
            ours, process = _start(folder)
            workers[ours] = process
            busy[ours] = waiting.popleft()
            ours.send(busy[ours])
        while busy:
            for ready in wait(list(busy)):
                tasks: Any = ready
                shard = busy.pop(tasks)
                yield shard, _answer(tasks, workers[tasks], folder.shard_path(shard).name)
                if waiting:
                    busy[tasks] = waiting.popleft()
                    tasks.send(busy[tasks])
    except BrokenPipeError:
        raise PlanError("a planning process was ended: run the same command again to continue") from None
    finally:
        for process in workers.values():
            process.terminate()
        for process in workers.values():
            process.join()


def _planned(folder: PlanFolder, shard: int) -> dict[str, Any]:
    try:
        return plan_shard(folder, shard)
    except MemoryError:
        raise PlanError(f"{folder.shard_path(shard).name}: {OUT_OF_MEMORY}") from None


def _start(folder: PlanFolder) -> tuple[Connection[Any, Any], SpawnProcess]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, folder.path), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _answer(tasks: Any, process: SpawnProcess, name: str) -> dict[str, Any]:
    try:
        figures, problem = tasks.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise PlanError(
            f"the process that planned {name} has ended (status {process.exitcode}): if memory ran out, give fewer "
            "--workers; run the same command again to continue"
        ) from None
    if problem:
        raise PlanError(f"{name}: {problem}; run the same command again to continue")
    answer: dict[str, Any] = figures
    return answer
