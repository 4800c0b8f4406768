"""The specification of a benchmark of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragorder.eval.data.retrieval import Retriever
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.experiments.quality.models import RANDOM_WEIGHTS
from ragorder.eval.experiments.quality.orders import DEFAULT_ORDERS

__all__ = ["Done", "Line", "QualityBench"]

Line = dict[str, Any]
Done = Callable[[Mapping[str, Any], str], bool]


@dataclass(frozen=True, slots=True)
class QualityBench:
    """What to ask whom. `data` to `retriever` are those of `load_questions`, `question_order` its order; a
    retriever may be given by its name.

    `orders` are policies with guards: "retrieval", "auto+keep_first=2", "auto+state_ranking" (see `Order`). Engine
    "vllm" or "torch" serves `model` in this process (None: random weights), "openai" asks `served_model` (None: the
    first one listed) of the server at `base_url`, with `concurrency` questions in flight; `model` is then the folder or
    the name on the Hub whose tokenizer counts tokens exactly, where there is one. The longest answer has
    `output_tokens`.

    `suite`, `suite_cell` (None: made of the rest) and `session` are written into the results as they are.

    A `dry_run` calls no engine: a stub says the accepted answer, and then nothing.
    """

    dataset: str
    data: Path | None = None
    config: str | None = None
    split: str | None = None
    evidence: Path | None = None
    aliases: Path | None = None
    limit: int | None = None
    question_order: str = "data"
    seed: int = 0
    top_k: int | None = None
    document_words: int | None = None
    retriever: Retriever | str | None = None
    orders: tuple[str, ...] = DEFAULT_ORDERS
    engine: str = "vllm"
    model: str | Path | None = None
    base_url: str | None = None
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    capacity: Capacity | None = None
    block_size: int | None = None
    output_tokens: int = 32
    concurrency: int = 1
    dry_run: bool = False
    suite: str = "quality"
    suite_cell: Mapping[str, Any] | None = None
    session: str | None = None

    def cell(self) -> Line:
        """What the results belong to, apart from seed and order."""
        if self.suite_cell is not None:
            return dict(self.suite_cell)
        capacity = self.capacity
        model = str(self.model) if self.model else None if self.engine == "openai" else RANDOM_WEIGHTS
        return {
            "dataset": self.dataset,
            "data": str(self.data) if self.data else None,
            "config": self.config,
            "split": self.split,
            "limit": self.limit,
            "question_order": self.question_order,
            "top_k": self.top_k,
            "document_words": self.document_words,
            "retriever": self.retriever if isinstance(self.retriever, str) else self.retriever and self.retriever.name,
            "engine": "stub" if self.dry_run else self.engine,
            "model": None if self.dry_run else self.served_model or model,
            "base_url": None if self.dry_run else self.base_url,
            "capacity_tokens": capacity and (f"{capacity.percent}%" if capacity.percent else capacity.tokens),
            "block_size": self.block_size,
            "output_tokens": self.output_tokens,
            "concurrency": self.concurrency,
        }

    def cells(self) -> list[Line]:
        """That of `cell`; in a dry run the one with the accepted answers, and the one with none."""
        said = [{"answers": "accepted"}, {"answers": "empty"}] if self.dry_run else [{}]
        return [self.cell() | each for each in said]
