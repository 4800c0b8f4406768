"""Deviation of reused KV from full attention's, and the places of critical tokens (FusionRAG, Figures 3, 7b and 8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ragorder.benchmarks.fusion.fusion_deviation.cells import ALONE, DeviationCell
from ragorder.benchmarks.fusion.fusion_deviation.prompts import CorpusPrompts, FusedPrompt
from ragorder.benchmarks.fusion.fusion_deviation.sequence import KVSequence
from ragorder.kernels.engine.scoring import ScoringInput
from ragorder.kernels.fusion.selection import make_selection

__all__ = ["SELECTED", "Bench", "Measured"]

SELECTED = ("query", "deviation")
_PARTS = 10
_SECOND_LAYER = 1
_KEPT = 256
"""Copies in memory: of 200 tokens of a 7B model some 3 GB."""


@dataclass
class Measured:
    """Sums over prompts. Squares: of differences and of full attention's KV. `related`: of `CorpusPrompts.related`."""

    documents: int
    deviation: list[float] = field(default_factory=list)
    tokens: int = 0
    related: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        shape = (self.documents, _PARTS)
        self._layers: list[Tensor] = []
        self._places = torch.zeros(2, *shape, dtype=torch.float64)
        self._counts = torch.zeros(shape, dtype=torch.float64)
        self._chosen = {name: torch.zeros(shape, dtype=torch.float64) for name in SELECTED}

    def add(self, squares: Tensor, spans: list[tuple[int, int]], chosen: Mapping[str, Tensor]) -> None:
        """squares (2, tokens, layers): of the documents' tokens; chosen: places among these."""
        squares = squares.double().cpu()
        second = squares[:, :, _SECOND_LAYER]
        self.deviation.append(float(second[0].sum() / second[1].sum()))
        self._layers.append(squares.sum(1))
        self.tokens += squares.shape[1]
        lengths = [end - begin for begin, end in spans]
        place = torch.cat(
            [row * _PARTS + torch.arange(length) * _PARTS // length for row, length in enumerate(lengths)]
        )
        for side in range(2):
            self._places[side].view(-1).index_add_(0, place, second[side])
        ones = torch.ones(len(place), dtype=torch.float64)
        self._counts.view(-1).index_add_(0, place, ones)
        for name, found in chosen.items():
            self._chosen[name].view(-1).index_add_(0, place[found], ones[found])

    @property
    def facts(self) -> dict[str, Any]:
        layers = torch.stack(self._layers).sum(0)
        related = {} if self.related is None else {"related": [round(share, 4) for share in self.related]}
        return {
            "layers": _rounded(layers[0] / layers[1]),
            "places": _rounded(_share(self._places[0], self._places[1])),
            "chosen": {name: _rounded(_share(counts, self._counts)) for name, counts in self._chosen.items()},
            "tokens": self.tokens,
            **related,
        }


class Bench:
    """Documents that come again soon keep their copies."""

    def __init__(self, sequence: KVSequence, prompts: CorpusPrompts, cell: DeviationCell) -> None:
        self._sequence, self._prompts, self._cell = sequence, prompts, cell
        self._copies: dict[tuple[str, int], Tensor] = {}

    def measure(self, prompt: FusedPrompt, kinds: Iterable[str]) -> dict[str, tuple[Tensor, Any, dict[str, Tensor]]]:
        """For each kind of copies the arguments of `Measured.add`."""
        sequence, documents = self._sequence, [self._prompts.document(place) for place in prompt.documents]
        start = len(prompt.system)
        borders = list(accumulate(map(len, documents), initial=start))
        spans = list(pairwise(borders))
        ids = [*prompt.system, *(token for document in documents for token in document)]
        copies = {kind: [self._copy(kind, place, prompt.system) for place in prompt.documents] for kind in kinds}
        full = sequence.compute(ids, 0)
        found = {}
        for kind, made in copies.items():
            sequence.put(full[:start], 0)
            sequence.put_together(made, start, start)
            reused = sequence.read(start, borders[-1])
            chosen = self._chosen([*ids, *prompt.question], start, spans)
            found[kind] = (_squares(reused, full[start:]), spans, chosen)
        return found

    def _chosen(self, ids: list[int], start: int, spans: list[tuple[int, int]]) -> dict[str, Tensor]:
        end = spans[-1][1]
        inputs = ScoringInput(ids, self._sequence.table, start, start, tuple(spans), (end, len(ids)))
        budget = round(self._cell.recompute * (end - start))
        chosen = {}
        for name in SELECTED:
            selection = make_selection(name)
            chosen[name] = (
                selection.choose(self._sequence.scorer.measure(selection.needs, inputs), budget).cpu() - start
            )
        return chosen

    def _copy(self, kind: str, place: int, system: Any) -> Tensor:
        """A document's KV, from the end of the system prompt on."""
        if (kind, place) not in self._copies:
            sequence, start = self._sequence, len(system)
            near = (
                [] if kind == ALONE else [self._copy(ALONE, each, system) for each in self._prompts.neighbours(place)]
            )
            sequence.compute(system, 0)
            behind = sequence.put_together(near, start, start)
            kv = sequence.compute(self._prompts.document(place), behind)
            while len(self._copies) >= _KEPT:
                del self._copies[next(iter(self._copies))]
            self._copies[kind, place] = sequence.moved(kv, behind, start)
        return self._copies[kind, place]


def _squares(reused: Tensor, full: Tensor) -> Tensor:
    """(2, tokens, layers)"""
    sides = (reused.float() - full.float(), full.float())
    return torch.stack([side.square().sum((2, 3, 4)) for side in sides])


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """0 where there are no tokens: in a tenth of a document of fewer than ten."""
    return torch.where(whole > 0, part / whole.clamp_min(1e-300), 0.0)


def _rounded(values: Tensor) -> Any:
    return (
        [[round(number, 6) for number in row] for row in values.tolist()]
        if values.dim() > 1
        else [round(number, 6) for number in values.tolist()]
    )
