"""A request under way."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ragorder.kernels.cache import KVLease, Segment, TierTokens
from ragorder.kernels.engine.detokenize import TextStream
from ragorder.kernels.engine.request import Completion, FinishReason, Request, TokenLogprobs, Update

__all__ = ["Sequence"]


class Sequence:
    """Its tokens, how far their KV is computed, and what it has told.

    `tokens` are prompt and answer, of which the KV of the first `computed` is in the blocks of `lease`. A sequence that
    lost its blocks computes all of them again but those that it finds cached: prefill, recomputing and decoding are
    one thing.
    """

    def __init__(
        self, request_id: int, request: Request, path: Tokens[Segment], tokenizer: Any | None, stops: frozenset[int]
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.path = path
        self.tokens = list(request.token_ids)
        self.prompt_tokens = len(self.tokens)
        self.path_tokens = sum(segment.tokens for segment in path)
        self.computed = 0
        self.lease: KVLease | None = None
        self.prefetched = False
        self.cached: TierTokens | None = None
        self.random = Random(request.sampling.seed)
        self.logits: torch.Tensor | None = None
        self._text = TextStream(tokenizer, self.tokens, request.sampling.stop_strings)
        self._stops = request.sampling.stop_tokens | (frozenset() if request.sampling.ignore_eos else stops)
        self._logprobs: list[TokenLogprobs] | None = [] if request.sampling.logprobs is not None else None
        self._table = np.empty(0, dtype=np.int32)
        self._added = perf_counter()
        self._first: float | None = None

    @property
    def pending(self) -> int:
        """Tokens whose KV is to be computed before the next token can be chosen: 1 when decoding."""
        return len(self.tokens) - self.computed

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV it needs in the end: the last token's is never needed."""
        return self.prompt_tokens + self.request.sampling.max_tokens - 1

    @property
    def ttft_s(self) -> float | None:
        return None if self._first is None else self._first - self._added

    def begin(self) -> None:
        """The lease has all that it found cached."""
        assert self.lease is not None
        self.computed = self.lease.cached_tokens
        self._table = np.empty(0, dtype=np.int32)
        if self.cached is None:
            self.cached = self.lease.tokens_by_tier

    def table(self, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The blocks of the lease. Those in front of what is to be computed stay as they are from step to step."""
        assert self.lease is not None
        blocks = self.lease.block_table
        known = min(len(self._table), self.computed // block_size)
        self._table = np.concatenate((self._table[:known], np.asarray(blocks[known:], dtype=np.int32)))
        return self._table

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> Update:
        """The next token is chosen. The update has a completion if that was the last."""
        if self._first is None:
            self._first = perf_counter()
        self.tokens.append(token_id)
        told: tuple[TokenLogprobs, ...] = ()
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
            told = (logprobs,)
        reason: FinishReason | None = None
        text = ""
        if token_id in self._stops:
            reason = "stop"
        else:
            text = self._text.push(token_id)
            if self._text.stopped:
                reason = "stop"
            elif len(self.tokens) - self.prompt_tokens == self.request.sampling.max_tokens:
                reason = "length"
        if reason is None:
            return Update(self.request_id, (token_id,), text, None, told)
        text += self._text.finish()
        return Update(self.request_id, (token_id,), text, self.completion(reason), told)

    def end(self, reason: FinishReason, error: str | None = None) -> Update:
        """It ends without another token."""
        text = "" if reason == "error" else self._text.finish()
        return Update(self.request_id, (), text, self.completion(reason, error))

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        return Completion(
            self.request_id,
            tuple(self.tokens[self.prompt_tokens :]),
            self._text.text,
            reason,
            self.prompt_tokens,
            self.cached or TierTokens(),
            self.ttft_s,
            perf_counter() - self._added,
            error,
            self.logits,
            None if self._logprobs is None else tuple(self._logprobs),
        )
