"""Control tokens in long texts: found window by window, and the same as in one go."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragorder.tokens as module
from ragorder.tokens import special_token_escaper

PIECES = [
    "<",
    "|",
    "<|",
    "|>",
    "a",
    "b",
    "<s>",
    "</s>",
    "[INST]",
    "[",
    "INST]",
    " ",
    "<bos>",
    "é",
    "<|im_end|>",
    "<<SYS>>",
]
OWN = ["ab", "aba", "b", "<s>"]


def at_once(patterns: Sequence[re.Pattern[str]], text: str) -> str:
    """Escaping of special tokens, by `sub` alone."""
    for _ in range(module._PASSES):
        for pattern in patterns:
            text = pattern.sub(module._break, text)
    while any(pattern.search(text) for pattern in patterns):
        for pattern in patterns:
            text = pattern.sub("", text)
    return text


@pytest.mark.parametrize("own", [None, OWN], ids=["common", "own"])
@given(texts=st.lists(st.sampled_from(PIECES), max_size=40), window=st.integers(1, 30))
def test_windows_change_nothing(own: list[str] | None, texts: list[str], window: int) -> None:
    longest_first = sorted(OWN, key=lambda token: (-len(token), token))
    patterns = module._COMMON_SPECIAL_TOKENS if own is None else [re.compile("|".join(map(re.escape, longest_first)))]
    text = "".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW", window)
        assert special_token_escaper(own)(text) == at_once(patterns, text)


def test_a_search_goes_no_further_than_a_window() -> None:
    ends: list[int] = []

    class Pattern:
        def finditer(self, text: str, start: int, end: int) -> list[re.Match[str]]:
            ends.append(end - start)
            return []

    assert module._replace(Pattern(), 10, "x" * 200_000, module._break) is None  # type: ignore[arg-type]
    assert len(ends) == -(-200_000 // module._WINDOW)
    assert max(ends) == module._WINDOW + 10
