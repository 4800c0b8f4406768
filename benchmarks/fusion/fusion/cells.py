"""Ways to reuse KV, and the models trained for them, of FusionRAG's measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragorder.eval.running.suite import Experiment, Job, Missing, Suite

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)
"""Shares of the reused tokens that are recomputed."""

CORPUS_DOCUMENTS = 24
Copies = Literal["alone", "similar", "similar, best first", "retrieved", "in front", "served"]
"""What a document's KV was computed after: the system prompt alone; the KV of the documents most like it (FusionRAG
3.1), the most similar one last, or first (Eq. 10); the KV of others of the same prompt, or of those before it there,
which no preprocessing can know; some other documents of an earlier prompt (Cache-Craft)."""

Select = Literal["query", "deviation", "inter", "head", "random"]


@dataclass(frozen=True, slots=True)
class Arm:
    """`exact`: the share of a prompt's documents that an exact prefix holds, as ordering finds it; of these nothing is
    recomputed. In `rounds` after the first, those are taken that the tokens recomputed so far attend to. `on_engine`:
    whether the engine can do it."""

    select: Select = "query"
    copies: Copies = "alone"
    exact: float = 0.0
    rounds: int = 1
    ratios: Sequence[float] = RATIOS

    @property
    def on_engine(self) -> bool:
        return self.copies == "alone"


Order = Literal["in front", "behind", "any"]
"""Where the document stands that another one refers to."""

SHIPPED = Path(__file__).parent


def checkpoint(folder: Path, hops: int, seed: int) -> Path:
    """Return the path of the model for questions of up to `hops`."""
    return folder / f"chains-{hops}-hops-{seed}.safetensors"


class OfTrainedModels(Experiment):
    """Runs of the seeds whose model is there: `model_of` names its file, `hops_of` what it was trained for."""

    @staticmethod
    def hops_of(cell: Any) -> int | None:
        return int(cell.hops)

    def model_of(self, cell: Any, seed: int) -> Path:
        return checkpoint(Path(cell.models) if cell.models else SHIPPED, self.hops_of(cell) or 2, seed)

    def plan(self, suite: Suite) -> Iterator[Job | Missing]:
        for cell in suite.cells:
            for seed in self.options.seeds:
                if not (path := self.model_of(cell, seed)).is_file():
                    hops = "" if self.hops_of(cell) is None else f" --set hops={self.hops_of(cell)}"
                    train = f"ragorder eval run fusion-training{hops} --seeds {seed} -o DIR"
                    why = f"no model of seed {seed} in {path.parent}: {train}, then --set models=DIR"
                    yield Missing(suite.name, cell.fields, f"seed {seed}", why)
        yield from super().plan(suite)

    def seeds(self, cell: Any) -> Sequence[int]:
        return [seed for seed in super().seeds(cell) if self.model_of(cell, seed).is_file()]
