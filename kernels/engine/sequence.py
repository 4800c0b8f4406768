"""Running state of requests."""

from __future__ import annotations

import math
from collections import abc
from random import Random
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from ragorder.kernels.cache import KVLease, Segment, TierTokens
from ragorder.kernels.engine.detokenize import TextStream
from ragorder.kernels.engine.request import Completion, Fault, FinishReason, Request, TokenLogprobs, Update
from ragorder.kernels.fusion.assemble import Layout, Rows
from ragorder.kernels.fusion.selection import Fusion
from ragorder.kernels.paging import KVPositions
from ragorder.trie.policies import Key

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
Spans = abc.Sequence[tuple[int, int]]
"""Begins and ends, ascending."""


class ScatteredPrefill:
    """Prefill of `tokens` tokens; the first `computed` have exact KV, `reused` spans shared KV. Documents before the
    first reused span are computed first (with `documents_first`, all without KV), then chosen tokens and the rest."""

    def __init__(
        self, tokens: int, computed: int, reused: Spans, path_tokens: int, *, documents_first: bool = False
    ) -> None:
        missing = np.ones(tokens, dtype=np.bool_)
        missing[:computed] = False
        for begin, end in reused:
            missing[begin:end] = False
        self.exact_tokens = reused[0][0]
        """Tokens before the first approximate one."""
        self._tokens = tokens
        places = np.flatnonzero(missing)
        first = places < (path_tokens if documents_first else self.exact_tokens)
        self._todo, self._rest = places[first], places[~first]

    def __len__(self) -> int:
        return len(self._todo)

    def choose(self, chosen: Positions) -> None:
        later = np.union1d(chosen, self._rest)
        if np.array_equal(later, np.arange(self.exact_tokens, self._tokens)):
            # Full attention.
            self.exact_tokens = self._tokens
        self._todo = np.concatenate((self._todo, later))

    def choose_all(self) -> None:
        first = self._todo[self._todo < self.exact_tokens]
        begin = int(first[0]) if len(first) else self.exact_tokens
        self._todo = np.arange(begin, self._tokens)
        self.exact_tokens = self._tokens

    def positions(self, tokens: int) -> Positions:
        return self._todo[:tokens]

    def exact_after(self, tokens: int) -> int:
        return min(self.exact_tokens, int(self._todo[:tokens].max()) + 1)

    def advance(self, tokens: int) -> None:
        self._todo = self._todo[tokens:]


class Selecting(Protocol):
    pending: int
    chosen: Positions
    in_full: bool

    def compute(self) -> None: ...


class Sequence:
    """`tokens` of prompt and answer; the first `computed` have KV in the blocks of `lease`. A fused sequence also uses
    other KV of later documents, by `layout`; `helpers` first compute documents alone."""

    def __init__(
        self,
        request_id: int,
        request: Request,
        path: tuple[Segment, ...],
        tokenizer: Any | None,
        stops: frozenset[int],
        deadline_s: float = math.inf,
        fusion: Fusion | None = None,
        owner: Sequence | None = None,
    ) -> None:
        self.request_id = request_id
        self.fusion = fusion
        # A helper's owner waits for it; a helper has no answer.
        self.owner = owner
        self.helpers: list[Sequence] = []
        # Contents of the documents that helpers compute; None until decided.
        self.standalone: frozenset[bytes] | None = None
        self.request = request
        self.path = path
        self.tokens = list(request.token_ids)
        self.prompt_tokens = len(self.tokens)
        self.path_tokens = sum(segment.tokens for segment in path)
        self.computed = 0
        self.lease: KVLease | None = None
        self.turn = 0
        # Failed steps; after the second it is suspect until a step with it succeeds.
        self.failures = 0
        self.suspect = False
        # Keys of nodes computed by it and its helpers, and of nodes found.
        self.nodes: list[bytes] = []
        self.found: list[bytes] = []
        self.prefetched = False
        # Nodes that the cache keeps while it waits.
        self.expected: tuple[Key, ...] = ()
        self.cached: TierTokens | None = None
        # Reused tokens of its prompt, and the recomputed ones of them.
        self.fused: TierTokens | None = None
        self.recomputed = 0
        # Set while it uses KV of borrowed documents.
        self.layout: Layout | None = None
        # Set while it is computed around reused KV, and while tokens are selected.
        self.scattered: ScatteredPrefill | None = None
        self.selecting: Selecting | None = None
        self._found: Spans = ()
        self._by_tier = TierTokens()
        self._random = Random(request.sampling.seed)
        # The next token's random number, the same for each retry of its step.
        self.draw = self._random.random()
        self.logits: torch.Tensor | None = None
        self._text = TextStream(tokenizer, self.tokens, request.sampling.stop_strings)
        self._stops = request.sampling.stop_tokens | (frozenset() if request.sampling.ignore_eos else stops)
        self._logprobs: list[TokenLogprobs] | None = [] if request.sampling.logprobs is not None else None
        self._table = np.empty(0, dtype=np.int32)
        self._added = perf_counter()
        self._deadline_s = deadline_s
        self._first: float | None = None
        self._latest: float | None = None
        self.gap_s: float | None = None

    @property
    def pending(self) -> int:
        """Tokens to compute before the next token is chosen or more are selected; 1 when decoding."""
        return len(self.tokens) - self.computed if self.scattered is None else len(self.scattered)

    @property
    def overdue(self) -> bool:
        return perf_counter() - self._added > self._deadline_s

    @property
    def overdue_message(self) -> str:
        tokens = len(self.tokens) - self.prompt_tokens
        return f"its deadline of {self._deadline_s:g} s has passed after {tokens} tokens: allow more, or fewer tokens"

    @property
    def ttft_s(self) -> float | None:
        return None if self._first is None else self._first - self._added

    @property
    def tbt_s(self) -> float | None:
        gaps = len(self.tokens) - self.prompt_tokens - 1
        if gaps < 1 or self._first is None or self._latest is None:
            return None
        return (self._latest - self._first) / gaps

    def begin(self) -> None:
        assert self.lease is not None
        self.computed = self.lease.cached_tokens
        self.scattered = self.selecting = self.layout = None
        self.forget_table()
        self.found = [copy.node.key for copy in (*self.lease.pinned, *(each.copy for each in self.lease.borrowed))]
        if self.cached is None:
            self.cached = self.lease.tokens_by_tier

    def reuse(self, layout: Layout, spans: Spans, found: Spans, by_tier: TierTokens) -> None:
        """Positions within `spans` have KV now; those within `found` from other requests, `by_tier`."""
        assert self.fusion is not None
        # Further rounds of selection use the attention to all documents.
        first = self.fusion.rounds > 1
        size = len(self.tokens)
        self.layout = layout
        self.scattered = ScatteredPrefill(size, self.computed, spans, self.path_tokens, documents_first=first)
        self._found, self._by_tier = found, by_tier

    def choose(self, chosen: Positions, *, in_full: bool = False) -> None:
        assert self.scattered is not None
        if in_full:
            self.scattered.choose_all()
        else:
            self.scattered.choose(chosen)
        if self.scattered.exact_tokens == len(self.tokens):
            self.layout = None
        self.take(chosen)
        if self.fused is None:
            self.fused = self._by_tier
            self.recomputed = sum(int(np.sum((chosen >= begin) & (chosen < end))) for begin, end in self._found)
        if in_full:
            self.recomputed = self.fused.total

    def take(self, chosen: Positions) -> None:
        """Have these reused tokens recomputed in own blocks."""
        if self.layout is not None:
            self.layout.take(chosen)

    @property
    def room(self) -> int:
        """Tokens that need own blocks."""
        return len(self.tokens) if self.layout is None else self.layout.room(len(self.tokens))

    def places(self, tokens: int, block_size: int) -> KVPositions | None:
        """Return where the first tokens' KV is, or None if in the block table."""
        if self.layout is None or self.lease is None:
            return None
        shared = [Rows(each.blocks, each.copy.node.start, each.tokens, each.start) for each in self.lease.borrowed]
        return self.layout.places(tokens, self.lease.block_table, shared, block_size)

    def positions(self, tokens: int) -> Positions:
        if self.scattered is not None:
            return self.scattered.positions(tokens)
        return np.arange(self.computed, self.computed + tokens)

    def exact_after(self, tokens: int) -> int:
        return self.computed + tokens if self.scattered is None else self.scattered.exact_after(tokens)

    def advance(self, tokens: int) -> None:
        if self.scattered is None:
            self.computed += tokens
            return
        self.scattered.advance(tokens)
        if not self.pending and self.selecting is None:
            self.scattered, self.computed = None, len(self.tokens)

    def forget_cached(self) -> None:
        if self._first is None:
            self.cached = self.fused = None
            self.recomputed = 0

    def table(self, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the block table. Entries before `computed` only change after `forget_table`."""
        assert self.lease is not None
        blocks = self.lease.block_table
        known = min(len(self._table), self.computed // block_size)
        self._table = np.concatenate((self._table[:known], np.asarray(blocks[known:], dtype=np.int32)))
        return self._table

    def forget_table(self) -> None:
        self._table = np.empty(0, dtype=np.int32)

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> Update:
        self.draw = self._random.random()
        self.tokens.append(token_id)
        self._latest, before = perf_counter(), self._latest
        if before is None:
            self._first = self._latest
        else:
            self.gap_s = self._latest - before
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

    def end(self, reason: FinishReason, error: str | None = None, fault: Fault | None = None) -> Update:
        text = "" if reason == "error" else self._text.finish()
        return Update(self.request_id, (), text, self.completion(reason, error, fault))

    def completion(self, reason: FinishReason, error: str | None = None, fault: Fault | None = None) -> Completion:
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
            self.tbt_s,
            self.fused or TierTokens(),
            self.recomputed,
            fault,
        )
