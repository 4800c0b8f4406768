"""The requests of a stream at a simulated engine, in one of the orders compared."""

from __future__ import annotations

from collections.abc import Callable

from ragorder.benchmarks.fusion.fused_orders.record import FusedOrdersCell
from ragorder.benchmarks.fusion.fused_orders.simulated import SimulatedFusion
from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream
from ragorder.benchmarks.ragcache.replacement.tiers import A10G, QUESTION_TOKENS
from ragorder.orderer import Orderer

__all__ = ["ORDERS", "measure"]

ORDERS = ("prefix cache", "prefix cache, ordered", "retrieval", "ordered", "invested")
"""A prefix cache alone, as ranked and ordered; fused as ranked (FusionRAG); ordered by ragorder; ordered, and copies
computed exactly where later requests pay for it."""

Place = Callable[[tuple[int, ...]], tuple[list[int], int, Callable[[int], None]]]


def measure(
    stream: DocumentStream, cell: FusedOrdersCell, policy: str, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Rows of a `FusedOrdersRecord`."""
    engine = SimulatedFusion(
        stream.tokens,
        cell.device_tokens,
        recompute=cell.recompute,
        copied=cell.copies == "all",
        fuses=not policy.startswith("prefix cache"),
    )
    place = _placing(stream, cell, policy)
    columns = "document_tokens", "exact_tokens", "fused_tokens", "computed_tokens", "seconds"
    rows: dict[str, list[float]] = {name: [] for name in columns}
    for request in stream.requests:
        documents, exact_documents, confirm = place(request)
        found = engine.serve(documents, exact_documents, QUESTION_TOKENS)
        confirm(found.exact)
        length = sum(stream.tokens[document] for document in request)
        # What is computed attends to all in front of it, as a suffix does.
        seconds = A10G(round(length + QUESTION_TOKENS - found.computed), found.computed)
        for name, value in zip(columns, (length, found.exact, found.fused, found.computed, seconds), strict=True):
            rows[name].append(round(value, 4))
        advance()
    return rows


def _placing(stream: DocumentStream, cell: FusedOrdersCell, policy: str) -> Place:
    if policy in ("retrieval", "prefix cache"):
        return lambda request: (list(request), 0, lambda _: None)
    orderer = Orderer(
        key=lambda document: document,
        tokens=stream.tokens.__getitem__,
        capacity_tokens=cell.device_tokens,
        block_size=1,
        suffix_tokens=QUESTION_TOKENS,
        reuse="exact" if policy == "prefix cache, ordered" else "fused",
        recompute=cell.recompute,
        copies=cell.copies,
        invest=policy == "invested",
        strict=True,
    )

    def place(request: tuple[int, ...]) -> tuple[list[int], int, Callable[[int], None]]:
        ordering = orderer.order(request)
        return list(ordering.documents), ordering.exact_documents, ordering.confirm

    return place
