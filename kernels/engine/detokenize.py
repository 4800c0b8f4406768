"""Incremental detokenisation: whole characters, exact spaces, no stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

# The tokenizers' text for an incomplete character.
_BROKEN = "\ufffd"
# For spaces and joined characters tokenizers look back at most 6 tokens. The other lengths are for prompts of single
# bytes (one of four consecutive ones begins a character), and for prompts that end within a character.
_CONTEXT_TOKENS = (6, 7, 8, 9, 24)
# A character has at most four bytes: text still broken after three more tokens stays broken.
_CHARACTER_TOKENS = 3
_PENDING_TOKENS = 8


# tokenizers' DecodeStream cannot replace this: it needs a fast tokenizer, and with byte fallback it returns nothing
# after bytes that do not make a character.
class TextStream:
    """Pieces of text, never revised, that add up to `text`; none without a tokenizer. The prompt's last tokens give the
    first word its space. Possible beginnings of `stop` strings are held back."""

    def __init__(self, tokenizer: Any | None, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._tokens = self._tail(prompt)
        # Tokens before `_read` are in the text; those from `_context` are decoded again.
        self._context = 0
        self._read = len(self._tokens)
        self._waiting = ""

    def push(self, token_id: int) -> str:
        """Return the new text; "" after a stop string (`stopped`)."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token_id)
        new = self._decode()
        if not new and self._is_hidden(token_id):
            # Otherwise a run of such tokens would be decoded again with each of them.
            self._tokens.pop()
        return self._emit(new)

    def finish(self) -> str:
        if self._tokenizer is None or self.stopped:
            return ""
        new = self._emit(self._decode(to_the_end=True))
        if not self.stopped:
            new += self._waiting
            self.text += self._waiting
            self._waiting = ""
        return new

    def _decode(self, *, to_the_end: bool = False) -> str:
        before = self._text_of(self._tokens[self._context : self._read])
        end = len(self._tokens)
        after = self._text_of(self._tokens[self._context :])
        if after.endswith(_BROKEN) and not to_the_end:
            if end - self._read <= _PENDING_TOKENS:
                return ""
            end -= _CHARACTER_TOKENS
            after = self._text_of(self._tokens[self._context : end])
        # All of it, unless the text so far ended within a character.
        known = _common(before, after)
        if len(after) == known:
            return ""
        if known == len(before):
            self._context = self._read
        self._read = end
        return after[known:]

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for count in _CONTEXT_TOKENS:
            tail = list(prompt[-count:])
            if self._tokenizer is None or not self._text_of(tail).startswith(_BROKEN):
                break
        return tail

    def _is_hidden(self, token_id: int) -> bool:
        """Return whether no text ever has this token. Others without text, such as single spaces, may get one."""
        return not self._text_of([token_id]) and bool(self._text_of([token_id], hide=False))

    def _text_of(self, tokens: Sequence[int], *, hide: bool = True) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=hide, clean_up_tokenization_spaces=False)
        return text

    def _emit(self, new: str) -> str:
        if not self._stop:
            self.text += new
            return new
        text = self._waiting + new
        found = min((place for place in map(text.find, self._stop) if place >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            emitted, self._waiting = text[:found], ""
        else:
            kept = self._beginning_of_a_stop(text)
            emitted, self._waiting = text[: len(text) - kept], text[len(text) - kept :]
        self.text += emitted
        return emitted

    def _beginning_of_a_stop(self, text: str) -> int:
        longest = min(self._longest - 1, len(text))
        fits = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop))
        return next(fits, 0)


def _common(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
