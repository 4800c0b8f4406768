"""Selections: which of the reused tokens are recomputed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ragorder.benchmarks.fusion.selections import DocumentHeads, RandomTokens
from ragorder.kernels.fusion.selection import SELECTIONS, Measurements, Selection, make_selection

HEADS, RANDOM = DocumentHeads(), RandomTokens()

MEASURED = {"query": "question", "deviation": "two layers"}
"""What they need."""


def facts(*lengths: int, start: int = 20, gap: int = 0, scores: list[float] | None = None) -> Measurements:
    """Documents of these lengths after a system prompt, with `gap` tokens between them that are not reused."""
    spans = []
    for length in lengths:
        spans.append((start, start + length))
        start += length + gap
    reused = [position for begin, end in spans for position in range(begin, end)]
    measured = torch.zeros(len(reused)) if scores is None else torch.tensor(scores, dtype=torch.float32)
    return Measurements(torch.tensor(reused, dtype=torch.int64), spans, measured)


def chosen(select: str | Selection, prompt: Measurements, budget: int) -> list[int]:
    found = make_selection(select).choose(prompt, budget)
    assert found.dtype == torch.int64
    return found.tolist()


@st.composite
def prompts(draw: st.DrawFn) -> Measurements:
    lengths = draw(st.lists(st.integers(1, 12), max_size=5))
    count = sum(lengths)
    score = st.floats(width=32) | st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf])
    scores = draw(st.lists(score, min_size=count, max_size=count))
    start, gap = draw(st.integers(0, 40)), draw(st.integers(0, 5))
    return facts(*lengths, start=start, gap=gap, scores=scores)


@pytest.mark.parametrize("select", [*SELECTIONS, HEADS, RANDOM])
class TestEverySelection:
    @given(prompt=prompts(), budget=st.integers(-3, 70))
    def test_spends_the_budget_on_reused_tokens_in_order_and_always_on_the_same(
        self, select: str | Selection, prompt: Measurements, budget: int
    ) -> None:
        found = chosen(select, prompt, budget)
        assert found == sorted(set(found))
        assert len(found) == min(max(0, budget), len(prompt.reused))
        assert set(found) <= set(prompt.reused.tolist())
        assert found == chosen(select, prompt, budget)

    @given(prompt=prompts(), budget=st.integers(0, 70), more=st.integers(0, 20))
    def test_adds_to_its_tokens_with_a_larger_budget(
        self, select: str | Selection, prompt: Measurements, budget: int, more: int
    ) -> None:
        assert set(chosen(select, prompt, budget)) <= set(chosen(select, prompt, budget + more))


@pytest.mark.parametrize("name", SELECTIONS)
class TestSelectionsByAMeasurement:
    def test_say_which(self, name: str) -> None:
        assert make_selection(name).needs == MEASURED[name]
        with pytest.raises(ValueError, match="measure what the selection needs"):
            make_selection(name).choose(Measurements(torch.arange(20, 30), [(20, 30)]), 3)

    @pytest.mark.parametrize(
        ("lengths", "scores", "expected"),
        [
            ((3, 3), [0.1, 0.9, 0.2, 0.8, 0.3, 0.7], [21, 23, 25]),
            ((3, 3), [0.1, 0.9, 0.2, 0.8, 0.3, 0.7], [21]),
            ((200,), [0.5] * 100 + [0.7] + [0.5] * 99, [20, 21, 22, 120]),
            ((4,), [math.nan, -math.inf, -1.0, math.inf], [22, 23]),
        ],
        ids=["three", "one", "the first of equal ones", "no numbers"],
    )
    def test_the_highest_are_chosen_in_any_document(
        self, name: str, lengths: tuple[int, ...], scores: list[float], expected: list[int]
    ) -> None:
        assert chosen(name, facts(*lengths, scores=scores), len(expected)) == expected

    def test_each_reused_token_needs_one(self, name: str) -> None:
        with pytest.raises(ValueError, match="give a score for each reused token"):
            make_selection(name).choose(facts(4, scores=[0.5] * 3), 2)


class TestHeads:
    def test_each_document_gives_as_many_of_its_first_tokens(self) -> None:
        assert chosen(HEADS, facts(5, 5, 5), 6) == [20, 21, 25, 26, 30, 31]
        # What is left over goes to the first documents, and what a short one leaves to the others.
        assert chosen(HEADS, facts(5, 5, 5), 5) == [20, 21, 25, 26, 30]
        assert chosen(HEADS, facts(1, 5, 5), 7) == [20, 21, 22, 23, 26, 27, 28]


class TestRandom:
    def test_documents_at_other_positions_give_other_tokens(self) -> None:
        draws = {tuple(each - start for each in chosen(RANDOM, facts(100, start=start), 10)) for start in range(20)}
        assert len(draws) == 20

    def test_every_token_is_as_likely(self) -> None:
        starts = range(4000)
        counts = Counter(each - start for start in starts for each in chosen(RANDOM, facts(5, 5, start=start), 3))
        assert set(counts) == set(range(10))
        # 1200 expected, with a standard deviation of 29.
        assert all(abs(count - 1200) < 150 for count in counts.values())


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"selection must be one of .*'query'.*did you mean 'query'"):
        make_selection("qery")
