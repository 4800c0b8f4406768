"""What speculations may waste, and cost others."""

from __future__ import annotations

import math
from collections.abc import Hashable

from ragorder.common.lru_cache import LRUCache
from ragorder.common.running_mean import RunningMean

EXTRA_TOKENS = 0.25


class Allowance:
    """Units that speculations may waste: a `share` of those due so far; `held` ones may still be used."""

    def __init__(self, share: float | None) -> None:
        self._share = share
        self.due = self.wasted = self.held = 0

    def has_room(self, units: float) -> bool:
        return self._share is None or self.wasted + self.held + units <= self._share * self.due

    @property
    def used(self) -> float:
        """The used share of what may be wasted."""
        if not self._share:
            return 0.0
        return (self.wasted + self.held) / max(1.0, self._share * self.due)


class Spending:
    """Engine tokens, engine requests and searches: of each, speculations may waste a `share`."""

    def __init__(self, share: float | None) -> None:
        if share is not None and not share >= 0:
            raise ValueError(f"extra_tokens must be at least 0, a share, or None for any number, got {share}")
        self.tokens = Allowance(share)
        self.requests = Allowance(share)
        self.searches = Allowance(share)

    def generated(self, tokens: int) -> None:
        self.requests.due += 1
        self.tokens.due += tokens

    def hold_generation(self, tokens: int) -> bool:
        """`tokens`: expected; 0 (unknown) counts as any number."""
        if not (self.requests.has_room(1) and self.tokens.has_room(tokens or math.inf)):
            return False
        self.requests.held += 1
        self.tokens.held += tokens
        return True

    @property
    def least_right(self) -> float:
        """How often a generation must be right."""
        return max(self.requests.used, self.tokens.used)

    def free_generation(self, held: int) -> None:
        self.requests.held -= 1
        self.tokens.held -= held

    def waste_generation(self, tokens: int) -> None:
        self.requests.wasted += 1
        self.tokens.wasted += tokens


# Weights of the values before, and the variance (in sequences) below which a slope is not believed.
_KEEP, _LEAST_VARIANCE = 0.98, 0.25


class DecodingCost:
    """Seconds that a further sequence on the engine adds to each token of the others, learnt from answers."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._running = self._token_s = self._squares = self._products = 0.0

    def add(self, running: float, token_s: float) -> None:
        """`running`: mean sequences on the engine during an answer of `token_s` a token."""
        self._weight = _KEEP * self._weight + 1
        step = 1 / self._weight
        from_running, from_token_s = running - self._running, token_s - self._token_s
        self._running += step * from_running
        self._token_s += step * from_token_s
        self._squares = (1 - step) * (self._squares + step * from_running**2)
        self._products = (1 - step) * (self._products + step * from_running * from_token_s)

    @property
    def token_s(self) -> float | None:
        return self._token_s if self._weight else None

    @property
    def added_s(self) -> float:
        if not self._weight:
            return 0.0
        most_s = self._token_s / max(1.0, self._running)
        return min(max(0.0, self._products / (self._squares + _LEAST_VARIANCE)), most_s)


_MAX_NODES = 1024


class NodeTokens:
    """Mean tokens of nodes' prompts and answers."""

    def __init__(self) -> None:
        self._nodes: LRUCache[tuple[RunningMean, RunningMean]] = LRUCache(_MAX_NODES)

    def add(self, node: Hashable, prompt_tokens: int, answer_tokens: int) -> None:
        means = self._nodes.get(node)
        if means is None:
            means = RunningMean(arithmetic_start=True), RunningMean(arithmetic_start=True)
            self._nodes.put(node, means)
        for mean, tokens in zip(means, (prompt_tokens, answer_tokens), strict=True):
            mean.add(tokens)

    def of(self, node: Hashable) -> tuple[float, float]:
        """Return 0 and 0 before the node's first answer."""
        prompt, answer = self._nodes.get(node) or (RunningMean(), RunningMean())
        return prompt.value or 0.0, answer.value or 0.0
