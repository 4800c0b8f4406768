"""Several orderers in front of one simulated engine."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ragorder import Document, Orderer, Ordering
from ragorder.benchmarks.fleet.sharing.record import SharingCell
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine

__all__ = ["BLOCK_SIZE", "serve"]

BLOCK_SIZE = 16
# Of an answer, those that stay in the cache: all but its last.
_KEPT_TOKENS = 32


class _Entry(NamedTuple):
    """An order, and the place in the trace at which the other processes get it."""

    due: int
    process: int
    request: TraceRequest
    permutation: Sequence[int]


class _Running(NamedTuple):
    ordering: Ordering[Document]
    handle: int
    done: EngineCompletion


def serve(
    requests: Sequence[TraceRequest],
    cell: SharingCell,
    seed: int,
    warmup: int,
    advance: Callable[[], None] = lambda: None,
    *,
    shared: bool,
) -> dict[str, list[int]]:
    """Columns of the record. A request ends when so many others have begun as may be in flight."""
    prompts, rng = NumberedPrompts(), random.Random(seed)
    engine = SimEngine(block_size=BLOCK_SIZE, capacity_tokens=cell.capacity_tokens, like="vllm-0.32")
    orderers = [
        Orderer(
            capacity_tokens=cell.capacity_tokens,
            block_size=BLOCK_SIZE,
            prefix_tokens=prompts.prefix_tokens,
            suffix_tokens=prompts.question_tokens + _KEPT_TOKENS,
            strict=True,
        )
        for _ in range(cell.processes)
    ]
    log: deque[_Entry] = deque()
    running: deque[_Running] = deque()
    rows: dict[str, list[int]] = {"prompt_tokens": [], "cached_tokens": [], "predicted_tokens": []}
    for place, request in enumerate(requests):
        while log and log[0].due <= place:
            entry = log.popleft()
            for process, orderer in enumerate(orderers):
                if process != entry.process:
                    orderer.record(entry.request.documents, permutation=entry.permutation)
        process = rng.randrange(cell.processes)
        ordering = orderers[process].order(request.documents)
        if shared:
            log.append(_Entry(place + 1 + cell.late, process, request, ordering.permutation))
        done, handle = engine.admit(prompts.token_ids(place, request, ordering.documents), _KEPT_TOKENS)
        running.append(_Running(ordering, handle, done))
        if len(running) > cell.in_flight:
            first = running.popleft()
            engine.finish(first.handle)
            first.ordering.confirm(first.done.cached_tokens, first.done.prompt_tokens + _KEPT_TOKENS + 1)
        if place >= warmup:
            rows["prompt_tokens"].append(done.prompt_tokens)
            rows["cached_tokens"].append(done.cached_tokens)
            rows["predicted_tokens"].append(ordering.cached_tokens)
        advance()
    return rows
