"""Documents that are computed exactly although they have copies: only where later requests pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from ragorder.scope.fused import Invested, Investment
from ragorder.settings import Settings
from ragorder.trie.tail import CohortTail, Tail, tails
from ragorder.trie.tree import Key, KnowledgeTree, Node

PLENTY = 1 << 30


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


ROOT = Node(None, None, 0, 0)
ABC = Documents("abc", [100, 100, 50])


def investment(tail: Tail, reused_tokens: int = PLENTY, **options: object) -> Investment:
    """After requests that reused this number of tokens."""
    chosen = {"reuse": "fused", "copies": "all", "recompute": 0.2, "min_gain": 0.0} | options
    found = Investment(Settings(**chosen), tail)  # type: ignore[arg-type]
    found.begin([ROOT], 0, [], reused_tokens)
    return found


def choose(found: Investment, prefix: Sequence[int], ranks: Sequence[int]) -> list[int]:
    return found.choose(ABC, ABC.tokens, prefix, ranks)


class TestADocumentIsComputed:
    @pytest.mark.parametrize(("uses", "chosen"), [(3.9, []), (4.0, []), (4.1, [0])])
    def test_if_its_uses_spare_more_than_it_costs(self, uses: float, chosen: list[int]) -> None:
        """Now 80 % of its tokens, later 20 % for each use."""
        found = investment(Foreseen({"a": uses}))
        assert choose(found, [], [0, 1, 2]) == chosen
        assert found.uses(ABC, ABC.tokens, [], 0, 0.0) == (uses if chosen else None)

    def test_that_gains_most_after_those_before_it(self) -> None:
        found = investment(Foreseen({"a": 9, "b": 20, "c": 30, "ab": 8, "bc": 19, "abc": 7}))
        # 20 uses of 100 tokens spare more than 30 of 50.
        assert choose(found, [], [0, 1, 2]) == [1, 2, 0]
        assert choose(found, [0], [1, 2]) == [1, 2]
        assert choose(found, [2], [0, 1]) == [1, 0]

    def test_only_as_far_ahead_as_its_gain_pays_for(self) -> None:
        tail = Foreseen({"b": 4.5})
        # Half a use more than it costs, of 20 tokens.
        assert choose(investment(tail, min_gain=9.0), [], [0, 1, 2]) == [1]
        assert choose(investment(tail, min_gain=11.0), [], [0, 1, 2]) == []
        assert choose(investment(tail, min_gain=11.0), [], [1, 2]) == [1]

    @pytest.mark.parametrize(("recompute", "chosen"), [(0.0, []), (1.0, [1])])
    def test_never_if_copies_cost_nothing_and_always_if_they_cost_as_much(
        self, recompute: float, chosen: list[int]
    ) -> None:
        tail = Foreseen({"b": 0.01, "bc": 0.0})
        assert choose(investment(tail, recompute=recompute), [], [0, 1, 2]) == chosen

    def test_not_without_a_forecast_nor_if_not_wanted_nor_beside_documents_without_copies(self) -> None:
        tail = Foreseen({"a": 100})
        assert choose(investment(tail), [], [0]) == [0]
        assert choose(investment(tail, invest=False), [], [0]) == []
        assert choose(investment(tail, copies="served"), [], [0]) == []
        assert choose(investment(tails["prefix"]()), [], [0, 1, 2]) == []

    def test_as_a_copys_own_tail_foresees(self) -> None:
        original = investment(Foreseen({"a": 100}))
        assert choose(original.copy(Foreseen({})), [], [0]) == []
        assert choose(original, [], [0]) == [0]

    def test_by_what_earlier_requests_contained(self) -> None:
        """Of 300 requests to come half contain a, as of those so far: 30 uses are enough at 3.2 %, 150 at 0.67 %."""
        tail = CohortTail()
        for number in range(4_000):
            tail.observe(Documents(["a" if number % 2 else f"x{number}", f"y{number}"], [100, 100]))
        asked = Documents(["new", "a"], [100, 100])
        tail.observe(asked)
        found = investment(tail)
        assert found.uses(asked, asked.tokens, [], 1, 0.0) == pytest.approx(150, rel=0.3)
        assert found.uses(asked, asked.tokens, [], 0, 0.0) is None


class TestMeans:
    """At most 1 % of what requests recompute is spent before it comes back."""

    def test_are_earned_by_what_requests_recompute(self) -> None:
        tail = Foreseen({"a": 100, "ab": 100})
        # A document costs 80 tokens; 20 % are recomputed, and 1 % of that may be spent.
        for reused_tokens, chosen in ((39_999, []), (40_000, [0]), (79_999, [0]), (80_000, [0, 1])):
            found = investment(tail, reused_tokens)
            assert choose(found, [], [0, 1, 2]) == chosen
            assert (found.uses(ABC, ABC.tokens, [0], 1, 80.0) is None) == (len(chosen) < 2)

    def spent(self, found: Investment, uses: float = 30.0) -> list[Node]:
        path = KnowledgeTree(1).insert("a", [100], [0])
        found.begin(path, 0, [Invested(0, uses)], 0)
        return path

    def test_come_back_with_each_use(self) -> None:
        found = investment(Foreseen({"a": 100}), 40_000)
        path = self.spent(found)
        assert choose(found, [], [0]) == []
        for _ in range(3):
            found.begin(path, 1, [], 0)
        assert choose(found, [], [0]) == []
        found.begin(path, 1, [], 0)
        assert choose(found, [], [0]) == [0]

    def test_come_back_with_a_request_that_fails(self) -> None:
        found = investment(Foreseen({"a": 100}), 40_000)
        path = self.spent(found)
        found.cancel(path, [Invested(0, 30.0)])
        assert choose(found, [], [0]) == [0]
        # Of what was never computed no use counts.
        found.begin(path, 1, [], 0)
        assert choose(found, [0], [1]) == []

    def test_are_a_copys_own(self) -> None:
        found = investment(Foreseen({"a": 100}), 40_000)
        copy = found.copy(Foreseen({"a": 100}))
        self.spent(copy)
        assert choose(copy, [], [0]) == []
        assert choose(found, [], [0]) == [0]


class TestForecasts:
    """Count to the degree that former ones have come true."""

    @pytest.mark.parametrize(
        ("uses", "promised", "requests", "believed"),
        [
            *((280, 280, 300, True), (300, 10, 300, True), (0, 280, 300, False), (150, 280, 300, True)),
            # What failed long ago is forgotten.
            *((0, 280, 400, False), (0, 280, 5_000, True)),
        ],
    )
    def test_are_believed_as_far_as_they_have_come_true(
        self, uses: int, promised: float, requests: int, believed: bool
    ) -> None:
        """Whether 8 expected uses pay, twice as many as it takes, after this number was forecast and seen."""
        found = investment(Foreseen({"a": 8.0}))
        path = KnowledgeTree(1).insert("b", [100], [0])
        found.begin(path, 0, [Invested(0, promised)], 0)
        for number in range(requests):
            found.begin(path, int(number < uses), [], 0)
        assert (choose(found, [], [0]) == [0]) is believed
