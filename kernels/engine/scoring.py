"""Measurements for selections of critical tokens, on the engine's model and pool."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.attention import PackedBatch, prefix_attention
from ragorder.kernels.attention.weights import Keys, Queries, attention_received
from ragorder.kernels.engine.sequence import Positions
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.fusion.selection import Measurements, Needs
from ragorder.kernels.models.attention import PagedLayers, PagedStep, StepAttention
from ragorder.kernels.models.batch import Forward, ForwardEnded, Piece, pack
from ragorder.kernels.paging import BlockPool

__all__ = ["Question", "Scorer", "ScoringInput", "attended", "kv_deviation", "read_question"]


def attended(forward: Forward, layers: PagedLayers, piece: Piece, device: torch.device | str) -> Tensor:
    """Return fp32 (keys,): attention from the piece's rows at `positions` to each key in its context, summed over rows,
    mean over heads and layers. Writes the rows' KV."""
    step = pack([piece], layers, device)
    attention = _AllLayers(step.attention, layers, step.positions, piece)
    forward.until_ended(step.token_ids, step.positions, attention)
    return attention.total / len(layers.key_caches)


class _AllLayers:
    """A step's attention (`inner`) that sums its rows' attention and ends in the last layer."""

    def __init__(self, inner: PagedStep, layers: PagedLayers, positions: Tensor, piece: Piece) -> None:
        self._inner = inner
        self._layers = layers
        self._positions = positions
        self._table = torch.as_tensor(piece.table, dtype=torch.int64, device=positions.device)
        self.total = torch.zeros(piece.context, device=positions.device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        out = self._inner.attend(layer, query, key, value, scale=scale, window=window, softcap=softcap)
        keys = Keys(self._layers.key_caches[layer], self._table, len(self.total))
        self.total += attention_received(Queries(query, self._positions, scale, window, softcap), keys)
        if layer == len(self._layers.key_caches) - 1:
            raise ForwardEnded
        return out


def kv_deviation(
    forward: Forward, layers: PagedLayers, piece: Piece, device: torch.device | str, most_tokens: int
) -> Tensor:
    """Return fp32 (tokens,): |ΔK|² + |ΔV|² of the piece's tokens between full attention and the pool, in the second
    layer.

    The `start` tokens before it have exact KV. Its own tokens may have no KV: theirs in the first layer is written,
    and depends on no other token, so reused KV is exact there. Computes at most `most_tokens` at a time.
    """
    if len(layers.key_caches) < 2:
        return torch.zeros(len(piece.token_ids), device=device)
    parts = []
    for begin in range(0, len(piece.token_ids), most_tokens):
        chunk = replace(piece, token_ids=piece.token_ids[begin : begin + most_tokens], start=piece.start + begin)
        step = pack([chunk], layers, device)
        attention = _SecondLayer(step.attention, layers, step.positions, piece)
        forward.until_ended(step.token_ids, step.positions, attention)
        parts.append(attention.deviation)
    return torch.cat(parts)


class _SecondLayer:
    """First-layer attention; ends in the second layer with the distance of its KV from the pool's."""

    deviation: Tensor

    def __init__(self, inner: StepAttention, layers: PagedLayers, positions: Tensor, piece: Piece) -> None:
        self._inner = inner
        self._layers = layers
        table = torch.as_tensor(piece.table, dtype=torch.int64, device=positions.device)
        self._places = table[positions // layers.block_size], positions % layers.block_size

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if not layer:
            return self._inner.attend(layer, query, key, value, scale=scale, window=window, softcap=softcap)
        old_key, old_value = (
            caches[layer][self._places] for caches in (self._layers.key_caches, self._layers.value_caches)
        )
        self.deviation = _distance(key, old_key) + _distance(value, old_value)
        raise ForwardEnded


def _distance(new: Tensor, old: Tensor) -> Tensor:
    return (new.float() - old.float()).square().sum((1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A question's n tokens in the last layer, after `start` tokens: `queries`, and `keys` (n, HKV, D), rotated."""

    queries: Queries
    keys: Tensor
    start: int

    def moved(self, start: int, rotation: Rotation) -> Question:
        """The same vectors, moved to another start."""
        old, last = self.queries.positions, len(rotation.ropes) - 1
        turn = rotation.turn(start - self.start, old)
        queries = replace(self.queries, rows=turn.apply(self.queries.rows, last), positions=old + (start - self.start))
        return Question(queries, turn.apply(self.keys, last), start)

    def attention(self, layers: PagedLayers, table: Tensor, held: Tensor | None = None) -> Tensor:
        """Return fp32 (start,): attention to each earlier token, with keys in the blocks `table` (int64).

        Softmax over the `held` tokens (bool (start,), all by default) and the question itself, summed over its tokens,
        mean over heads.
        """
        keys = Keys(layers.key_caches[-1], table, self.start, self.keys, held)
        return attention_received(self.queries, keys)[: self.start]


def read_question(forward: Forward, layers: PagedLayers, piece: Piece, device: torch.device | str) -> Question:
    """Compute a question after the `start` tokens with KV in its blocks. Writes nothing."""
    count = len(piece.token_ids)
    attention = _LastLayer(layers, PackedBatch.pack([count], [piece.start], [np.asarray(piece.table).tolist()], device))
    positions = torch.arange(piece.start, piece.start + count, device=device)
    forward.until_ended(torch.tensor(piece.token_ids, device=device), positions, attention)
    return Question(replace(attention.queries, positions=positions), attention.keys, piece.start)


class _LastLayer:
    """Attention that ends with the arguments of the last layer."""

    queries: Queries
    keys: Tensor

    def __init__(self, layers: PagedLayers, batch: PackedBatch) -> None:
        self._layers = layers
        self._batch = batch

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        layers = self._layers
        if layer == len(layers.key_caches) - 1:
            self.queries, self.keys = Queries(query, query.new_empty(0), scale, window, softcap), key
            raise ForwardEnded
        out: Tensor = prefix_attention(
            query,
            key,
            value,
            layers.key_caches[layer],
            layers.value_caches[layer],
            self._batch,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return out


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A prompt before its first step, and its blocks.

    - `prefix_tokens`: the system prompt; `question`: the tokens after the documents.
    - `exact_tokens`: the exact prefix; `spans`: reused documents, ascending. Rows of other documents hold anything.
    - `asked`: the question's vectors after the system prompt, if a warm-up has computed them.
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
        """bool: which tokens before the question have KV."""
        held = torch.zeros(self.question[0], dtype=torch.bool)
        for start, end in ((0, self.exact_tokens), *self.spans):
            held[start:end] = True
        return held.to(device)


class Scorer:
    """Measures the input of selections in forwards of `most_tokens`; only the last tokens of a longer question
    count."""

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

    def measure(self, needs: Needs, inputs: ScoringInput) -> Measurements:
        """Measure what `needs` names. `two layers` writes the first layer's KV after the exact prefix, which is
        exact."""
        steps = self.measuring(needs, inputs, self.most_tokens)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                measurements: Measurements = ended.value
                return measurements

    def measuring(self, needs: Needs, inputs: ScoringInput, most_tokens: int) -> Generator[int, None, Measurements]:
        """Run `measure` in steps; yield the tokens of each next forward, at most `most_tokens`."""
        reused = torch.cat([torch.arange(start, end) for start, end in inputs.spans or [(0, 0)]]).to(self._device)
        measurements = Measurements(reused, inputs.spans, seed=inputs.seed)
        if not len(reused) or needs == "nothing":
            return measurements
        if needs == "question":
            begin, end = inputs.question
            most_tokens = min(most_tokens, end - begin)
            # A question that is already computed waits for the keys of this step.
            yield most_tokens if inputs.asked is None else 1
            return replace(measurements, attention=self.attention(inputs, most_tokens=most_tokens)[reused])
        deviation = yield from self._deviation(inputs, most_tokens)
        return replace(measurements, deviation=deviation[reused])

    def attending(self, inputs: ScoringInput, chosen: Positions, most_tokens: int) -> Generator[int, None, Tensor]:
        """In steps, return fp32: attention of the `chosen` tokens to each token before the question, summed over them,
        mean over heads and layers. Recomputes them and writes their KV."""
        found = torch.zeros(inputs.question[0], device=self._device)
        for begin in range(0, len(chosen), most_tokens):
            rows = chosen[begin : begin + most_tokens]
            yield len(rows)
            ids = [inputs.token_ids[row] for row in rows]
            piece = Piece(ids, int(rows[0]), inputs.table, False, rows)
            received = attended(self._forward, self._layers, piece, self._device)
            found[: len(received)] += received
        return found

    def attention(self, inputs: ScoringInput, *, alone: bool = False, most_tokens: int | None = None) -> Tensor:
        """Return fp32: the question's attention to each earlier token.

        Its vectors are computed after the documents or, with `alone` or if some have no KV, after the system prompt and
        then moved. The latter needs no documents, so a warm-up may have computed it (`ScoringInput.asked`).
        """
        held = inputs.held(self._device)
        if inputs.asked is not None:
            question = inputs.asked.moved(inputs.question[0], self._rotation)
        elif bool(held.all()) and not alone:
            question = self.read(inputs, inputs.question[0], most_tokens)
        else:
            question = self.read(inputs, min(inputs.prefix_tokens, inputs.exact_tokens), most_tokens)
            question = question.moved(inputs.question[0], self._rotation)
        table = torch.as_tensor(inputs.table, dtype=torch.int64, device=self._device)
        return question.attention(self._layers, table, held)

    def read(self, inputs: ScoringInput, start: int, most_tokens: int | None = None) -> Question:
        """Compute the question, or its last `most_tokens`, after the prompt's first `start` tokens, which have KV."""
        begin, end = inputs.question
        ids = inputs.token_ids[max(begin, end - (most_tokens or self.most_tokens)) : end]
        return read_question(self._forward, self._layers, Piece(ids, start, inputs.table, False), self._device)

    def _deviation(self, inputs: ScoringInput, most_tokens: int) -> Generator[int, None, Tensor]:
        """fp32 for each token up to the last reused document; 0 in the exact prefix."""
        parts = [torch.zeros(inputs.exact_tokens, device=self._device)]
        for begin in range(inputs.exact_tokens, inputs.spans[-1][1], most_tokens):
            piece = Piece(
                inputs.token_ids[begin : min(begin + most_tokens, inputs.spans[-1][1])], begin, inputs.table, False
            )
            yield len(piece.token_ids)
            parts.append(kv_deviation(self._forward, self._layers, piece, self._device, most_tokens))
        return torch.cat(parts)
