"""Long texts cut up, to be tokenised piece by piece: a tokenizer takes some 150 bytes for each character of a text."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pieces"]

_LENGTH = 1 << 15
# So far back a piece may end where it is natural: tokens do not go across the beginning of a word.
_BACK = 256


def pieces(text: str) -> Iterator[str]:
    """The pieces of a text, of 32,768 characters at most, cut in front of white space where there is any. A short text
    is one piece. The tokens of all pieces are about those of the text: one cut may make a difference of one or two."""
    start = 0
    while len(text) - start > _LENGTH:
        end = start + _LENGTH
        natural = max(text.rfind(blank, end - _BACK, end) for blank in (" ", "\n"))
        end = natural if natural > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
