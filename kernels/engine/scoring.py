"""Facts for selections of critical tokens, measured on the engine's model and pool."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.engine.attended import attended
from ragorder.kernels.engine.attention import PagedLayers
from ragorder.kernels.engine.batch import Piece
from ragorder.kernels.engine.deviation import kv_deviation
from ragorder.kernels.engine.forward import Forward
from ragorder.kernels.engine.question import Question, read_question
from ragorder.kernels.engine.scattered import Positions
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.fusion.selection import Needs, SelectionFacts
from ragorder.kernels.paging import BlockPool

__all__ = ["Scene", "Scorer"]

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """A prompt before its first step, and its blocks.

    - `prefix_tokens`: the system prompt; `question`: what is behind the documents.
    - `exact_tokens`: the exact prefix; `spans`: documents taken over, ascending. The other documents have no KV:
      their rows hold anything.
    - `asked`: the question behind the system prompt, if a warm-up has computed it.
    """

    token_ids: Sequence[int]
    table: np.ndarray[tuple[int], np.dtype[np.int32]]
    prefix_tokens: int
    exact_tokens: int
    spans: tuple[Span, ...]
    question: Span
    asked: Question | None = None

    @property
    def seed(self) -> int:
        return crc32(np.asarray(self.token_ids, dtype=np.int64).tobytes())

    def held(self, device: torch.device | str) -> Tensor:
        """bool: which tokens in front of the question have KV."""
        held = torch.zeros(self.question[0], dtype=torch.bool)
        for start, end in ((0, self.exact_tokens), *self.spans):
            held[start:end] = True
        return held.to(device)


class Scorer:
    """Facts for selections. `most_tokens`: of a forward; of a longer question the last ones count."""

    def __init__(
        self,
        forward: Forward,
        pool: BlockPool,
        rotation: Rotation,
        device: torch.device | str,
        most_tokens: int = 2048,
    ) -> None:
        self._forward = forward
        self._layers = PagedLayers(pool)
        self._rotation = rotation
        self._device = device
        self.most_tokens = most_tokens

    def measure(self, needs: Needs, scene: Scene) -> SelectionFacts:
        """What `needs` names. `two layers` writes the first layer's KV behind the exact prefix, which is exact."""
        steps = self.measuring(needs, scene, self.most_tokens)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                facts: SelectionFacts = ended.value
                return facts

    def measuring(self, needs: Needs, scene: Scene, most_tokens: int) -> Generator[int, None, SelectionFacts]:
        """`measure` in steps: each tells the tokens of the next forward, at most `most_tokens`."""
        reused = torch.cat([torch.arange(start, end) for start, end in scene.spans or [(0, 0)]]).to(self._device)
        facts = SelectionFacts(reused, scene.spans, seed=scene.seed)
        if not len(reused) or needs == "nothing":
            return facts
        if needs == "question":
            begin, end = scene.question
            most_tokens = min(most_tokens, end - begin)
            # A question that was computed already waits for the keys of this step.
            yield most_tokens if scene.asked is None else 1
            return replace(facts, attention=self.attention(scene, most_tokens=most_tokens)[reused])
        deviation = yield from self._deviation(scene, most_tokens)
        return replace(facts, deviation=deviation[reused])

    def attending(self, scene: Scene, chosen: Positions, most_tokens: int) -> Generator[int, None, Tensor]:
        """fp32, in steps: attention of the `chosen` tokens to each before the question, summed over them, mean over
        heads and layers. They are recomputed, which is written."""
        found = torch.zeros(scene.question[0], device=self._device)
        for begin in range(0, len(chosen), most_tokens):
            rows = chosen[begin : begin + most_tokens]
            yield len(rows)
            ids = [scene.token_ids[row] for row in rows]
            piece = Piece(ids, int(rows[0]), scene.table, False, rows)
            received = attended(self._forward, self._layers, piece, self._device)
            found[: len(received)] += received
        return found

    def attention(self, scene: Scene, *, alone: bool = False, most_tokens: int | None = None) -> Tensor:
        """fp32: the question's attention to each token in front of it.

        Its vectors are computed behind the documents; with `alone`, or if some of them have no KV, behind the system
        prompt, and moved behind the documents: all that this needs is there before the documents are, so that a warm-up
        may have computed it (`Scene.asked`).
        """
        held = scene.held(self._device)
        if scene.asked is not None:
            question = scene.asked.moved(scene.question[0], self._rotation)
        elif bool(held.all()) and not alone:
            question = self.read(scene, scene.question[0], most_tokens)
        else:
            question = self.read(scene, min(scene.prefix_tokens, scene.exact_tokens), most_tokens)
            question = question.moved(scene.question[0], self._rotation)
        table = torch.as_tensor(scene.table, dtype=torch.int64, device=self._device)
        return question.attention(self._layers, table, held)

    def read(self, scene: Scene, start: int, most_tokens: int | None = None) -> Question:
        """The question behind the first `start` tokens of its prompt, which have KV; its last `most_tokens`."""
        begin, end = scene.question
        ids = scene.token_ids[max(begin, end - (most_tokens or self.most_tokens)) : end]
        return read_question(self._forward, self._layers, Piece(ids, start, scene.table, False), self._device)

    def _deviation(self, scene: Scene, most_tokens: int) -> Generator[int, None, Tensor]:
        """fp32: of each token up to the last document taken over; 0 in the exact prefix."""
        parts = [torch.zeros(scene.exact_tokens, device=self._device)]
        for begin in range(scene.exact_tokens, scene.spans[-1][1], most_tokens):
            piece = Piece(
                scene.token_ids[begin : min(begin + most_tokens, scene.spans[-1][1])], begin, scene.table, False
            )
            yield len(piece.token_ids)
            parts.append(kv_deviation(self._forward, self._layers, piece, self._device, most_tokens))
        return torch.cat(parts)
