"""Long texts: control tokens are found window by window, and tokens are counted piece by piece."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import bound, escape, escaping, set_bounds

from ragorder import Document, PromptBuilder
from ragorder.tokens import special_token_escaper, split_text

PIECES = ["<", "|", "<|", "|>", "a", "b", "<s>", "</s>", "[INST]", "[", "INST]", " ", "<bos>", "é"]
PIECES += ["<|im_end|>", "<<SYS>>"]
OWN = ["ab", "aba", "b", "<s>"]


def at_once(patterns: Sequence[re.Pattern[str]], text: str) -> str:
    """Escaping of special tokens, by `sub` alone."""
    _, passes, broken = escaping()
    for _ in range(passes):
        for pattern in patterns:
            text = pattern.sub(broken, text)
    while any(pattern.search(text) for pattern in patterns):
        for pattern in patterns:
            text = pattern.sub("", text)
    return text


@pytest.mark.parametrize("own", [None, OWN], ids=["common", "own"])
@given(texts=st.lists(st.sampled_from(PIECES), max_size=40), window=st.integers(1, 30))
def test_windows_change_nothing(own: list[str] | None, texts: list[str], window: int) -> None:
    longest_first = sorted(OWN, key=lambda token: (-len(token), token))
    patterns = escaping()[0] if own is None else [re.compile("|".join(map(re.escape, longest_first)))]
    text = "".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        set_bounds(patch, escaped_window=window)
        assert special_token_escaper(own)(text) == at_once(patterns, text)


def test_a_search_goes_no_further_than_a_window() -> None:
    ends: list[int] = []

    class Pattern:
        def finditer(self, text: str, start: int, end: int) -> list[re.Match[str]]:
            ends.append(end - start)
            return []

    assert escape(Pattern(), 10, "x" * 200_000) is None
    assert len(ends) == -(-200_000 // bound("escaped_window"))
    assert max(ends) == bound("escaped_window") + 10


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
