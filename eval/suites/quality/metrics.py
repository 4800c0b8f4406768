"""Exact match and F1 as in the official script of each data set; the best of the accepted answers counts.

| data set | before words are compared | yes, no, noanswer | both empty |
|---|---|---|---|
| HotpotQA, 2WikiMultiHopQA | lower case, ASCII punctuation gone, articles gone | F1 only if both are it | F1 0 |
| MuSiQue | the same | words like others | F1 1 |
| NQ-Open, a corpus | decomposed (NFD), then as HotpotQA | words like others | F1 0 (SQuAD's) |
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_LABEL = re.compile(r"(?:(?:final )?answer\s*(?::|is\b)|a:|the answer is\b:?)\s*", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_GONE = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})


def _without_punctuation(text: str) -> str:
    return _words(text.lower().translate(_GONE))


def _decomposed(text: str) -> str:
    return _without_punctuation(unicodedata.normalize("NFD", text))


def _words(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text).split())


@dataclass(frozen=True, slots=True)
class Scorer:
    """`closed` answers have an F1 only for an exact match; with `empty_agrees` two answers without words have an F1 of
    1."""

    normalise: Callable[[str], str]
    closed: frozenset[str] = frozenset()
    empty_agrees: bool = False

    def exact_match(self, answer: str, accepted: Iterable[str]) -> int:
        given = self.normalise(answer)
        return int(any(given == self.normalise(other) for other in accepted))

    def f1(self, answer: str, accepted: Iterable[str]) -> float:
        """The best overlap in words with an accepted answer, from 0 to 1."""
        given = self.normalise(answer)
        return max((self._overlap(given, self.normalise(other)) for other in accepted), default=0.0)

    def is_empty(self, accepted: Iterable[str]) -> bool:
        """Whether the empty answer matches an accepted one ("The The")."""
        return any(not self.normalise(other) for other in accepted)

    def occurs(self, answers: Iterable[str], text: str) -> bool:
        """Whether an answer stands in the text, as whole words."""
        words = f" {self.normalise(text)} "
        return any(answer and f" {answer} " in words for answer in map(self.normalise, answers))

    def _overlap(self, given: str, wanted: str) -> float:
        if given != wanted and not self.closed.isdisjoint((given, wanted)):
            return 0.0
        words, others = given.split(), wanted.split()
        if not words or not others:
            return float(self.empty_agrees and words == others)
        shared = (Counter(words) & Counter(others)).total()
        # The harmonic mean of shared/words and shared/others.
        return 2 * shared / (len(words) + len(others))


SCORERS = {
    "hotpotqa": Scorer(_without_punctuation, closed=_CLOSED),
    "2wikimultihopqa": Scorer(_without_punctuation, closed=_CLOSED),
    "musique": Scorer(_without_punctuation, empty_agrees=True),
    "nq": Scorer(_decomposed),
}


def extract_answer(text: str) -> str:
    """The scored part of a model's text: the first line after the last "</think>" that has more than a label such as
    "Answer:", without that. Unfinished thinking is no answer."""
    _, closed, rest = text.rpartition("</think>")
    if closed:
        text = rest
    elif "<think>" in text:
        return ""
    for line in map(str.strip, text.splitlines()):
        label = _LABEL.match(line)
        if answer := line[label.end() :] if label else line:
            return answer
    return ""
