"""Costs of hardware that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """A step takes step_s + prefill_token_s x prompt tokens, and sequence_s and context_token_s x context for each that
    decodes. `token_budget`: prompt tokens of a step; `max_requests` run at a time, in a cache of `capacity_tokens`."""

    step_s: float
    prefill_token_s: float
    context_token_s: float
    capacity_tokens: int | None = None
    token_budget: int = 8192
    max_requests: int = 256
    sequence_s: float = 0.0

    def seconds(self, prompt_tokens: int, context_tokens: int, sequences: int = 0) -> float:
        decoding_s = self.context_token_s * context_tokens + self.sequence_s * sequences
        return self.step_s + self.prefill_token_s * prompt_tokens + decoding_s


@dataclass(frozen=True, slots=True)
class ScanCosts:
    """Seconds of scanning clusters: `code_s` a vector on one core, `call_s` a call, `piece_s` a piece beside its scan,
    and `hand_s` to hand a share of it to another thread."""

    code_s: float
    call_s: float = 0.0
    piece_s: float = 2e-4
    hand_s: float = 0.0

    def scan_seconds(self, codes: float) -> float:
        """Of one call on one core."""
        return self.call_s + self.code_s * codes

    def overhead_seconds(self, shares: int) -> float:
        """Return the time of a piece that is dealt out to `cores`."""
        return self.piece_s + self.hand_s * (shares - 1)

    def piece_seconds(self, shares: Sequence[float]) -> float:
        """Return the time of a piece, each core scanning a share of the codes."""
        return self.overhead_seconds(len(shares)) + self.scan_seconds(max(shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCosts(ScanCosts):
    """A search of an index of `vectors` in `clusters`, on `busy_cores` at a time: all of them, or as many as memory has
    bandwidth for. An index of real vectors stands for the large one: each of its vectors counts for many."""

    vectors: int
    clusters: int
    busy_cores: int

    def vectors_of(self, index: Any) -> float:
        """Vectors that one of the real index stands for."""
        return self.vectors / int(index.ntotal)

    def dealt(self, codes: float) -> list[float]:
        """Codes in equal shares on all cores, a cluster each at least."""
        share = max(self.vectors / self.clusters, codes / self.busy_cores)
        return [share] * max(1, min(self.busy_cores, round(codes / share)))

    def batch_seconds(self, searches: Sequence[float], *, dealt: bool = False) -> float:
        """Of whole searches of this many codes, each on the next free core, or all cores together at each (`dealt`)."""
        shared = sum(searches) / self.busy_cores
        return self.scan_seconds(shared if dealt else max(max(searches), shared))
