"""The plan of one shard, in a process that plans one after another."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ragorder.cli.planning.folder import PlanFolder, write_json
from ragorder.cli.planning.spill import Row
from ragorder.trie.plan import plan
from ragorder.trie.shards import shared_documents
from ragorder.trie.tree import Key

__all__ = ["OUT_OF_MEMORY", "plan_shard", "serve"]

OUT_OF_MEMORY = "memory ran out: give fewer --workers or more --shards"


def serve(tasks: Connection[Any, Any], path: Path) -> None:
    """Plan the shards whose numbers come, until no more come. An answer is (figures, "") or (None, error)."""
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
    """Write a shard's requests in serving order; its figures. Tenants are planned one by one."""
    spill = folder.spill(shard)
    rows: list[Row] = []
    starts, end = array("Q"), 0
    by_scope: dict[int | None, list[int]] = {}
    for place, row in enumerate(spill.rows()):
        rows.append(row)
        starts.append(end)
        end += row.text_bytes
        by_scope.setdefault(row.request.scope, []).append(place)
    figures: dict[str, Any] = {"file": folder.shard_path(shard).name, "requests": len(rows)}
    figures |= {"documents": 0, "tokens": 0, "saved_tokens": 0}
    written = folder.work / f"{folder.shard_path(shard).name}.{os.getpid()}"
    with _no_collection(), written.open("wb") as output, spill.texts_path.open("rb") as texts:
        for members in by_scope.values():
            requests = [rows[place].request for place in members]
            tokens: dict[Key, int] = {
                document: length
                for request in requests
                for document, length in zip(request.documents, request.tokens, strict=True)
            }
            before: Sequence[Any] = ()
            for number, order in plan([request.documents for request in requests], tokens):
                row = rows[members[number]]
                texts.seek(starts[members[number]])
                ranks: dict[Key, int] = {document: rank for rank, document in enumerate(row.request.documents)}
                lengths = [tokens[document] for document in order]
                shared = shared_documents(before, order)
                line = _line(row.index, texts.read(row.text_bytes), [ranks[document] for document in order])
                line |= {"prefix_documents": shared, "cached_tokens": sum(lengths[:shared])}
                output.write(json.dumps(line).encode() + b"\n")
                figures["documents"] += len(order)
                figures["tokens"] += sum(lengths)
                figures["saved_tokens"] += line["cached_tokens"]
                before = order
        output.flush()
        os.fsync(output.fileno())
    write_json(folder.counts_path(shard), figures)
    os.replace(written, folder.shard_path(shard))
    return figures


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector: a plan is millions of objects without a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _line(index: int, text: bytes, permutation: list[int]) -> dict[str, Any]:
    echo, ids = json.loads(text)
    return {**echo, "index": index, "documents": [ids[rank] for rank in permutation], "permutation": permutation}


def _end_with_parent() -> None:
    """End at once if the process that asks was killed: its successor plans this shard anew."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
