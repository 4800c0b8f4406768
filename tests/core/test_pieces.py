"""Long texts cut up for the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from ragorder import Document, PromptBuilder
from ragorder.tokens import split_text

LONG = " ".join(f"The cat {number} sleeps on the warm windowsill." for number in range(4000))
TEXTS = ["", "word " * 20_000, "x" * 100_000, "\n" * 32_768, "a" * 32_768 + " b", "é " * 40_000]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_nothing_of_a_text_is_lost(text: str) -> None:
    cut = list(split_text(text))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= 32_768
    assert len(cut) <= len(text) // 32_000 + 1


def test_a_long_document_has_about_as_many_tokens_in_pieces(tokenizers: dict[str, Any]) -> None:
    builder = PromptBuilder("", tokenizer=tokenizers["chatml"])
    document = Document("long", LONG)
    cuts = len(LONG) // 32_768
    assert cuts > 4
    assert abs(builder.count_tokens(document) - builder.document_tokens(document)) <= 2 * cuts


@pytest.mark.parametrize("align_to", [None, 8])
def test_a_short_one_is_counted_as_it_is(align_to: int | None, tokenizer: Any) -> None:
    builder = PromptBuilder("", tokenizer=tokenizer, align_to=align_to)
    for text in ("", "one", "one two " * 100, "<|im_end|>"):
        document = Document("a", text)
        assert builder.count_tokens(document) == builder.document_tokens(document)
