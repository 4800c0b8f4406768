"""Positions of a fused request: in which order they are computed, and what of it is exact."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.kernels.engine.sequence import ScatteredPrefill

# Ten tokens are an exact prefix; documents end at 14, 18, 22 and 26, and four of a question follow.
TOKENS, COMPUTED, PATH = 30, 10, 26
TAKEN = [(14, 18), (22, 26)]
FRONT, BETWEEN, QUESTION = [10, 11, 12, 13], [18, 19, 20, 21], [26, 27, 28, 29]


def prefill(*, documents_first: bool = False) -> ScatteredPrefill:
    return ScatteredPrefill(TOKENS, COMPUTED, TAKEN, PATH, documents_first=documents_first)


def positions(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def drained(work: ScatteredPrefill, room: int) -> list[list[int]]:
    """Steps of so much room."""
    steps = []
    while len(work):
        tokens = min(room, len(work))
        steps.append(work.positions(tokens).tolist())
        work.advance(tokens)
    return steps


@pytest.mark.parametrize(("first", "before"), [(False, FRONT), (True, FRONT + BETWEEN)])
def test_documents_come_before_the_choice(first: bool, before: list[int]) -> None:
    work = prefill(documents_first=first)
    assert drained(work, 100) == [before]
    work.choose(positions(15, 23))
    assert drained(work, 100) == [sorted({15, 23, *BETWEEN, *QUESTION} - set(before))]


def test_a_choice_is_of_one_step_if_it_is_known_at_once() -> None:
    work = prefill()
    work.choose(positions(16))
    assert drained(work, 100) == [[*FRONT, 16, *BETWEEN, *QUESTION]]


def test_only_what_is_before_the_first_copy_is_exact() -> None:
    work = prefill(documents_first=True)
    assert [work.exact_after(tokens) for tokens in (1, 4, 5, 8)] == [11, 14, 14, 14]
    work.advance(8)
    work.choose(positions(14, 15, 16, 17))
    assert work.exact_after(8) == 14


@pytest.mark.parametrize("first", [False, True])
def test_everything_chosen_in_place_is_exact_unless_a_document_saw_copies(first: bool) -> None:
    work = prefill(documents_first=first)
    work.choose(positions(*range(14, 18), *range(22, 26)))
    assert work.exact_after(len(work)) == (14 if first else TOKENS)


class TestInFull:
    def test_is_plain_prefill_after_the_exact_part(self) -> None:
        work = prefill(documents_first=True)
        work.advance(8)
        work.choose_all()
        assert drained(work, 100) == [list(range(14, TOKENS))]

    def test_begins_with_documents_that_are_not_there(self) -> None:
        work = prefill()
        work.choose_all()
        assert work.exact_after(len(work)) == TOKENS
        assert drained(work, 100) == [list(range(COMPUTED, TOKENS))]
