"""Documents that are computed exactly although they could be taken over: only where later requests pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from ragorder._investment import Investment
from ragorder.settings import Settings
from ragorder.trie.tail import CohortTail, Tail, tails
from ragorder.trie.tree import Key


@dataclass
class Documents:
    keys: Sequence[Key]
    tokens: Sequence[int]
    token_ids: Sequence[Sequence[int]] = ()


class Foreseen(Tail):
    """Uses of sets of documents, as given."""

    def __init__(self, uses: Mapping[str, float]) -> None:
        self._uses = {frozenset(names): count for names, count in uses.items()}

    def arrange(self, request: object, prefix: Sequence[int], rest: list[int], waiting: object) -> list[int]:
        return rest

    def coming_uses(self, request: object, placed: Sequence[int], candidates: Sequence[int]) -> Sequence[float]:
        keys = request.keys  # type: ignore[attr-defined]
        front = {keys[rank] for rank in placed}
        return [self._uses.get(frozenset(front | {keys[rank]}), 0.0) for rank in candidates]


def investment(tail: Tail, **options: object) -> Investment:
    return Investment(Settings(reuse="fused", **{"recompute": 0.2, "min_gain": 0.0} | options), tail)  # type: ignore[arg-type]


ABC = Documents("abc", [100, 100, 50])


def test_a_document_gains_what_its_copies_would_have_recomputed_less_what_it_costs_now() -> None:
    """Now 80 % of its tokens, later 20 % for each use."""
    found = investment(Foreseen({"a": 10, "b": 4, "c": 0})).gains(ABC, ABC.tokens, [], range(3))
    assert found == pytest.approx([10 * 20 - 80, 0, -40])


@pytest.mark.parametrize(("uses", "chosen"), [(3.9, []), (4.0, []), (4.1, [0])])
def test_it_is_computed_if_its_uses_pay(uses: float, chosen: list[int]) -> None:
    assert investment(Foreseen({"a": uses})).choose(ABC, ABC.tokens, [], [0, 1, 2]) == chosen


def test_next_comes_what_gains_most_behind_those_in_front() -> None:
    tail = Foreseen({"a": 9, "b": 20, "c": 30, "ab": 8, "bc": 19, "abc": 7})
    # 20 uses of 100 tokens spare more than 30 of 50.
    assert investment(tail).choose(ABC, ABC.tokens, [], [0, 1, 2]) == [1, 2, 0]
    assert investment(tail).choose(ABC, ABC.tokens, [0], [1, 2]) == [1, 2]
    assert investment(tail).choose(ABC, ABC.tokens, [2], [0, 1]) == [1, 0]


def test_it_moves_only_as_far_as_its_gain_pays_for() -> None:
    tail = Foreseen({"b": 4.5})
    # 0.5 uses more than it costs, of 20 tokens.
    assert investment(tail, min_gain=9.0).choose(ABC, ABC.tokens, [], [0, 1, 2]) == [1]
    assert investment(tail, min_gain=11.0).choose(ABC, ABC.tokens, [], [0, 1, 2]) == []
    assert investment(tail, min_gain=11.0).choose(ABC, ABC.tokens, [], [1, 2]) == [1]


@pytest.mark.parametrize(("recompute", "chosen"), [(0.0, []), (1.0, [1])])
def test_of_copies_that_cost_nothing_none_is_computed_and_of_those_that_cost_all_each_that_is_used(
    recompute: float, chosen: list[int]
) -> None:
    tail = Foreseen({"b": 0.01, "bc": 0.0})
    assert investment(tail, recompute=recompute).choose(ABC, ABC.tokens, [], [0, 1, 2]) == chosen


def test_nothing_is_computed_without_a_forecast_or_if_not_wanted() -> None:
    assert investment(Foreseen({"a": 100}), invest=False).choose(ABC, ABC.tokens, [], [0]) == []
    for name in ("rank", "frequency", "popularity"):
        assert investment(tails[name]()).choose(ABC, ABC.tokens, [], [0, 1, 2]) == []


def test_a_copy_asks_its_own_tail() -> None:
    ours, theirs = Foreseen({"a": 100}), Foreseen({})
    original = investment(ours)
    assert original.copy(theirs).choose(ABC, ABC.tokens, [], [0]) == []
    assert original.choose(ABC, ABC.tokens, [], [0]) == [0]


def test_uses_are_learnt_from_the_requests() -> None:
    """Of 300 requests to come half contain a, as of those so far."""
    tail = CohortTail()
    for number in range(4_000):
        tail.observe(Documents(["a" if number % 2 else f"x{number}", f"y{number}"], [100, 100]))
    asked = Documents(["new", "a"], [100, 100])
    tail.observe(asked)
    [new, known] = investment(tail).gains(asked, asked.tokens, [], [0, 1])
    assert known == pytest.approx(150 * 20 - 80, rel=0.3)
    assert new < 0
