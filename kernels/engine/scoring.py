"""Measurements for selections of critical tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.attention import PackedBatch, prefix_attention
from ragorder.kernels.attention.weights import Keys, Queries, attention_received
from ragorder.kernels.engine.sequence import Positions
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.fusion.selection import Measurements, Needs
from ragorder.kernels.models.attention import AttentionCall
from ragorder.kernels.models.batch import Forward, ForwardEnded, PackedStep, Piece, pack
from ragorder.kernels.paging import BlockPool, Gathered, KVPositions


def attended(forward: Forward, pool: BlockPool, piece: Piece) -> Tensor:
    """Return fp32 (keys,): attention from the piece's rows to its context, summed over rows, mean over heads and
    layers. Write the rows' KV."""
    step = pack([piece], pool)
    attention = _AllLayers(step, pool, piece)
    forward.until_ended(step.token_ids, step.positions, attention)
    return attention.total / pool.shape.layers


class _AllLayers:
    def __init__(self, step: PackedStep, pool: BlockPool, piece: Piece) -> None:
        self._step = step
        self._pool = pool
        self._gathered = piece.gather(pool, piece.context)
        self.total = torch.zeros(piece.context, device=pool.device)

    def attend(self, call: AttentionCall) -> Tensor:
        out = self._step.attention.attend(call)
        keys = _gathered_keys(self._gathered, call.layer, len(self.total))
        queries = Queries(call.query, self._step.positions, call.scale, call.window, call.softcap)
        self.total += attention_received(queries, keys)
        if call.layer == self._pool.shape.layers - 1:
            raise ForwardEnded
        return out


def kv_deviation(forward: Forward, pool: BlockPool, piece: Piece, most_tokens: int) -> Tensor:
    """Return fp32 (tokens,): |ΔK|² + |ΔV|² of the piece's tokens between full attention and the pool, in layer 1. Write
    KV of layer 0, except where shared: there reused KV is exact, because it depends on no other token."""
    if pool.shape.layers < 2:
        return torch.zeros(len(piece.token_ids), device=pool.device)
    parts = []
    for begin in range(0, len(piece.token_ids), most_tokens):
        chunk = replace(piece, token_ids=piece.token_ids[begin : begin + most_tokens], start=piece.start + begin)
        step = pack([chunk], pool)
        attention = _SecondLayer(step, chunk.gather(pool, chunk.start + len(chunk.token_ids)))
        forward.until_ended(step.token_ids, step.positions, attention)
        parts.append(attention.deviation)
    return torch.cat(parts)


class _SecondLayer:
    deviation: Tensor

    def __init__(self, step: PackedStep, gathered: Gathered) -> None:
        self._step = step
        self._gathered = gathered

    def attend(self, call: AttentionCall) -> Tensor:
        if not call.layer:
            return self._step.attention.attend(call)
        old_key, old_value = (cache.flatten(0, 1)[self._step.positions] for cache in self._gathered.layer(call.layer))
        self.deviation = _distance(call.key, old_key) + _distance(call.value, old_value)
        raise ForwardEnded


def _int64(table: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]], pool: BlockPool) -> Tensor:
    return torch.as_tensor(table, dtype=torch.int64, device=pool.device)


def _gathered_keys(
    gathered: Gathered, layer: int, tokens: int, own: Tensor | None = None, held: Tensor | None = None
) -> Keys:
    cache = gathered.layer(layer)[0]
    table = torch.as_tensor(gathered.tables[0], dtype=torch.int64, device=cache.device)
    return Keys(cache, table, tokens, own, held)


def _distance(new: Tensor, old: Tensor) -> Tensor:
    return (new.float() - old.float()).square().sum((1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A question's n tokens in the last layer, after `start` tokens: `queries`, and `keys` (n, HKV, D), rotated."""

    queries: Queries
    keys: Tensor
    start: int

    def moved(self, start: int, rotation: Rotation) -> Question:
        old, last = self.queries.positions, len(rotation.ropes) - 1
        turn = rotation.turn(start - self.start, old)
        queries = replace(self.queries, rows=turn.apply(self.queries.rows, last), positions=old + (start - self.start))
        return Question(queries, turn.apply(self.keys, last), start)

    def attention(
        self, pool: BlockPool, table: Tensor, held: Tensor | None = None, places: KVPositions | None = None
    ) -> Tensor:
        """Return fp32 (start,): attention to earlier tokens, with keys in the blocks `table` (int64), or at `places`.
        Softmax over `held` tokens (bool (start,)) and the question, summed over its tokens, mean over heads."""
        if places is None:
            keys = Keys(pool.views.key_caches[-1], table, self.start, self.keys, held)
        else:
            gathered = Gathered(pool, [places], [self.start])
            keys = _gathered_keys(gathered, pool.shape.layers - 1, self.start, self.keys, held)
        with pool.supplied(pool.shape.layers - 1):
            return attention_received(self.queries, keys)[: self.start]


def read_question(forward: Forward, pool: BlockPool, piece: Piece) -> Question:
    """Compute a question after the `start` tokens with KV. Writes nothing."""
    count, device = len(piece.token_ids), pool.device
    gathered = None if piece.places is None else piece.gather(pool, piece.start)
    table = np.asarray(piece.table) if gathered is None else gathered.tables[0]
    batch = PackedBatch.pack([count], [piece.start], [table.tolist()], device)
    attention = _LastLayer(pool, batch, gathered)
    positions = torch.arange(piece.start, piece.start + count, device=device)
    forward.until_ended(torch.tensor(piece.token_ids, device=device), positions, attention)
    call = attention.call
    return Question(Queries(call.query, positions, call.scale, call.window, call.softcap), call.key, piece.start)


class _LastLayer:
    call: AttentionCall

    def __init__(self, pool: BlockPool, batch: PackedBatch, gathered: Gathered | None) -> None:
        self._pool = pool
        self._batch = batch
        self._gathered = gathered

    def attend(self, call: AttentionCall) -> Tensor:
        layer, query, key, value, scale, window, softcap = call
        views = self._pool.views
        if layer == len(views.key_caches) - 1:
            self.call = call
            raise ForwardEnded
        if self._gathered is None:
            caches = views.key_caches[layer], views.value_caches[layer]
        else:
            caches = self._gathered.layer(layer)
        with self._pool.supplied(layer):
            return prefix_attention(
                query, key, value, *caches, self._batch, scale=scale, window=window, softcap=softcap
            )


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A prompt before its first step. `exact_tokens` are its exact prefix, `spans` its reused documents; rows of others
    hold anything. Documents not in the blocks are at `places`. `asked`: the question from a warm-up."""

    token_ids: Sequence[int]
    table: np.ndarray[tuple[int], np.dtype[np.int32]]
    prefix_tokens: int
    exact_tokens: int
    spans: tuple[Span, ...]
    question: Span
    asked: Question | None = None
    places: KVPositions | None = None

    def held(self, device: torch.device | str) -> Tensor:
        held = torch.zeros(self.question[0], dtype=torch.bool)
        for start, end in ((0, self.exact_tokens), *self.spans):
            held[start:end] = True
        return held.to(device)


class Scorer:
    """Measures for selections in forwards of `most_tokens`; of a longer question the last tokens count."""

    def __init__(self, forward: Forward, pool: BlockPool, rotation: Rotation, most_tokens: int = 2048) -> None:
        self._forward = forward
        self._pool = pool
        self._rotation = rotation
        self._device = pool.device
        self.most_tokens = most_tokens

    def measure(self, needs: Needs, inputs: ScoringInput) -> Measurements:
        steps = self.measuring(needs, inputs, self.most_tokens)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                measurements: Measurements = ended.value
                return measurements

    def measuring(self, needs: Needs, inputs: ScoringInput, most_tokens: int) -> Generator[int, None, Measurements]:
        """Run `measure` in steps; yield the next forward's tokens, at most `most_tokens`."""
        reused = torch.cat([torch.arange(start, end) for start, end in inputs.spans or [(0, 0)]]).to(self._device)
        measurements = Measurements(reused, inputs.spans)
        if not len(reused) or needs == "nothing":
            return measurements
        if needs == "question":
            begin, end = inputs.question
            most_tokens = min(most_tokens, end - begin)
            # A question that is already computed waits for the keys of this step.
            yield most_tokens if inputs.asked is None else 1
            return replace(measurements, scores=self.attention(inputs, most_tokens=most_tokens)[reused])
        deviation = yield from self._deviation(inputs, most_tokens)
        return replace(measurements, scores=deviation[reused])

    def attending(self, inputs: ScoringInput, chosen: Positions, most_tokens: int) -> Generator[int, None, Tensor]:
        """Recompute `chosen` tokens, in steps. Return their attention, as `attended`."""
        found = torch.zeros(inputs.question[0], device=self._device)
        for begin in range(0, len(chosen), most_tokens):
            rows = chosen[begin : begin + most_tokens]
            yield len(rows)
            ids = [inputs.token_ids[row] for row in rows]
            piece = Piece(ids, int(rows[0]), inputs.table, False, rows, inputs.places)
            received = attended(self._forward, self._pool, piece)
            found[: len(received)] += received
        return found

    def attention(self, inputs: ScoringInput, *, alone: bool = False, most_tokens: int | None = None) -> Tensor:
        """Return the question's attention to earlier tokens, fp32. Its vectors are computed after the documents or,
        with `alone` or without all KV, after the system prompt and moved."""
        held = inputs.held(self._device)
        if inputs.asked is not None:
            question = inputs.asked.moved(inputs.question[0], self._rotation)
        elif bool(held.all()) and not alone:
            question = self.read(inputs, inputs.question[0], most_tokens)
        else:
            question = self.read(inputs, min(inputs.prefix_tokens, inputs.exact_tokens), most_tokens)
            question = question.moved(inputs.question[0], self._rotation)
        return question.attention(self._pool, _int64(inputs.table, self._pool), held, inputs.places)

    def read(self, inputs: ScoringInput, start: int, most_tokens: int | None = None) -> Question:
        """Compute the question, or its last `most_tokens`, after the first `start` tokens, which have KV."""
        begin, end = inputs.question
        ids = inputs.token_ids[max(begin, end - (most_tokens or self.most_tokens)) : end]
        # The exact prefix is in the blocks.
        places = inputs.places if start > inputs.exact_tokens else None
        return read_question(self._forward, self._pool, Piece(ids, start, inputs.table, False, places=places))

    def _deviation(self, inputs: ScoringInput, most_tokens: int) -> Generator[int, None, Tensor]:
        parts = [torch.zeros(inputs.exact_tokens, device=self._device)]
        for begin in range(inputs.exact_tokens, inputs.spans[-1][1], most_tokens):
            ids = inputs.token_ids[begin : min(begin + most_tokens, inputs.spans[-1][1])]
            piece = Piece(ids, begin, inputs.table, False, places=inputs.places)
            yield len(piece.token_ids)
            parts.append(kv_deviation(self._forward, self._pool, piece, most_tokens))
        return torch.cat(parts)
