"""Prompt lengths learned from the engine's reports.

- Prefix: with `x` tokens of whole documents held, the engine reuses `cached = floor((prefix + x) / block) * block`
  tokens, so `cached - x <= prefix < cached - x + block`. The prefix is the middle of where more than half of the latest
  intervals meet. With estimated lengths only `x = 0` counts.
- Tokens per estimated token: the median of `(cached - prefix) / x`, or the least-squares slope of prompt tokens over
  estimated document tokens, whichever has the smaller standard error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from math import inf, sqrt
from weakref import WeakValueDictionary

_VOTES = 32
_MIN_VOTES = 2
_SURE_VOTES = 4
_SAMPLES = 256
_MIN_SAMPLES = 8
_MAX_ERROR = 0.1
_RATIOS = (0.2, 8.0)


class LearnedLengths:
    """Learned lengths of one engine's prompts.

    `ratio`: tokens per estimated token. `losses`: evictions by other clients; the last left `kept_blocks`.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self.losses = 0
        self.kept_blocks = 0
        self._scopes: WeakValueDictionary[Hashable, ScopeLengths] = WeakValueDictionary()
        self._hits: deque[float] = deque(maxlen=_SAMPLES)
        self._prompts: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)
        self._next_look = _MIN_SAMPLES
        self._seen = 0

    def of(self, scope: Hashable) -> ScopeLengths:
        return self._scopes.setdefault(scope, ScopeLengths(self))

    def learn_loss(self, kept_blocks: int) -> None:
        self.kept_blocks = kept_blocks
        self.losses += 1
        self._changed()

    def hit(self, estimated_tokens: float, tokens: float) -> None:
        self._hits.append(tokens / estimated_tokens)
        self._look()

    def prompt(self, estimated_tokens: int, prompt_tokens: float) -> None:
        self._prompts.append((estimated_tokens, prompt_tokens))
        self._look()

    def _look(self) -> None:
        self._seen += 1
        if self._seen < self._next_look:
            return
        self._next_look = min(self._seen + self._seen // 2, self._seen + 2 * _SAMPLES)
        # Copied because an orderer and its clone learn under different locks.
        error, ratio = min(_median(list(self._hits)), _slope(list(self._prompts)))
        # Differences within the error are ignored.
        if error <= _MAX_ERROR and abs(ratio - self.ratio) > 2 * error and _RATIOS[0] <= ratio <= _RATIOS[1]:
            self.ratio = ratio
            self._changed()

    def _changed(self) -> None:
        # `values` would iterate while a clone adds more.
        for known in self._scopes.valuerefs():
            if (scope := known()) is not None:
                scope.version += 1


class ScopeLengths:
    """Learned lengths of one scope's prompts.

    `prefix_tokens` is None while reports agree with the settings. `version` changes with any length.
    """

    def __init__(self, lengths: LearnedLengths) -> None:
        self.prefix_tokens: int | None = None
        self.estimated = False
        self.version = 0
        self.engine = lengths
        self._votes: deque[int] = deque(maxlen=_VOTES)

    @property
    def ratio(self) -> float:
        return self.engine.ratio if self.estimated else 1.0

    def scale(self, tokens: Sequence[int]) -> Sequence[int]:
        if not self.estimated:
            # The scope's trees change with the next request, including this one's nodes.
            self.estimated = True
            self.version += 1
            return tokens
        ratio = self.engine.ratio
        return tokens if ratio == 1 else [round(ratio * each) for each in tokens]

    def learn_hit(self, prefix_tokens: int, held_tokens: int, cached_tokens: float, block_size: int) -> None:
        if held_tokens and self.estimated:
            if sum(vote <= prefix_tokens < vote + block_size for vote in self._votes) >= _SURE_VOTES:
                found = cached_tokens + (block_size - 1) / 2 - prefix_tokens
                self.engine.hit(held_tokens / self.ratio, found)
            return
        vote = int(cached_tokens) - held_tokens
        self._votes.append(vote)
        if not vote <= prefix_tokens < vote + block_size:
            self._elect(prefix_tokens, block_size)

    def learn_prompt(self, documents_tokens: int, prompt_tokens: float) -> None:
        if self.estimated:
            self.engine.prompt(round(documents_tokens / self.ratio), prompt_tokens)

    def _elect(self, prefix_tokens: int, block_size: int) -> None:
        votes = sorted(self._votes)
        first = best_first = best_last = 0
        for last, vote in enumerate(votes):
            while votes[first] <= vote - block_size:
                first += 1
            if last - first > best_last - best_first:
                best_first, best_last = first, last
        agreeing = best_last - best_first + 1
        low, high = votes[best_last], votes[best_first] + block_size
        if agreeing >= _MIN_VOTES and 2 * agreeing > len(votes) and not low <= prefix_tokens < high:
            self.prefix_tokens = max(0, (low + high - 1) // 2)
            self.version += 1


def _median(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < _MIN_SAMPLES:
        return inf, 1.0
    middle = sorted(values)[len(values) // 2]
    # 1.48 median deviations make a standard deviation, and a median errs 1.25 times as much as a mean.
    deviation = sorted(abs(value - middle) for value in values)[len(values) // 2]
    return 1.25 * 1.48 * deviation / sqrt(len(values)), middle


def _slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    count = len(points)
    if count < _MIN_SAMPLES:
        return inf, 1.0
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    width = sum((x - mean_x) ** 2 for x, _ in points)
    if not width:
        return inf, 1.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / width
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return sqrt(rest / (count - 2) / width), slope
