"""Texts of so many tokens, at four characters a token."""

from __future__ import annotations

from ragorder import Document, PromptBuilder
from ragorder.benchmarks.chats.clouds.record import CloudsCell

__all__ = ["make_builder", "make_document", "make_question", "make_text"]

_CHARACTERS = 4


def make_builder(cell: CloudsCell) -> PromptBuilder:
    """With the blank line behind it, its system prompt is as long as asked for."""
    return PromptBuilder("s" * (_CHARACTERS * cell.system_tokens - 2))


def make_document(number: int, tokens: int) -> Document:
    """A text that takes so many tokens with its header and the blank line behind it."""
    id = f"d{number:06}"
    length = _CHARACTERS * tokens - len(f"[{id}]\n\n\n")
    return Document(id, (f"{number} " * length)[:length].replace(" ", "-"))


def make_question(number: int, tokens: int) -> str:
    length = _CHARACTERS * tokens - len("Question: ")
    return f"{number:06}".ljust(length, "?")[:length]


def make_text(number: int, tokens: int) -> str:
    return f"{number:06}".ljust(_CHARACTERS * tokens, ".")
