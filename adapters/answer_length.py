"""How long an answer will be: what the cache needs to have room for behind the documents."""

from __future__ import annotations

from ragorder.pipelining.running_mean import RunningMean

__all__ = ["AnswerLength"]


class AnswerLength:
    """The running mean of the answers' lengths, in tokens: an engine allocates an answer's blocks as it generates it,
    and room for the longest one allowed would displace documents. Threads may lose each other's reports."""

    def __init__(self) -> None:
        self._mean = RunningMean()

    def learn(self, tokens: int | None) -> None:
        """An answer had so many tokens (None: nobody knows)."""
        if tokens is not None:
            self._mean.add(tokens)

    def suffix_tokens(self, question_tokens: int, limit: int, default: int) -> int:
        """The tokens of a question and its answer that will be cached. The answer has at most `limit`; before the first
        report, question and answer are expected to have `default`."""
        mean = self._mean.value
        expected = default - question_tokens if mean is None else round(mean)
        # The last token of an answer is never computed on: its keys and values are not cached.
        return question_tokens + max(0, min(expected, limit) - 1)
