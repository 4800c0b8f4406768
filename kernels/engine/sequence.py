"""Sequences: requests under way, and their validation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ragorder.kernels.cache import KVLease, Segment, TierTokens, segments_of
from ragorder.kernels.engine.detokenize import TextStream
from ragorder.kernels.engine.request import (
    Completion,
    FinishReason,
    Request,
    RequestRefusedError,
    TokenLogprobs,
    Update,
)

__all__ = ["RequestValidator", "Sequence"]


class Sequence:
    """`tokens` of prompt and answer, the first `computed` with KV in the blocks of `lease`. Prefill, recomputation and
    decoding are alike."""

    def __init__(
        self, request_id: int, request: Request, path: tuple[Segment, ...], tokenizer: Any | None, stops: frozenset[int]
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
        """Tokens to compute before the next can be chosen: 1 when decoding."""
        return len(self.tokens) - self.computed

    @property
    def most_tokens(self) -> int:
        # Tokens whose KV it needs in the end: all but the last.
        return self.prompt_tokens + self.request.sampling.max_tokens - 1

    @property
    def ttft_s(self) -> float | None:
        return None if self._first is None else self._first - self._added

    def begin(self) -> None:
        assert self.lease is not None
        self.computed = self.lease.cached_tokens
        self._table = np.empty(0, dtype=np.int32)
        if self.cached is None:
            self.cached = self.lease.tokens_by_tier

    def table(self, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Entries before `computed` never change."""
        assert self.lease is not None
        blocks = self.lease.block_table
        known = min(len(self._table), self.computed // block_size)
        self._table = np.concatenate((self._table[:known], np.asarray(blocks[known:], dtype=np.int32)))
        return self._table

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> Update:
        """Append the next token; the last update has a completion."""
        if self._first is None:
            self._first = perf_counter()
        self.tokens.append(token_id)
        new_logprobs: tuple[TokenLogprobs, ...] = ()
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
            new_logprobs = (logprobs,)
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
            return Update(self.request_id, (token_id,), text, None, new_logprobs)
        text += self._text.finish()
        return Update(self.request_id, (token_id,), text, self.completion(reason), new_logprobs)

    def end(self, reason: FinishReason, error: str | None = None) -> Update:
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


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """Limits: vocabulary, context, size of the pool."""

    vocabulary: int
    max_model_len: int
    device_tokens: int
    block_size: int
    chunk_tokens: int
    tokenizer: Any | None
    end_tokens: frozenset[int]

    def admit(self, request_id: int, request: Request) -> Sequence:
        """Raises RequestRefusedError if the request can never be served."""
        tokens = self._checked(request.token_ids)
        self._check_room(len(tokens), request.sampling.max_tokens)
        if request.sampling.stop_strings and self.tokenizer is None:
            raise RequestRefusedError("stop strings need a tokenizer, and the engine has none: give stop tokens")
        path = segments_of(tokens, request.document_ends, salt=request.salt, chunk_tokens=self.chunk_tokens)
        return Sequence(request_id, replace(request, token_ids=tokens), path, self.tokenizer, self.end_tokens)

    def _checked(self, token_ids: Iterable[object]) -> list[int]:
        try:
            tokens = [index(token) for token in token_ids]  # type: ignore[arg-type]
        except TypeError as error:
            raise RequestRefusedError("the prompt's tokens are not all integers") from error
        if not tokens:
            raise RequestRefusedError("the prompt is empty: give one token or more")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise RequestRefusedError(
                f"the prompt has tokens outside the model's vocabulary of {self.vocabulary}: is the tokenizer another "
                "model's?"
            )
        return tokens

    def _check_room(self, prompt_tokens: int, max_tokens: int) -> None:
        total = prompt_tokens + max_tokens
        asked = f"the prompt's {prompt_tokens} tokens and max_tokens {max_tokens} are {total}"
        if total > self.max_model_len:
            raise RequestRefusedError(f"{asked}, more than the model's context of {self.max_model_len}: give less")
        # The last token's KV is never needed.
        if total - 1 > self.device_tokens:
            raise RequestRefusedError(
                f"{asked}, and the pool holds {self.device_tokens} in all (blocks of {self.block_size}): give less, or "
                "the engine more device_tokens"
            )
