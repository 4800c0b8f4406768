"""Requests for known, uploaded and unique documents at a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from ragorder.benchmarks.fusion.fused_orders.simulated import SimulatedFusion
from ragorder.benchmarks.fusion.fused_storage.record import StorageCell
from ragorder.orderer import Orderer

__all__ = ["POLICIES", "draw", "measure"]

POLICIES = ("prefix cache", "alternative path", "alternative path, ordered")
"""KV found as a prefix; also elsewhere (FusionRAG 4.1); the same, with documents ordered by ragorder."""

_KNOWN, _UPLOADED = 0.6, 0.3


def draw(cell: StorageCell, requests: int, seed: int) -> Iterator[list[int]]:
    """Numbers of documents: the known ones first, then the uploads, then those that are asked for once."""
    random, unique = Random(seed), cell.known + cell.uploads
    for _ in range(requests):
        chosen: dict[int, None] = {}
        while len(chosen) < cell.documents:
            place = random.random()
            if place < _KNOWN:
                chosen[random.randrange(cell.known)] = None
            elif place < _KNOWN + _UPLOADED:
                chosen[cell.known + random.randrange(cell.uploads)] = None
            else:
                chosen[unique] = None
                unique += 1
        yield list(chosen)


def measure(
    cell: StorageCell, policy: str, requests: int, seed: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Rows of a `StorageRecord`."""
    drawn = list(draw(cell, requests, seed))
    tokens = [cell.document_tokens] * (1 + max(cell.known, *map(max, drawn)))
    fuses = policy != "prefix cache"
    engine = SimulatedFusion(tokens, cell.device_tokens, recompute=0.0, copied=False, fuses=fuses)
    place = _ordered(cell) if policy.endswith("ordered") else lambda documents: (documents, lambda _: None)
    for document in range(cell.known):
        own, confirm = place([document])
        confirm(engine.serve(own, 0, 0).exact)
    computed_before = set(range(cell.known))
    rows: dict[str, list[float]] = {name: [] for name in ("documents", "found", "computed", "again", "held")}
    for documents in drawn:
        own, confirm = place(documents)
        found = engine.serve(own, 0, 0)
        confirm(found.exact)
        computed = round(found.computed / cell.document_tokens)
        new = len(set(documents) - computed_before)
        computed_before.update(documents)
        counts = len(documents), len(documents) - computed, computed, computed - new, engine.held_tokens
        for name, count in zip(rows, counts, strict=True):
            rows[name].append(count)
        advance()
    return rows


def _ordered(cell: StorageCell) -> Callable[[list[int]], tuple[list[int], Callable[[int], None]]]:
    orderer = Orderer(
        key=lambda document: document,
        tokens=lambda _: cell.document_tokens,
        capacity_tokens=cell.device_tokens,
        block_size=1,
        suffix_tokens=0,
        reuse="fused",
        strict=True,
    )

    def place(documents: list[int]) -> tuple[list[int], Callable[[int], None]]:
        ordering = orderer.order(documents)
        return list(ordering.documents), ordering.confirm

    return place
