"""The answer in what a model wrote."""

from __future__ import annotations

import re

__all__ = ["extract_answer"]

_LABEL = re.compile(r"(?:(?:final )?answer\s*(?::|is\b)|the answer is\b:?)\s*", re.IGNORECASE)


def extract_answer(text: str) -> str:
    """What is scored, the same rule for every model and order:

    1. What a reasoning model thinks (everything up to the last "</think>") is left out; an answer whose thinking never
       ends is empty.
    2. The first line that is not blank counts.
    3. A label in front of it ("Answer:", "Final answer:", "The answer is") is left out.

    Nothing else is guessed: case, punctuation and articles are the metric's affair.
    """
    _, closed, rest = text.rpartition("</think>")
    if closed:
        text = rest
    elif "<think>" in text:
        return ""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    match = _LABEL.match(line)
    return line[match.end() :] if match else line
