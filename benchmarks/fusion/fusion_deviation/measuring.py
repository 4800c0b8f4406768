"""Prompts of a corpus, KV of one sequence at a time, and how far it deviates."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragorder.benchmarks.common.vectors import nearest_documents
from ragorder.benchmarks.fusion.fusion_deviation.cells import ALONE, DeviationCell
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.kernels.engine.scoring import Scorer, ScoringInput
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.fusion.selection import make_selection
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.paging import BlockPool


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    """`documents` are places in the corpus, in the prompt's order."""

    system: Sequence[int]
    documents: Sequence[int]
    question: Sequence[int]


class CorpusPrompts:
    """The questions of a corpus with the number of documents that the cell wants, in an order of the seed's."""

    def __init__(self, corpus: Corpus, tokenizer: Any, cell: DeviationCell) -> None:
        self._corpus, self._tokenizer, self._cell = corpus, tokenizer, cell
        self._near: list[list[int]] | None = None

    def draw(self, count: int, seed: int) -> Iterator[FusedPrompt]:
        wanted, corpus = self._cell.documents, self._corpus
        known = [place for place, ranking in enumerate(corpus.rankings) if len(ranking) >= wanted]
        random.Random(seed).shuffle(known)
        for place in known[:count]:
            question = self._ids(corpus.questions[place].text)
            yield FusedPrompt(self._ids(SYSTEM_PROMPT), list(corpus.rankings[place])[:wanted], question)

    def document(self, place: int) -> list[int]:
        return self._ids(self._corpus.documents[place].text)[: self._cell.document_tokens]

    def neighbours(self, place: int) -> list[int]:
        """Of the whole corpus, the most similar one first. Raises ImportError, OSError, ValueError."""
        if self._near is None:
            self._near = nearest_documents(self._corpus, self._cell.by, self._cell.neighbours)
        return self._near[place]

    def related(self) -> tuple[float, float]:
        """Return FusionRAG's Figure 7a: documents retrieved beside a neighbour, and neighbours retrieved, as shares."""
        wanted = self._cell.documents
        sets = [list(ranking)[:wanted] for ranking in self._corpus.rankings if len(ranking) >= wanted]
        found = [
            [near in retrieved for near in self.neighbours(place)]
            for retrieved in sets
            for place in retrieved
            if self.neighbours(place)
        ]
        return (fmean(map(any, found)), fmean(near for each in found for near in each)) if found else (0.0, 0.0)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class KVSequence:
    """A pool with the blocks of one sequence of at most `tokens` tokens. KV: (n, layers, 2, KV heads, D).

    Raises UnsupportedModelError for a model whose keys cannot be moved, ValueError for one of a single layer. Until
    `close` the model has the engine's attention.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model = PatchedModel(model, EngineSettings(verify=False))
        try:
            if self._model.shape.layers < 2:
                raise ValueError(f"{self._model.name} has one layer, whose KV never deviates: give another model")
            self._rotation = Rotation.of(model)
        except BaseException:
            self.close()
            raise
        shape, self._device = self._model.shape, self._model.device
        self._pool = BlockPool(shape, shape.blocks_for(tokens), self._device)
        self.table = np.asarray(self._pool.allocate(self._pool.blocks), dtype=np.int32)
        self._blocks = torch.as_tensor(self.table, dtype=torch.int64, device=self._device)
        self.scorer = Scorer(self._model.forward, self._pool, self._rotation)

    def close(self) -> None:
        self._model.restore()

    def compute(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Return KV of new tokens after the first `start` ones."""
        self._model.forward(*pack([Piece(token_ids, start, self.table, False)], self._pool))
        return self.read(start, start + len(token_ids))

    def read(self, start: int, end: int) -> Tensor:
        return self._pool.kv[self._rows(start, end)].clone()

    def put(self, kv: Tensor, start: int) -> None:
        self._pool.kv[self._rows(start, start + len(kv))] = kv

    def moved(self, kv: Tensor, old: int, new: int) -> Tensor:
        """KV computed from position `old` on, as it stands from `new` on."""
        turn = self._rotation.turn(new - old, torch.arange(old, old + len(kv)))
        keys = [turn.apply(kv[:, layer, 0], layer) for layer in range(kv.shape[1])]
        return torch.stack([torch.stack(keys, 1), kv[:, :, 1]], 2)

    def put_together(self, copies: Iterable[Tensor], made_at: int, start: int) -> int:
        """Copies computed from position `made_at` on, one after another from `start` on; returns where they end."""
        for kv in copies:
            self.put(self.moved(kv, made_at, start), start)
            start += len(kv)
        return start

    def _rows(self, start: int, end: int) -> tuple[Tensor, slice, slice, Tensor]:
        size = self._pool.shape.block_size
        at = torch.arange(start, end, device=self._device)
        return self._blocks[at // size], slice(None), slice(None), at % size


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
            context = sequence.put_together(near, start, start)
            kv = sequence.compute(self._prompts.document(place), context)
            while len(self._copies) >= _KEPT:
                del self._copies[next(iter(self._copies))]
            self._copies[kind, place] = sequence.moved(kv, context, start)
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
