"""Token counts reported by engines, and the expected answer length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ragorder.common.counts import reported_count
from ragorder.common.running_mean import RunningMean
from ragorder.ordering import Ordering

_OUTPUT = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


class ReportedUsage(NamedTuple):
    """Counts of an answer; None if unreported or impossible."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None

    def confirm(self, ordering: Ordering[Any], *, written_tokens: int | None = None) -> None:
        ordering.confirm(
            self.cached_tokens, self.total_tokens, prompt_tokens=self.prompt_tokens, written_tokens=written_tokens
        )


def read_usage(*reports: Any) -> ReportedUsage:
    """Read mappings or objects with OpenAI's, Anthropic's or LangChain's names. A later report completes an earlier
    one."""
    cached = prompt = completion = total = None
    for report in reports:
        details = _first(report, "input_token_details", "prompt_tokens_details", "input_tokens_details")
        read = _first(details, "cache_read", "cached_tokens")
        if read is None:
            read = member(report, "cache_read_input_tokens")
        cached = _count(read) if cached is None else cached
        prompt = prompt or _prompt_tokens(report)
        completion = completion or _count(_first(report, "output_tokens", "completion_tokens"))
        total = total or _count(member(report, "total_tokens"))
    if cached is not None and (prompt is None or cached > prompt):
        cached = None
    return ReportedUsage(cached, prompt, completion, total)


def answers_something(choice: Any) -> bool:
    """Return whether a streamed choice shows a computed prompt, as a role alone does not."""
    delta = member(choice, "delta")
    return bool(
        member(choice, "finish_reason")
        or isinstance(member(choice, "text"), str)
        or any(member(delta, name) for name in _OUTPUT)
    )


def member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


class AnswerLength:
    """Mean answer length, in tokens: room for the longest allowed answer would evict documents.

    Threads may lose each other's reports.
    """

    def __init__(self) -> None:
        self._mean = RunningMean()

    def learn(self, tokens: int | None) -> None:
        if (count := reported_count(tokens)) is not None:
            self._mean.add(count)

    def suffix_tokens(self, question_tokens: int, limit: int, default: int) -> int:
        """Return the cached tokens of a question and its answer, together `default` before the first report."""
        mean = self._mean.value
        expected = default - question_tokens if mean is None else round(mean)
        # Nothing is computed after the last token of an answer: its keys and values are not cached.
        return question_tokens + max(0, min(expected, limit) - 1)


def _prompt_tokens(report: Any) -> int | None:
    tokens = _count(_first(report, "input_tokens", "prompt_tokens"))
    if tokens is None or member(report, "prompt_tokens") is not None:
        return tokens
    # Anthropic's input tokens exclude cached tokens and those written to the cache.
    others = (member(report, name) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return tokens + sum(_count(each) or 0 for each in others)


def _first(value: Any, *names: str) -> Any:
    return next((found for name in names if (found := member(value, name)) is not None), None)


def _count(value: Any) -> int | None:
    return None if isinstance(value, float) else reported_count(value)
