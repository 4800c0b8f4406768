"""How long an answer will be: what the cache needs to have room for behind the documents."""

from __future__ import annotations

__all__ = ["AnswerLength"]

_WEIGHT = 1 / 16


class AnswerLength:
    """The running mean of the answers' lengths, in tokens.

    Engines allocate an answer's blocks as they generate it: room for the longest answer allowed would displace documents
    that the engine still holds. Threads may lose each other's reports, which does not matter to a mean.
    """

    def __init__(self) -> None:
        self._mean: float | None = None

    def learn(self, tokens: int) -> None:
        """An answer had so many tokens."""
        mean = self._mean
        self._mean = float(tokens) if mean is None else mean + (tokens - mean) * _WEIGHT

    def suffix_tokens(self, question_tokens: int, limit: int | None, default: int) -> int:
        """The tokens of a question and its answer that will be cached. The answer has at most `limit` (None: unknown);
        before any report, both together are taken to have `default`."""
        mean = self._mean
        expected = default - question_tokens if mean is None else round(mean)
        if limit is not None:
            expected = min(expected, limit)
        # The last token of an answer is never computed on: its keys and values are not cached.
        return question_tokens + max(0, expected - 1)
