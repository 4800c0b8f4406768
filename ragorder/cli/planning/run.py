"""Stages of a plan, from the input to the manifest."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from ragorder.cli.planning.requests import RequestToOrder, order_line, read_requests
from ragorder.cli.planning.store import RequestStore
from ragorder.common.processes import submit_all
from ragorder.common.request_lines import UnreadFields
from ragorder.errors import RagorderError
from ragorder.trie.shards import PlannedRequest, ShardPaths, ShardRequest, plan_requests

Progress = Callable[[str, int], Callable[[], None]]
"""Returns, for a label and a number of steps, a function to call after each step."""

T = TypeVar("T")

_STEPS = 100
_DOCUMENTS_PER_SHARD = 1_000_000
# Of a document of a request, while its shard is planned: measured, docs/batches.md.
_PLANNED_BYTES = 500
# Of the memory: the rest is for counting, and for the process that deals.
_PLANNING_SHARE = 0.75
_LARGEST = 1.25
# Of a document while it is counted: at most a third of the memory.
_COUNTED_BYTES = 1 << 11


class PlanError(RagorderError, click.ClickException): ...


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`shards` None: the least number that keeps a shard below a million documents."""

    shards: int | None
    document_tokens: int
    memory_bytes: int
    workers: int


def plan_file(
    source: IO[bytes], path: Path, options: PlanOptions, unread: UnreadFields, progress: Progress
) -> dict[str, Any]:
    """Write `shard-00000.jsonl`, … and last `manifest.json` to the folder `path`; return the manifest."""
    if any(path.glob("shard-*.jsonl")) or (path / "manifest.json").exists():
        raise PlanError(f"{path} holds shards or a manifest: name another folder")
    new, work = not path.exists(), path / ".plan"
    path.mkdir(parents=True, exist_ok=True)
    try:
        work.mkdir()
    except FileExistsError:
        raise PlanError(
            f"another `ragorder plan` writes to {path}, or was killed: name another folder, or delete {work}"
        ) from None
    try:
        with RequestStore(work) as store:
            manifest = _Run(work, store, options, progress).manifest(source, unread)
        for shard in manifest["shards"]:
            os.replace(work / shard["file"], path / shard["file"])
        os.replace(work / "manifest.json", path / "manifest.json")
        return manifest
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"the plan cannot be written to {path} ({reason}): name a folder elsewhere") from error
    except (BrokenProcessPool, MemoryError):
        raise PlanError("memory ran out, or a process was ended: give fewer --workers or more --shards") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if new:
            # Only if nothing is in it: the input was refused.
            with suppress(OSError):
                path.rmdir()


class _Run:
    def __init__(self, work: Path, store: RequestStore, options: PlanOptions, progress: Progress) -> None:
        self._work, self._store, self._options, self._progress = work, store, options, progress
        self._memory = int(_PLANNING_SHARE * options.memory_bytes)
        self._requests = self._documents = 0

    def manifest(self, source: IO[bytes], unread: UnreadFields) -> dict[str, Any]:
        self._read(source, unread)
        made = self._plan(self._deal())
        options = self._options
        manifest: dict[str, Any] = {
            "options": {
                "--document-tokens": options.document_tokens,
                "--shards": options.shards,
                "--memory": options.memory_bytes,
            },
            "requests": self._requests,
            "documents": self._documents,
            **{name: sum(each[name] for each in made) for name in ("tokens", "saved_tokens")},
            "shards": made,
        }
        (self._work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        return manifest

    def _read(self, source: IO[bytes], unread: UnreadFields) -> None:
        tokens = self._options.document_tokens
        self._store.write(
            self._noted(request) for request in read_requests(source, tokens, unread=unread, progress=self._progress)
        )
        # Results are about as long.
        needed, free = self._store.path.stat().st_size, shutil.disk_usage(self._work).free
        if free < needed:
            raise PlanError(
                f"the disk of {self._work.parent} has {free / 2**20:,.1f} MiB free, and the plan needs "
                f"{needed / 2**20:,.1f} MiB more: make room, or name a folder on another disk"
            )

    def _noted(self, request: RequestToOrder) -> tuple[int, ShardRequest, bytes]:
        documents = request.documents
        self._requests += 1
        self._documents += len(documents)
        # Names as text that is the same in every process.
        names = [repr(document.key) for document in documents]
        scope = None if request.scope == (None, None) else repr(request.scope)
        numbers = ShardRequest.of(names, [document.token_count for document in documents], scope)
        return request.index, numbers, json.dumps([request.echo, request.ids]).encode()

    def _deal(self) -> list[int]:
        """Return each shard's number of documents."""
        shards = self._options.shards or max(1, -(-self._documents // _DOCUMENTS_PER_SHARD))
        self._refuse_large(int(_LARGEST * self._documents / shards), shards)
        passes = _Passes(self._store, self._requests, self._progress)
        paths = ShardPaths.of(passes, shards, most_documents=self._options.memory_bytes // _COUNTED_BYTES)
        sizes = [0] * shards

        def dealt() -> Iterator[tuple[int, int]]:
            stored = self._store.requests()
            for number, request in _counted(stored, self._requests, "dealing requests", self._progress):
                shard = paths.shard(request, number)
                sizes[shard] += len(request.documents)
                yield shard, number

        self._store.deal(dealt())
        # Shards have about equally many tokens, of a few long documents or of many short ones.
        self._refuse_large(max(sizes), shards)
        return sizes

    def _refuse_large(self, documents: int, shards: int) -> None:
        if documents * _PLANNED_BYTES > self._memory:
            least = max(shards + 1, -(-shards * documents * _PLANNED_BYTES // self._memory))
            raise PlanError(
                f"with --shards {shards} a shard of {documents:,} documents does not fit into --memory "
                f"{self._options.memory_bytes / 2**30:g}GiB: give --shards {least} or more, or more memory"
            )

    def _plan(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        at_once = self._memory // max(1, max(sizes) * _PLANNED_BYTES)
        advance = self._progress("planning shards", len(sizes))
        # The largest first: the processes end at about the same time.
        todo = sorted(range(len(sizes)), key=lambda shard: -sizes[shard])
        made = []
        for figures in _in_processes(self._work, todo, min(self._options.workers, at_once, len(todo))):
            made.append(figures)
            advance()
        return sorted(made, key=lambda figures: str(figures["file"]))


class _Passes:
    def __init__(self, store: RequestStore, total: int, progress: Progress) -> None:
        self._store, self._total, self._progress = store, total, progress
        self._passes = 0

    def __iter__(self) -> Iterator[ShardRequest]:
        self._passes += 1
        label = "counting documents" if self._passes == 1 else f"grouping requests, pass {self._passes - 1}"
        requests = (request for _, request in self._store.requests())
        return _counted(requests, self._total, label, self._progress)


def _counted(items: Iterable[T], total: int, label: str, progress: Progress) -> Iterator[T]:
    advance, done = progress(label, _STEPS), 0
    for number, item in enumerate(items, 1):
        yield item
        while done < min(_STEPS, number * _STEPS // max(1, total)):
            advance()
            done += 1


def _in_processes(work: Path, shards: Sequence[int], processes: int) -> Iterator[dict[str, Any]]:
    """Yield a shard's figures when it is planned; one process is this one."""
    plan = partial(plan_shard, work)
    if processes <= 1:
        yield from map(plan, shards)
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start_worker)
    try:
        for done in as_completed(submit_all(pool, plan, ((shard,) for shard in shards))):
            yield done.result()
    except BaseException:
        # Nobody waits for the shards that are being planned.
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # An interrupt is the business of the process that asks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def plan_shard(work: Path, shard: int) -> dict[str, Any]:
    file = f"shard-{shard:05}.jsonl"
    with _no_collection(), (work / file).open("wb") as output, RequestStore(work) as store:
        stored = list(store.requests(shard))
        figures: dict[str, Any] = {"file": file, "requests": len(stored)}
        figures |= dict.fromkeys(("documents", "tokens", "saved_tokens"), 0)
        for planned in plan_requests([request for _, request in stored]):
            number, request = stored[planned.number]
            line = _line(number, store.text(number), planned)
            output.write(json.dumps(line).encode() + b"\n")
            figures["documents"] += len(request.documents)
            figures["tokens"] += sum(request.tokens)
            figures["saved_tokens"] += planned.shared_tokens
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
