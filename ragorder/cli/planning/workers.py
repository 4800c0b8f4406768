"""Processes that plan shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from ragorder.cli.planning.folder import PlanError, PlanFolder
from ragorder.cli.planning.worker import OUT_OF_MEMORY, plan_shard, serve

__all__ = ["plan_in_processes"]


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
