"""Cache breakpoints and cost of one request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragorder.clouds.prices import Cost, Prices
from ragorder.clouds.residency import CacheReport, MarkPlan
from ragorder.clouds.rules import CacheRules, UsageFields
from ragorder.clouds.turns import TurnMarks
from ragorder.common.counts import reported_count
from ragorder.trie.histories import TurnEnd


@dataclass(frozen=True, slots=True)
class CloudModel:
    """A provider's model: the `rules` of its cache, and its `name` in `prices`."""

    rules: CacheRules
    name: str | None = None
    prices: Prices | None = None

    @property
    def price(self) -> float | None:
        return None if self.prices is None or self.name is None else self.prices.of(self.name)


@dataclass(slots=True, eq=False, repr=False)
class CloudRequest:
    """The cloud's part of an `Ordering`. `_publish` and `_keep_marks` change the cache's mirror, and never wait."""

    model: CloudModel
    _plan: MarkPlan
    _publish: Callable[[], None]
    _keep_marks: Callable[[Collection[int]], None]
    _turn: TurnEnd | None = None

    @property
    def breakpoints(self) -> Sequence[int]:
        if self._turn is None:
            return self._plan.breakpoints
        marks = self.turn_marks
        return (0, *marks.documents) if marks.system else marks.documents

    @property
    def turn_marks(self) -> TurnMarks:
        """All marks of a turn; `breakpoints` has only those at its documents."""
        if self._turn is None:
            marks = self._plan.breakpoints
            return TurnMarks(system=0 in marks, documents=tuple(mark for mark in marks if mark))
        turn = self._turn
        return TurnMarks.of(self._plan.breakpoints, turn.sizes, turn.documents - turn.history_nodes)

    @property
    def resumed(self) -> int:
        return self._plan.resumed

    def keep_marks(self, breakpoints: Collection[int]) -> None:
        if set(self._plan.breakpoints) - set(breakpoints):
            self._keep_marks(breakpoints)

    def readable(self) -> None:
        self._publish()

    def report(self, cached_tokens: float | None, written_tokens: float | None, prompt_tokens: float | None) -> None:
        self._plan.report = CacheReport(cached_tokens, written_tokens, prompt_tokens)

    @property
    def cost(self) -> Cost:
        prompt, cached, written = self._plan.tokens
        model = self.model
        return Cost(
            prompt,
            cached,
            written,
            model.rules.cost(prompt, cached, written),
            model.price,
            model.prices.currency if model.prices is not None else "",
            model.prices.date if model.prices is not None else "",
            self._plan.report.cached_tokens is not None,
        )


_KNOWN = (
    UsageFields("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens", additive=True),
    UsageFields("cacheReadInputTokens", "cacheWriteInputTokens", "inputTokens", additive=True),
    UsageFields("prompt_tokens_details.cached_tokens", "prompt_tokens_details.cache_write_tokens", "prompt_tokens"),
    UsageFields("input_tokens_details.cached_tokens", "input_tokens_details.cache_write_tokens", "input_tokens"),
    UsageFields("prompt_cache_hit_tokens", "", "prompt_tokens"),
)


class CloudUsage(NamedTuple):
    """Tokens of a prompt: read, written, and all. A missing count is None."""

    cached_tokens: int | None = None
    written_tokens: int | None = None
    prompt_tokens: int | None = None


def read_cloud_usage(usage: Any, rules: CacheRules | None = None) -> CloudUsage:
    """Return the counts in an answer's `usage`, by the names of `rules` or the known APIs."""
    known = (rules.usage,) if rules is not None and rules.usage is not None else _KNOWN
    for fields in known:
        if _find(usage, fields.read) is None and _find(usage, fields.written) is None:
            continue
        read, written, prompt = (
            reported_count(_find(usage, name)) for name in (fields.read, fields.written, fields.prompt)
        )
        if fields.additive:
            prompt = None if prompt is None else prompt + (read or 0) + (written or 0)
        if prompt is not None and (read or 0) + (written or 0) > prompt:
            read = written = None
        return CloudUsage(read, written, prompt)
    return CloudUsage()


def _find(usage: Any, name: str) -> Any:
    if not name:
        return None
    found = usage
    for member in name.split("."):
        found = found.get(member) if isinstance(found, Mapping) else getattr(found, member, None)
    return found
