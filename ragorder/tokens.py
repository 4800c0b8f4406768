"""Tokenizer of the served model, applied segment by segment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from ragorder.common.lock import follow

PLACEHOLDER = "@@ragorder-documents@@"
# A tokenizer needs about 150 bytes for each character of a text.
_PIECE_CHARACTERS = 1 << 15
# A piece may end up to this far back, before white space, because tokens do not extend across the start of a word.
_BACK_CHARACTERS = 256

# Special tokens of common chat templates, for use without the served model's tokenizer. A search for a pattern with one
# first character is ten times as fast.
_COMMON_SPECIAL_TOKENS = (
    re.compile(
        r"<(?:\|[^|<>\s]{1,64}\|>|｜[^｜<>\s]{1,64}｜>|/?s>|(?:bos|eos|pad|unk|mask|cls|sep)>|</?SYS>>"
        r"|(?:start|end)_of_(?:turn|image)>|/?(?:tool_call|tool_response|think)>)",
        re.IGNORECASE,
    ),
    re.compile(r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]", re.IGNORECASE),
)

_PASSES = 8
# An upper bound of the pattern's matches, in characters.
_LONGEST = 128
# A regular expression search blocks all other threads, so long texts are searched window by window.
_WINDOW = 1 << 15


class PromptFrame(NamedTuple):
    """The chat template's text before and after the user's turn, which opens with the system prompt unless
    `system_role`.
    """

    before: str
    after: str
    system_role: bool


class SegmentTokenizer:
    """Wraps a transformers tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "added_tokens_decoder"):
            kind = type(tokenizer).__name__
            raise TypeError(f"tokenizer must be one of transformers, got {kind}: use AutoTokenizer.from_pretrained")
        self._tokenizer = tokenizer
        self.after_fork()
        follow(self)

    def after_fork(self) -> None:
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        """Return the token ids; lone surrogates, which tokenizers refuse, are replaced."""
        text = repair_unicode(text)
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def special_tokens(self) -> Iterator[str]:
        yield from self._tokenizer.all_special_tokens
        for added in self._tokenizer.added_tokens_decoder.values():
            text = added.content
            if added.special or (text[:1] in "<[" and text[-1:] in ">]"):
                yield text

    def frame(self, system: str) -> PromptFrame:
        """Raises ValueError unless the template shows the user's message exactly once."""
        if not getattr(self._tokenizer, "chat_template", None):
            bos = getattr(self._tokenizer, "bos_token", None) or ""
            return PromptFrame(f"{bos}{system}\n\n", "\n", system_role=True)
        user = {"role": "user", "content": PLACEHOLDER}
        system_role = True
        try:
            rendered = self._render(system, user)
        except Exception:
            # Some templates (Gemma's, Mistral's first) have no system role.
            system_role = False
            rendered = self._render("", {"role": "user", "content": f"{system}\n\n{PLACEHOLDER}"})
        before, slot, after = rendered.partition(PLACEHOLDER)
        if not slot or PLACEHOLDER in after:
            raise ValueError("the tokenizer's chat template must show the user's message exactly once")
        return PromptFrame(before, after, system_role)

    def between_turns(self, system: str) -> str:
        """Return the template's text between an answer and the next turn, or "" if unclear."""
        if not getattr(self._tokenizer, "chat_template", None):
            return ""
        said = [PLACEHOLDER, f"{PLACEHOLDER} answered", f"{PLACEHOLDER} again"]
        roles = ["user", "assistant", "user"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        try:
            rendered = self._render(system, *messages)
        except Exception:
            return ""
        _, answered, rest = rendered.partition(said[1])
        between, again, _ = rest.partition(said[2])
        return between if answered and again else ""

    def _render(self, system: str, *messages: dict[str, str]) -> str:
        shown = [{"role": "system", "content": system}, *messages] if system else [*messages]
        rendered: str = self._tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        return rendered


def repair_unicode(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def special_token_escaper(special_tokens: Iterable[str] | None = None) -> Callable[[str], str]:
    """Return a function that puts a space into special tokens, or removes them.

    `special_tokens` are the served model's (None: those of common chat templates).
    """
    patterns: Sequence[re.Pattern[str]] = _COMMON_SPECIAL_TOKENS
    longest = _LONGEST
    if special_tokens is not None:
        longest_first = sorted({token for token in special_tokens if token.strip()}, key=lambda t: (-len(t), t))
        if not longest_first:
            return repair_unicode
        patterns = (re.compile("|".join(re.escape(token) for token in longest_first)),)
        longest = len(longest_first[0])
    # A module's function, so that prompts can be pickled.
    return partial(_escape, patterns, longest)


def _escape(patterns: Sequence[re.Pattern[str]], longest: int, text: str) -> str:
    text = repair_unicode(text)
    # An escaped token can leave an overlapping one, or form another with the space.
    for _ in range(_PASSES):
        broken = _replace_all(patterns, longest, text, _break)
        if broken is None:
            return text
        text = broken
    while (without := _replace_all(patterns, longest, text, lambda match: "")) is not None:
        text = without
    return text


def _break(match: re.Match[str]) -> str:
    token = match[0]
    return f"{token[0]} {token[1:]}" if len(token) > 1 else "\N{REPLACEMENT CHARACTER}"


def _replace_all(
    patterns: Sequence[re.Pattern[str]], longest: int, text: str, by: Callable[[re.Match[str]], str]
) -> str | None:
    replaced: str | None = None
    for pattern in patterns:
        found = _replace(pattern, longest, text if replaced is None else replaced, by)
        replaced = replaced if found is None else found
    return replaced


def _replace(pattern: re.Pattern[str], longest: int, text: str, by: Callable[[re.Match[str]], str]) -> str | None:
    """Do `pattern.sub` in windows, for matches of at most `longest` characters; None without a match."""
    pieces: list[str] = []
    copied = start = 0
    while start < len(text):
        seam = start + _WINDOW
        # A match that begins after the seam may be cut off; it is the first of the next window.
        for match in pattern.finditer(text, start, seam + longest):
            if match.start() >= seam:
                break
            pieces += (text[copied : match.start()], by(match))
            copied = match.end()
        start = max(seam, copied)
    return "".join((*pieces, text[copied:])) if pieces else None


def split_text(text: str) -> Iterator[str]:
    """Yield pieces of at most 32,768 characters, cut before white space if possible."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        natural = max(text.rfind(blank, end - _BACK_CHARACTERS, end) for blank in (" ", "\n"))
        end = natural if natural > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
