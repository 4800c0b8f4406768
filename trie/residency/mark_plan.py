"""Marks of one request, and what it reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["CacheReport", "MarkPlan", "RequestTokens"]


class CacheReport(NamedTuple):
    """What a provider reports of a request; None: not reported."""

    cached_tokens: float | None = None
    written_tokens: float | None = None
    prompt_tokens: float | None = None


class RequestTokens(NamedTuple):
    """Of `prompt` tokens, those read from the cache and those written into it."""

    prompt: float
    cached: float
    written: float


class MarkPlan:
    """The marks of a request in flight.

    `breakpoints`: nodes of its path in front of each mark to set; of a plain request, documents. It could resume at
    `live` nodes, and does so at the last that a mark finds, its own or one less than `lookback_parts` behind it;
    `depths`: all entries that it makes or renews, and `states` the places in tokens at which it keeps those of a hybrid
    model. Predicted are `cached_tokens`, `written_tokens` behind them, and `prompt_tokens`, of which the answer's
    expected tokens are none.
    """

    __slots__ = (
        "_ends",
        "_live",
        "_lookback_parts",
        "breakpoints",
        "cached_tokens",
        "depths",
        "prompt_tokens",
        "readable",
        "report",
        "resumed",
        "started_s",
        "states",
        "written_tokens",
    )

    def __init__(
        self,
        breakpoints: Sequence[int],
        live: Sequence[int],
        ends: Sequence[int],
        lookback_parts: int,
        prompt_tokens: int,
        started_s: float,
    ) -> None:
        self._live = live
        self._ends = ends
        self._lookback_parts = lookback_parts
        self.prompt_tokens = prompt_tokens
        self.started_s = started_s
        self.readable = False
        self.report = CacheReport()
        self.states: tuple[int, ...] = ()
        self.set(breakpoints)

    @classmethod
    def of_intervals(
        cls, cached_tokens: int, resumed: int, depths: Sequence[int], prompt_tokens: int, started_s: float
    ) -> MarkPlan:
        """Of a cache that needs no marks: a request resumes in a node, and leaves entries at all."""
        plan = cls((), (), (), 1, prompt_tokens, started_s)
        plan.cached_tokens, plan.resumed, plan.depths = cached_tokens, resumed, depths
        return plan

    def set(self, breakpoints: Sequence[int]) -> None:
        """These marks and no others."""
        self.breakpoints = tuple(breakpoints)
        within = self._lookback_parts
        found = (place for place in self._live if any(place <= mark < place + within for mark in self.breakpoints))
        self.resumed = max(found, default=-1)
        self.cached_tokens = self._ends[self.resumed] if self.resumed >= 0 else 0
        self.depths: Sequence[int] = sorted({*self.breakpoints, self.resumed} - {-1})
        self.written_tokens = 0
        if self.breakpoints:
            self.written_tokens = max(0, self._ends[self.breakpoints[-1]] - self.cached_tokens)

    def keep(self, breakpoints: Collection[int]) -> None:
        """Of the marks these alone."""
        self.set([mark for mark in self.breakpoints if mark in breakpoints])

    @property
    def tokens(self) -> RequestTokens:
        """As reported, else as predicted."""
        cached, written, prompt = self.report
        prompt = float(self.prompt_tokens) if prompt is None else prompt
        if cached is None:
            cached = min(float(self.cached_tokens), prompt)
        # A prompt that is shorter than what was found of it was counted without that.
        prompt = max(prompt, cached)
        if written is None:
            # It writes up to the same mark, wherever it resumed.
            written = float(self.cached_tokens + self.written_tokens) - cached if self.breakpoints else 0.0
        return RequestTokens(prompt, cached, max(0.0, min(written, prompt - cached)))

    @property
    def predicted(self) -> RequestTokens:
        return RequestTokens(self.prompt_tokens, self.cached_tokens, self.written_tokens)
