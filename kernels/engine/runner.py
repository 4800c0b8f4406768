"""Computation of steps, sampling, and recovery from failures (RAGCache section 6)."""

from __future__ import annotations

import logging
import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ragorder.kernels.engine.request import DeviceLostError, Fault, Sampling, TokenLogprobs, describe, fault_of
from ragorder.kernels.engine.scheduler import ScheduledChunk, Scheduler
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine.stats import EngineCounters
from ragorder.kernels.models.batch import Forward, Piece, pack
from ragorder.kernels.models.graphs import GraphCapture, StepGraphs
from ragorder.kernels.paging import BlockPool


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int | None
    logprobs: TokenLogprobs | None = None


def choose(logits: torch.Tensor, samplings: abc.Sequence[Sampling], numbers: abc.Sequence[float]) -> list[SampledToken]:
    """logits (N, vocabulary), numbers in [0, 1); a sample depends only on its row and number."""
    logits = logits.float()
    largest, best = logits.max(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        best = best.clone()
        best[drawn] = _draw(logits[drawn], [samplings[row] for row in drawn], [numbers[row] for row in drawn])
    # One synchronisation with the device per step.
    tokens, finite = torch.stack((best, largest.isfinite().long())).tolist()
    wanted = {row: sampling.logprobs for row, sampling in enumerate(samplings) if sampling.logprobs is not None}
    logprobs = _logprobs(logits[list(wanted)], [tokens[row] for row in wanted], list(wanted.values()))
    by_row = dict(zip(wanted, logprobs, strict=True))
    rows = enumerate(zip(tokens, finite, strict=True))
    return [SampledToken(token if sound else None, by_row.get(row)) for row, (token, sound) in rows]


def _draw(logits: torch.Tensor, samplings: abc.Sequence[Sampling], numbers: abc.Sequence[float]) -> torch.Tensor:
    # Inverse transform sampling in fp64; int64 (rows,).
    device = logits.device
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64, device=device)
    # With the maximum at 0 no temperature is too small.
    logits = logits.double()
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]).softmax(-1)
    nuclei = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if nuclei:
        top_p = torch.tensor([samplings[row].top_p for row in nuclei], dtype=torch.float64, device=device)
        probabilities[nuclei] = _nucleus(probabilities[nuclei], top_p)
    sums = probabilities.cumsum(-1)
    points = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    # Keep the likeliest tokens that add up to top_p, including ties.
    ranked = probabilities.sort(dim=-1, descending=True).values
    inside = ranked.cumsum(-1) - ranked < top_p[:, None]
    least = ranked.masked_fill(~inside, math.inf).amin(-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def _logprobs(logits: torch.Tensor, tokens: abc.Sequence[int], counts: abc.Sequence[int]) -> list[TokenLogprobs]:
    if not tokens:
        return []
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    rows = zip(tokens, chosen, counts, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, count, ids, values in rows
    ]


class ModelRunner:
    def __init__(self, forward: Forward, pool: BlockPool) -> None:
        self.forward = forward
        self._pool = pool
        self._graphs = StepGraphs(forward, pool, GraphCapture.of(forward, pool))

    def compute(self, chunks: list[ScheduledChunk]) -> tuple[torch.Tensor, list[SampledToken]]:
        """Return the next tokens, with logits, of chunks that are the `last`."""
        packed = [chunk for chunk in chunks if not chunk.selects]
        found = self._compute(packed) if packed else (torch.empty(0), [])
        # After the other chunks, which may compute documents of the prompt.
        for chunk in chunks:
            if chunk.selects and chunk.sequence.selecting is not None:
                chunk.sequence.selecting.compute()
        return found

    def _compute(self, chunks: list[ScheduledChunk]) -> tuple[torch.Tensor, list[SampledToken]]:
        pieces = [self._piece(chunk) for chunk in chunks]
        logits = self._graphs.compute(pieces)
        if logits is None:
            logits = self.forward(*pack(pieces, self._pool))
        chosen = [chunk.sequence for chunk in chunks if chunk.last]
        if not chosen:
            return logits, []
        samplings = [sequence.request.sampling for sequence in chosen]
        with torch.inference_mode():
            return logits, choose(logits, samplings, [sequence.draw for sequence in chosen])

    def recover(self) -> None:
        self._graphs.clear()
        if self._pool.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize(self._pool.device)

    def _piece(self, chunk: ScheduledChunk) -> Piece:
        sequence, size = chunk.sequence, self._pool.shape.block_size
        table = sequence.table(size)
        positions = sequence.positions(chunk.tokens)
        start, end = int(positions[0]), int(positions[-1]) + 1
        places = sequence.places(int(positions.max()) + 1, size)
        if np.array_equal(positions, np.arange(start, end)):
            return Piece(sequence.tokens[start:end], start, table, chunk.last, places=places)
        token_ids = [sequence.tokens[place] for place in positions]
        return Piece(token_ids, start, table, chunk.last, positions, places)


_logger = logging.getLogger("ragorder.kernels.engine")

Ended = list[tuple[Sequence, str, Fault]]
"""Requests removed from the scheduler, with reason and fault."""


class FailedSteps:
    """`lost`: why the device cannot be used any more, or None."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        counters: EngineCounters,
        max_retries: int,
        forget_device: Callable[[], None],
    ) -> None:
        self.lost: str | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._counters = counters
        self._max_retries = max_retries
        self._forget_device = forget_device

    def check_device(self) -> None:
        if self.lost is not None:
            raise DeviceLostError(self.lost)

    def recover(self, sequences: list[Sequence], error: Exception, what: str, shrink: Callable[[], bool]) -> Ended:
        """Requeue failed work, after a memory shortage in smaller steps if it can `shrink`. Return requests without
        retries left. Raises DeviceLostError."""
        fault, why = fault_of(error), describe(error, what)
        if fault == "other":
            return self.fail(sequences, error, what)
        self._count(len(sequences), why)
        try:
            if fault == "memory" and shrink():
                sequences = []
            elif fault == "disk":
                # KV of earlier steps is intact.
                self._scheduler.requeue()
            else:
                self._forget_device()
            self._runner.recover()
        except Exception as failure:
            self.lost = f"{why}, and the device cannot be used again ({type(failure).__name__}): start another process"
            _logger.error("the device is lost: %s", self.lost)
            raise DeviceLostError(self.lost) from error
        return [(each, ended, fault) for each in sequences if (ended := self._retry(each, why)) is not None]

    def fail(self, sequences: list[Sequence], error: BaseException, what: str) -> Ended:
        why = describe(error, what)
        self._count(len(sequences), why)
        self._scheduler.fail(sequences)
        return [(sequence, why, "other") for sequence in sequences]

    def _retry(self, sequence: Sequence, why: str) -> str | None:
        sequence.failures += 1
        if sequence.failures <= self._max_retries:
            sequence.suspect = sequence.failures > 1
            self._counters.retries += 1
            return None
        self._scheduler.finish(sequence)
        retries = f", and so did its retries ({self._max_retries} of them: max_retries)"
        return why + retries * (self._max_retries > 0)

    def _count(self, requests: int, why: str) -> None:
        _logger.error("a step of %d requests failed: %s", requests, why)
        self._counters.failed_steps += 1
