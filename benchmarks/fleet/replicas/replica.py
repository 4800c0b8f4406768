"""A simulated engine with the orderer beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder import Document, Orderer, Ordering
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.pipelining.reordering import CachedLengths

__all__ = ["SimulatedReplica", "Started"]

_BLOCK_SIZE = 16
# Of an answer, those that stay in the cache: all but its last.
_KEPT_TOKENS = 32


class Started:
    """A request in flight. `exact`: its cached tokens are predicted to the block."""

    def __init__(self, ordering: Ordering[Document], handle: int, cached_tokens: int, prompt_tokens: int) -> None:
        self.ordering = ordering
        self.handle = handle
        self.cached_tokens = cached_tokens
        self.prompt_tokens = prompt_tokens
        self.exact = abs(cached_tokens - ordering.cached_tokens) < _BLOCK_SIZE


class SimulatedReplica:
    """One cache of a fleet.

        replica = SimulatedReplica(16_384, NumberedPrompts())
        replica.end(replica.start(request, 0))

    `prompts` are those of all replicas. It has `in_flight` requests.
    """

    def __init__(self, capacity_tokens: int, prompts: NumberedPrompts) -> None:
        self.in_flight = 0
        self._prompts = prompts
        self._engine = SimEngine(block_size=_BLOCK_SIZE, capacity_tokens=capacity_tokens, like="vllm-0.32")
        self._orderer = Orderer(
            capacity_tokens=capacity_tokens,
            block_size=_BLOCK_SIZE,
            prefix_tokens=prompts.prefix_tokens,
            suffix_tokens=prompts.question_tokens + _KEPT_TOKENS,
            strict=True,
        )

    def predict(self, documents: Sequence[Document]) -> CachedLengths:
        cached_tokens, documents_end = self._orderer.predict_cached_tokens(documents)
        return CachedLengths(cached_tokens, documents_end + self._prompts.question_tokens - cached_tokens)

    def start(self, request: TraceRequest, number: int) -> Started:
        ordering = self._orderer.order(request.documents)
        prompt = self._prompts.token_ids(number, request, ordering.documents)
        done, handle = self._engine.admit(prompt, _KEPT_TOKENS)
        self.in_flight += 1
        return Started(ordering, handle, done.cached_tokens, done.prompt_tokens)

    def end(self, started: Started) -> None:
        self._engine.finish(started.handle)
        self.in_flight -= 1
        started.ordering.confirm(started.cached_tokens, started.prompt_tokens + _KEPT_TOKENS + 1)
