"""Systems that serve workflows: the paper's baselines, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ragorder.pipelining.workflow.transformations import (
    FastIndex,
    OrderDocuments,
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
    Transformation,
)

__all__ = ["SYSTEMS", "System"]

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class System:
    """Searches: "alone", each whole on a core of its own; "batch", whole, with all others that wait, a core each;
    "dealt", the same, its clusters dealt to all cores; "pieces".
    `transformations` of a WorkflowServer (None: stage by stage). `lockstep`: so many requests are a batch, and each of
    its stages begins when all have ended the last. `max_generations`, `window`: of the WorkflowServer."""

    words: str
    searches: Literal["alone", "batch", "dealt", "pieces"] = "pieces"
    transformations: Callable[[], Sequence[Transformation]] | None = None
    lockstep: int | None = None
    max_generations: int | None = None
    window: int = 32


def _ours(*, across: bool = True) -> tuple[Transformation, ...]:
    generations = SpeculateGeneration(across=across)
    return (generations, SpeculateRetrieval(generations=generations), Split(), Reorder())


def _ordered() -> tuple[Transformation, ...]:
    return (*_ours(), OrderDocuments())


SYSTEMS = {
    "langchain": System("batches stage by stage (LangChain)", "alone", lockstep=32),
    "flashrag": System("whole searches batched (FlashRAG)", "batch"),
    "dealt": System("whole searches batched, dealt to all cores", "dealt"),
    "pieces": System("searches in pieces", transformations=lambda: (Split(),)),
    "ragcache": System(
        "Algorithm 2 alone (RAGCache)", transformations=lambda: (SpeculateGeneration(odds=False), Split())
    ),
    "ralmspec": System(
        "local cache alone (RaLMSpec)",
        transformations=lambda: (SpeculateGeneration(odds=False, recalled_only=True), Split(), Reorder()),
    ),
    "hedra": System("ours", transformations=_ours),
    "hedra-across": System("ours, one stage ahead", transformations=lambda: _ours(across=False)),
    "hedra+order": System("ours, ordered", transformations=_ordered),
    "hedra+line": System(
        "ours, ordered, 8 on the engine", transformations=_ordered, max_generations=_AT_ONCE, window=0
    ),
    "hedra+next": System("the same, most cached first", transformations=_ordered, max_generations=_AT_ONCE),
    "hedra+fast": System("ours, a GPU beside the cores", transformations=lambda: (*_ours(), FastIndex())),
}
"""By policy. LangChain's `batch` runs a chain in lockstep; its default pool has 32 threads. RAGCache and RaLMSpec
search in pieces, as in the paper, which gave both to its own system."""
