"""Transformations of the wavefront, one a file (HedraRAG section 4.5)."""

from __future__ import annotations

from ragorder.pipelining.workflow.transformations.base import Transformation
from ragorder.pipelining.workflow.transformations.fast_index import FastIndex
from ragorder.pipelining.workflow.transformations.order_documents import OrderDocuments
from ragorder.pipelining.workflow.transformations.prefetch import Prefetch
from ragorder.pipelining.workflow.transformations.reorder import Reorder
from ragorder.pipelining.workflow.transformations.speculate_generation import SpeculateGeneration
from ragorder.pipelining.workflow.transformations.speculate_retrieval import SpeculateRetrieval
from ragorder.pipelining.workflow.transformations.split import Split

__all__ = [
    "FastIndex",
    "OrderDocuments",
    "Prefetch",
    "Reorder",
    "SpeculateGeneration",
    "SpeculateRetrieval",
    "Split",
    "Transformation",
    "all_transformations",
]


def all_transformations() -> tuple[Transformation, ...]:
    """In their order: pieces are added first, so that the others decide about them too."""
    generations = SpeculateGeneration()
    return (
        generations,
        SpeculateRetrieval(generations=generations),
        Split(),
        Reorder(),
        FastIndex(),
        OrderDocuments(),
        Prefetch(),
    )
