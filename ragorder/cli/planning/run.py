"""Stages of a plan, from the input to the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ragorder.cli.planning.folder import PlanError, PlanFolder
from ragorder.cli.planning.reading import Progress, counted, identify, needed_bytes, read_input, require_space
from ragorder.cli.planning.spill import SpillWriter
from ragorder.cli.planning.workers import plan_in_processes
from ragorder.common.files import try_lock
from ragorder.common.request_lines import UnreadFields
from ragorder.trie.shards import ShardPaths, ShardRequest

_DOCUMENTS_PER_SHARD = 1_000_000
# Of a document of a request, while its shard is planned: measured, docs/batches.md.
_PLANNED_BYTES = 500
# Of the memory: the rest is for counting, and for the process that deals.
_PLANNING_SHARE = 0.75
_LARGEST = 1.25
# Of a document while it is counted: at most a third of the memory.
_COUNTED_BYTES = 1 << 11


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`shards` None: the least number that keeps a shard below a million documents."""

    shards: int | None
    document_tokens: int
    memory_bytes: int
    workers: int
    resume: bool = True


def plan_file(
    source: IO[bytes], path: Path, options: PlanOptions, unread: UnreadFields, progress: Progress
) -> dict[str, Any]:
    folder = PlanFolder(path)
    folder.refuse_foreign(source)
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(path):
            return _plan_into(folder, source, options, unread, progress)
    finally:
        if new:
            # Only if nothing is in it: the input or the disk was refused.
            with suppress(OSError):
                path.rmdir()


def _plan_into(
    folder: PlanFolder, source: IO[bytes], options: PlanOptions, unread: UnreadFields, progress: Progress
) -> dict[str, Any]:
    if not options.resume:
        folder.clear()
    finished = folder.manifest
    known = finished or folder.state
    if known:
        _refuse_another(known, options, identify(source, progress), folder.path)
    if finished:
        folder.clear_work()
        return finished
    folder.work.mkdir(exist_ok=True)
    state = dict(known) or _read(folder, source, options, unread, progress)
    if state["stage"] == "read":
        state = _deal(folder, state, options, progress)
    return _plan(folder, state, options, progress)


def _read(
    folder: PlanFolder, source: IO[bytes], options: PlanOptions, unread: UnreadFields, progress: Progress
) -> dict[str, Any]:
    try:
        require_space(folder.path, needed_bytes(source, options.document_tokens))
        read = read_input(folder, source, options.document_tokens, unread, progress)
    except BaseException:
        # What was read of an input in part is of no use.
        folder.clear_work()
        raise
    state = {"stage": "read", **read, "options": {"--document-tokens": options.document_tokens}}
    folder.save_state(state)
    return state


def _deal(folder: PlanFolder, state: Mapping[str, Any], options: PlanOptions, progress: Progress) -> dict[str, Any]:
    documents, requests = state["documents"], state["requests"]
    shards = options.shards or max(1, -(-documents // _DOCUMENTS_PER_SHARD))
    memory = int(_PLANNING_SHARE * options.memory_bytes)
    if _LARGEST * documents / shards * _PLANNED_BYTES > memory:
        least = -int(-_LARGEST * documents * _PLANNED_BYTES // memory)
        raise PlanError(
            f"with --shards {shards} a shard does not fit into --memory {options.memory_bytes / 2**30:g}GiB: give "
            f"--shards {least} or more, or more memory"
        )
    whole = folder.whole
    require_space(folder.path, whole.rows_path.stat().st_size + whole.texts_path.stat().st_size)
    passes = _Passes(lambda: (row.request for row in whole.rows()), requests, progress)
    paths = ShardPaths.of(passes, shards, most_documents=options.memory_bytes // _COUNTED_BYTES)
    sizes = [0] * shards
    with SpillWriter([folder.spill(shard) for shard in range(shards)]) as dealt:
        for row, text in counted(whole.rows_with_texts(), requests, "dealing requests", progress):
            shard = paths.shard(row.request, row.number)
            dealt.add(row, text, shard)
            sizes[shard] += len(row.request.documents)
    # Shards have about equally many tokens, of a few long documents or of many short ones.
    if (most := max(sizes)) * _PLANNED_BYTES > memory:
        for shard in range(shards):
            folder.spill(shard).remove()
        raise PlanError(
            f"a shard has {most:,} documents, which do not fit into --memory {options.memory_bytes / 2**30:g}GiB: give "
            f"more --shards than {shards}, or more memory"
        )
    state = {**state, "stage": "dealt", "shards": shards, "options": _as_given(options)}
    folder.save_state(state)
    whole.remove()
    return state


def _plan(folder: PlanFolder, state: Mapping[str, Any], options: PlanOptions, progress: Progress) -> dict[str, Any]:
    shards = range(state["shards"])
    figures = {shard: found for shard in shards if (found := folder.counts(shard)) is not None}
    sizes = {shard: folder.spill(shard).rows_path.stat().st_size for shard in shards if shard not in figures}
    largest = max(sizes.values(), default=0) // 16 * _PLANNED_BYTES
    at_once = int(_PLANNING_SHARE * options.memory_bytes) // max(1, largest)
    # The largest first: the processes end at about the same time.
    todo = sorted(sizes, key=lambda shard: (-sizes[shard], shard))
    advance = progress("planning shards", len(shards))
    for _ in figures:
        advance()
    for shard, found in plan_in_processes(folder, todo, max(1, min(options.workers, at_once))):
        figures[shard] = found
        folder.spill(shard).remove()
        advance()
    made = [figures[shard] for shard in shards]
    manifest = {name: state[name] for name in ("input", "options", "requests", "documents")}
    manifest |= {name: sum(each[name] for each in made) for name in ("tokens", "saved_tokens")}
    manifest["shards"] = made
    folder.finish(manifest)
    return manifest


class _Passes:
    def __init__(self, requests: Callable[[], Iterator[ShardRequest]], total: int, progress: Progress) -> None:
        self._requests, self._total, self._progress = requests, total, progress
        self._passes = 0

    def __iter__(self) -> Iterator[ShardRequest]:
        self._passes += 1
        label = "counting documents" if self._passes == 1 else f"grouping requests, pass {self._passes - 1}"
        return counted(self._requests(), self._total, label, self._progress)


def _as_given(options: PlanOptions) -> dict[str, Any]:
    return {"--document-tokens": options.document_tokens, "--shards": options.shards, "--memory": options.memory_bytes}


def _refuse_another(known: Mapping[str, Any], options: PlanOptions, input: Mapping[str, Any], path: Path) -> None:
    advice = "name another folder, or plan again with --no-resume"
    if known["input"] != input:
        raise PlanError(f"the plan in {path} is of another input: {advice}")
    given = _as_given(options)
    for name, made in known["options"].items():
        if made != given[name]:
            was, now = ("unset" if each is None else each for each in (made, given[name]))
            raise PlanError(f"the plan in {path} was made with {name} {was}, not {now}: give the same, {advice}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path / ".plan.lock"
    with lock.open("wb") as file:
        if not try_lock(file, unsupported=True):
            raise PlanError(f"another `ragorder plan` writes to {path}: wait for it, or name another folder")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
