"""Texts from outside made safe for a prompt: no control tokens of the chat template, no broken Unicode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

__all__ = ["repair_unicode", "special_token_escaper"]

# The control tokens of the common chat templates, for when the served model's tokenizer is not at hand.
_COMMON_SPECIAL_TOKENS = re.compile(
    r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>|</?s>|<(?:bos|eos|pad|unk|mask|cls|sep)>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<</?SYS>>"
    r"|<(?:start|end)_of_(?:turn|image)>|</?(?:tool_call|tool_response|think)>",
    re.IGNORECASE,
)


_PASSES = 8
# The longest match of the pattern above, in characters, and some.
_LONGEST = 128
# A search keeps all other threads from running until it ends: it goes through a long text window by window.
_WINDOW = 1 << 15


def repair_unicode(text: str) -> str:
    """The text with each lone surrogate, which no tokenizer and no wire format takes, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def special_token_escaper(special_tokens: Iterable[str] | None = None) -> Callable[[str], str]:
    """A function that breaks control tokens in a text by a space after their first character, or else removes them.

    `special_tokens` are those of the served model's tokenizer; None stands for the common ones.
    """
    pattern, longest = _COMMON_SPECIAL_TOKENS, _LONGEST
    if special_tokens is not None:
        longest_first = sorted({token for token in special_tokens if token.strip()}, key=lambda t: (-len(t), t))
        if not longest_first:
            return repair_unicode
        pattern = re.compile("|".join(re.escape(token) for token in longest_first))
        longest = len(longest_first[0])

    def escape_special_tokens(text: str) -> str:
        text = repair_unicode(text)
        # A broken token can leave another one behind that overlapped it, or make one up with the space.
        for _ in range(_PASSES):
            broken = _replace(pattern, longest, text, _break)
            if broken is None:
                return text
            text = broken
        while (without := _replace(pattern, longest, text, _drop)) is not None:
            text = without
        return text

    return escape_special_tokens


def _break(match: re.Match[str]) -> str:
    token = match[0]
    return f"{token[0]} {token[1:]}" if len(token) > 1 else "\N{REPLACEMENT CHARACTER}"


def _drop(match: re.Match[str]) -> str:
    return ""


def _replace(pattern: re.Pattern[str], longest: int, text: str, by: Callable[[re.Match[str]], str]) -> str | None:
    """What `pattern.sub` would give; None without a match. No match is longer than `longest`."""
    pieces: list[str] = []
    copied = start = 0
    while start < len(text):
        seam = start + _WINDOW
        # A match that begins behind the seam may be cut off; it is the first of the next window.
        for match in pattern.finditer(text, start, seam + longest):
            if match.start() >= seam:
                break
            pieces += (text[copied : match.start()], by(match))
            copied = match.end()
        start = max(seam, copied)
    return "".join((*pieces, text[copied:])) if pieces else None
