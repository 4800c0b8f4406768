"""Where documents stand in a prompt: what an engine finds of them."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("scipy")

from ragorder import Document
from ragorder.benchmarks.chats.placement import PLACES, PlacedPrompts
from ragorder.eval.data.trace import TraceRequest

DOCUMENTS = [Document(f"d{number}", f"text {number} " * (number + 3)) for number in range(4)]


def request(*numbers: int) -> TraceRequest:
    return TraceRequest("Which?", [DOCUMENTS[number] for number in numbers])


def common(first: list[int], second: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


class TestPrompts:
    @pytest.mark.parametrize("place", PLACES)
    def test_have_the_tokens_that_an_orderer_counts(self, place: str) -> None:
        prompts, asked = PlacedPrompts(place), request(2, 0, 1)
        ids = prompts.token_ids(7, asked, asked.documents)
        counted = sum(map(prompts.document_tokens, asked.documents))
        date = 8 if place == "after a date" else 0
        assert len(ids) == prompts.prefix_tokens + date + counted + prompts.suffix_tokens(asked)
        # The same request is the same prompt, and nothing in it occurs twice.
        assert ids == prompts.token_ids(7, asked, asked.documents)
        assert len(set(ids)) == len(ids)

    @pytest.mark.parametrize(
        ("place", "found"),
        [
            ("before the question", [0, 1]),
            ("labelled", [0, 1]),
            ("numbered by place", [0, 1]),
            ("numbered by rank", []),
            ("after a date", []),
            ("after the question", []),
        ],
    )
    def test_of_another_request_with_two_documents_in_the_same_places(self, place: str, found: list[int]) -> None:
        """Their ranks differ: the other request has them in another order, and a third one in front."""
        prompts = PlacedPrompts(place)
        here, there = request(0, 1, 2), request(3, 1, 0)
        first = list(prompts.token_ids(0, here, [DOCUMENTS[n] for n in (0, 1, 2)]))
        second = list(prompts.token_ids(1, there, [DOCUMENTS[n] for n in (0, 1, 3)]))
        tokens = prompts.prefix_tokens + sum(prompts.document_tokens(DOCUMENTS[number]) for number in found)
        # The number of the third place is the same, too.
        assert common(first, second) == tokens + 4 * (place == "numbered by place")
