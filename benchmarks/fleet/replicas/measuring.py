"""A trace on a simulated fleet."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from ragorder.benchmarks.fleet.replicas.record import ReplicasCell
from ragorder.benchmarks.fleet.replicas.replica import SimulatedReplica, Started
from ragorder.benchmarks.fleet.replicas.routers import ROUTERS, TopicOwner
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import NumberedPrompts

__all__ = ["serve"]


def serve(
    requests: Sequence[TraceRequest],
    cell: ReplicasCell,
    policy: str,
    seed: int,
    warmup: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Rows and facts of a record. As many requests as the fleet takes are always in flight; each ends after a random
    number of further ones, so that nothing depends on time."""
    prompts, rng = NumberedPrompts(), random.Random(seed)
    replicas = {number: SimulatedReplica(cell.capacity_tokens, prompts) for number in range(cell.replicas)}
    router = ROUTERS[policy](cell, seed)
    router.changed(replicas)
    most = cell.in_flight * cell.replicas
    # By the place in the trace at which a request ends; of those that should have ended, the first does.
    running: list[tuple[float, int, SimulatedReplica, Started]] = []
    rows: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    moved: list[float] = []
    exact, busiest = 0, 0.0
    for place, request in enumerate(requests):
        if cell.changes and place in (len(requests) // 3, 2 * len(requests) // 3):
            if place < len(requests) // 2:
                replicas[cell.replicas] = SimulatedReplica(cell.capacity_tokens, prompts)
            else:
                del replicas[0]
            share = router.changed(replicas)
            if share is not None:
                moved.append(share)
        number = router.choose(request.documents, replicas)
        replica = replicas[number]
        started = replica.start(request, place)
        heappush(running, (place + rng.expovariate(1 / most), place, replica, started))
        if place >= warmup:
            exact += started.exact
            row = rows[number]
            for column, figure in enumerate((1, started.prompt_tokens, started.cached_tokens)):
                row[column] += figure
            in_flight = [each.in_flight for each in replicas.values()]
            busiest = max(busiest, max(in_flight) * len(in_flight) / sum(in_flight))
        if len(running) > most:
            _, _, ending, done = heappop(running)
            ending.end(done)
        advance()
    gone = {0, cell.replicas} if cell.changes else set()
    known = sorted({*rows, *range(cell.replicas)})
    return {
        "rows": {
            "requests": [rows[number][0] for number in known],
            "prompt_tokens": [rows[number][1] for number in known],
            "cached_tokens": [rows[number][2] for number in known],
            "always": [int(number not in gone) for number in known],
        },
        "facts": {
            "exact": exact / max(1, len(requests) - warmup),
            "in_flight": busiest,
            "topics": router.topics if isinstance(router, TopicOwner) else None,
            "moved": moved,
        },
    }
