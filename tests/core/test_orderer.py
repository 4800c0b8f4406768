"""The contract of the orderer: always a permutation, what is cached first, the same in every process and scope."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.inside import scopes_of
from support.orders import (
    MOVES,
    OPTIONS,
    REQUESTS,
    SEARCHES,
    STREAMS,
    check_idle,
    check_permutation,
    check_sound,
    documents,
    ids,
    serve,
    strict,
)

from ragorder import History, Lengths, Orderer
from ragorder.common.degraded import DegradedWarning
from ragorder.trie.histories import Segment

BLOCK = 16


class TestPermutation:
    @given(OPTIONS, st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=7), max_size=20), st.data())
    def test_always_a_permutation_of_the_callers_own_objects(
        self, options: dict[str, Any], stream: list[list[str]], data: st.DataObject
    ) -> None:
        orderer = strict(**options)
        for number, request in enumerate(stream):
            retrieved = documents(request)
            copy = list(retrieved)
            ordering = orderer.order(retrieved, waiting=[documents(later) for later in stream[number + 1 : number + 3]])
            assert retrieved == copy and all(one is other for one, other in zip(retrieved, copy, strict=True))
            assert ordering.documents is not retrieved
            check_permutation(ordering, retrieved)
            end = data.draw(st.sampled_from(["confirm", "discard", "confirm nothing cached", "forget"]))
            if end.startswith("confirm"):
                ordering.confirm(0 if "nothing" in end else None)
            elif end == "discard":
                ordering.discard()
        if stream:
            check_sound(orderer)

    @given(st.lists(st.lists(st.sampled_from(["a", ("a", 1), ("a", 2), (("a", 1), 1)]), max_size=6), max_size=6))
    @example([["a", "a", ("a", 2), ("a", 1)]] * 2)
    def test_keys_of_any_shape(self, stream: list[list[Any]]) -> None:
        orderer = strict(key=lambda key: key, tokens=lambda key: 32)
        for retrieved in stream:
            check_permutation(orderer.order(retrieved), retrieved)

    def test_documents_may_come_from_a_generator(self) -> None:
        orderer = strict()
        ordering = orderer.order((document for document in documents("cab")), waiting=[iter(documents("ab"))])
        assert sorted(ids(ordering)) == ["a", "b", "c"]


class TestOrdering:
    def test_the_first_request_keeps_retrieval_order(self) -> None:
        ordering = strict().order(documents("cab"))
        assert (ids(ordering), ordering.prefix_documents, ordering.cached_tokens) == ("cab", 0, 0)
        assert (ordering.fallback, ordering.index, ordering.moves) == (False, 0, (False, False, False, 0))

    @pytest.mark.parametrize("search", SEARCHES)
    def test_what_was_served_before_comes_first(self, search: str) -> None:
        orderer = strict(search=search, prefix_tokens=64)
        serve(orderer, "abc")
        ordering = orderer.order(documents("cxba"))
        assert ids(ordering) == "abcx"
        assert (ordering.prefix_documents, ordering.cached_tokens) == (3, 64 + 96)
        assert list(ordering.permutation) == [3, 2, 0, 1]

    def test_a_request_aligns_with_one_that_is_still_in_flight(self) -> None:
        orderer = strict()
        orderer.order(documents("abc"))
        assert ids(orderer.order(documents("cxba"))) == "abcx"

    def test_discard_leaves_what_others_use_and_nothing_else(self) -> None:
        orderer = strict()
        failing, other = orderer.order(documents("abc")), orderer.order(documents("bad"))
        failing.discard()
        assert ids(orderer.order(documents("dcba"))) == "abdc"
        other.confirm()
        orderer = strict()
        for ordering in [orderer.order(documents("abc")), orderer.order(documents("abd"))]:
            ordering.discard()
        assert orderer.order(documents("ba")).cached_tokens == 0

    @pytest.mark.parametrize("ends", ["cc", "dd", "cd", "dc", "cdcd", "ddcc"])
    def test_confirm_and_discard_twice_and_after_each_other(self, ends: str) -> None:
        orderer = strict(capacity_tokens=1_000)
        serve(orderer, "abc")
        ordering = orderer.order(documents("abd"))
        for end in ends:
            ordering.confirm() if end == "c" else ordering.discard()
            check_idle(orderer)
        held = orderer.order(documents("abd")).cached_tokens
        assert held == (96 if ends[0] == "c" else 64)

    @pytest.mark.parametrize("served", [True, False])
    def test_confirm_and_discard_after_many_other_requests(self, served: bool) -> None:
        orderer = strict(capacity_tokens=1_000, max_nodes=50)
        late = orderer.order(documents("abc"))
        rng = random.Random(0)
        for _ in range(1_200):
            orderer.order(documents(rng.sample("defghijklmnop", 5))).confirm()
        late.confirm(32) if served else late.discard()
        check_idle(orderer)

    def test_a_report_of_the_engine_corrects_what_is_predicted(self) -> None:
        orderer = strict()
        serve(orderer, "ab", "cd", "ef")
        ordering = orderer.order(documents("cd"))
        assert ordering.cached_tokens == 64
        ordering.confirm(cached_tokens=0)
        assert orderer.order(documents("ab")).cached_tokens == 0
        assert orderer.order(documents("ef")).cached_tokens == 64
        assert orderer.order(documents("cd")).cached_tokens == 64

    def test_waiting_requests_decide_the_order_of_the_rest_and_are_not_in_flight(self) -> None:
        orderer = strict()
        assert ids(orderer.order(documents("abcde"), waiting=[documents("dbx"), documents("byd")])) == "bdace"
        assert orderer.order(documents("xy")).cached_tokens == 0

    @pytest.mark.parametrize(
        ("options", "expected", "cost"),
        [
            ({}, "abcd", 0),
            ({"keep_first": 1}, "dcba", 96),
            ({"keep_last": 1}, "abcd", 0),
            ({"max_displacement": 0}, "dcba", 96),
            ({"max_displacement": 2}, "dcba", 96),
            ({"max_displacement": 3}, "abcd", 0),
        ],
        ids=str,
    )
    def test_guards_hold_and_their_cost_is_reported(self, options: dict[str, Any], expected: str, cost: int) -> None:
        """`abc` is cached and rank order is `dcba`."""
        orderer = strict(moves="prefix", **options)
        orderer.record(documents("abc"))
        ordering = orderer.order(documents("dcba"))
        assert (ids(ordering), ordering.guard_cost_tokens) == (expected, cost)

    def test_the_cost_of_a_guard_is_what_the_free_order_would_have_had_more(self) -> None:
        guarded, free = strict(keep_first=1, moves="prefix"), strict(moves="prefix")
        for orderer in (guarded, free):
            serve(orderer, "abcd", "xab")
        one, other = guarded.order(documents("xdcba")), free.order(documents("xdcba"))
        assert ids(one)[0] == "x"
        assert (one.cached_tokens, other.cached_tokens) == (96, 128)
        assert (one.guard_cost_tokens, other.guard_cost_tokens) == (32, 0)


class TestAnOrderThatIsGiven:
    """`permutation`: an earlier turn of a conversation goes as it went."""

    @pytest.mark.parametrize("moves", ["earned", "free", "prefix"])
    def test_is_sent_and_counted_in_any_cache(self, moves: Any) -> None:
        orderer = strict(moves=moves, capacity_tokens=100_000)
        serve(orderer, "abcde")
        for found in (0, 5):
            ordering = orderer.order(documents("abcde"), history=History(sent=[4, 2, 0, 1, 3]))
            assert (ids(ordering), ordering.prefix_documents) == ("ecabd", found)
            ordering.confirm()
        # Others find it, too.
        assert ids(orderer.order(documents("cxe"))) == "ecx"

    @pytest.mark.parametrize("earlier", [[], [Segment("told", 40)]], ids=["first turn", "later turn"])
    def test_holds_with_and_without_a_history(self, earlier: list[Segment]) -> None:
        orderer, history = strict(), History(earlier, sent=(2, 0, 1))
        assert serve(orderer, "abc", history=history) == "cab"
        assert orderer.order(documents("abc"), history=history).prefix_documents == 3

    @pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 1], [1, 2, 3], [0, 1, 2, 3]])
    def test_that_is_no_permutation_keeps_retrieval_order(self, wrong: list[int]) -> None:
        with pytest.raises(ValueError, match="each rank"):
            strict().order(documents("abc"), history=History(sent=wrong))
        with pytest.warns(DegradedWarning, match="ValueError"):
            assert ids(Orderer().order(documents("abc"), history=History(sent=wrong))) == "abc"


class TestPreview:
    @given(STREAMS, OPTIONS, st.lists(st.integers(0, 3), max_size=20), st.data())
    def test_preview_is_what_order_does_next_and_changes_nothing(
        self, stream: list[list[str]], options: dict[str, Any], previews: list[int], data: st.DataObject
    ) -> None:
        plain, previewed = strict(**options), strict(**options)
        for request, count in zip(stream, [*previews, *[1] * len(stream)], strict=False):
            for _ in range(count):
                other = data.draw(REQUESTS)
                assert sorted(each.id for each in previewed.preview(documents(other))) == sorted(other)
            waiting = [documents(each) for each in data.draw(st.lists(REQUESTS, max_size=2))]
            predicted = "".join(each.id for each in previewed.preview(documents(request), waiting=waiting))
            expected, ordering = (each.order(documents(request), waiting=waiting) for each in (plain, previewed))
            assert predicted == ids(ordering) == ids(expected)
            assert ordering.cached_tokens == expected.cached_tokens
            if data.draw(st.booleans()):
                expected.confirm()
                ordering.confirm()
        assert plain.tree_size == previewed.tree_size

    def test_a_scope_that_is_looked_at_is_not_made(self) -> None:
        orderer = strict(prefix_tokens=16)
        orderer.preview(documents("ab"), scope="new")
        assert not orderer.holds_prefix(scope="new") and not scopes_of(orderer)
        orderer.order(documents("ab"), scope="new", lengths=Lengths(prefix=160)).confirm()
        assert orderer.order(documents("ab"), scope="new").cached_tokens == 160 + 64

    def test_the_callers_own_objects_each_as_often_as_given(self) -> None:
        a, b = documents("ab")
        given = [a, b, a]
        assert list(map(id, strict().preview(given))) == list(map(id, given))


class TestCold:
    """Requests without a cached document."""

    HISTORY = (*["b"] * 20, *["x"] * 40)

    @pytest.mark.parametrize(("moves", "expected"), [("free", "ba"), ("prefix", "ab"), ("earned", "ab")])
    def test_are_laid_out_for_the_future_or_as_ranked(self, moves: str, expected: str) -> None:
        orderer = strict(moves=moves, capacity_tokens=2 * BLOCK)
        serve(orderer, *self.HISTORY)
        assert ids(orderer.order(documents("ab"))) == expected

    def test_with_a_cached_document_the_rest_is_arranged(self) -> None:
        orderer = strict(moves="free")
        for request in (*["xb"] * 20, *["x"] * 40, *["y"] * 4):
            orderer.order(documents(request)).discard()
        orderer.order(documents("x")).confirm()
        ordering = orderer.order(documents("abx"))
        assert ordering.cached_tokens == 32
        assert ids(ordering) == "xba"


class TestHoldsPrefix:
    def test_from_the_first_request_on(self) -> None:
        orderer = strict(prefix_tokens=40)
        assert not orderer.holds_prefix()
        orderer.order(documents("ab")).discard()
        assert not orderer.holds_prefix(), "the request failed"
        ordering = orderer.order([])
        assert orderer.holds_prefix(), "it is being computed"
        ordering.confirm()
        assert orderer.holds_prefix() and not orderer.holds_prefix(scope="another tenant")
        assert strict(prefix_tokens=15, block_size=16).holds_prefix(), "no block holds any of it"


SCRIPT = """
import hashlib, json
from ragorder import Orderer
from ragorder.eval.data.workloads import make_workload
orders = []
for search in ("best", "greedy"):
    for moves in ("earned", "free", "prefix", "cohort", "queue"):
        workload = make_workload("mix8", 3)
        requests = [[workload.documents[number] for number in ranking] for ranking in workload.rankings[:120]]
        orderer = Orderer(search=search, moves=moves, capacity_tokens=8_000, prefix_tokens=64, strict=True)
        for number, request in enumerate(requests[:60]):
            ordering = orderer.order(request, waiting=requests[number + 1 : number + 9])
            orders.append((list(ordering.permutation), ordering.cached_tokens))
            ordering.discard() if number % 7 == 0 else ordering.confirm()
        for ordering in orderer.order_batch(requests[60:]):
            orders.append((ordering.index, list(ordering.permutation), ordering.cached_tokens))
        for ordering in orderer.order_batch(requests, max_wait=20):
            orders.append((ordering.index, list(ordering.permutation), ordering.cached_tokens))
print(len(orders), hashlib.sha256(json.dumps(orders).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_in_every_process(python: Any) -> None:
    outputs = [python("-c", SCRIPT, timeout=500, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "4242")]
    assert outputs[0].startswith(f"{2 * 5 * 240} ")
    assert len(set(outputs)) == 1


class TestScopes:
    @settings(deadline=None)
    @given(
        STREAMS,
        st.lists(st.tuples(st.integers(0, 19), REQUESTS, st.sampled_from(["y", "z", None])), max_size=15),
        st.sampled_from(MOVES),
    )
    def test_nothing_that_others_do_shows_in_a_scope(
        self, stream: list[list[str]], foreign: list[tuple[int, list[str], str | None]], moves: str
    ) -> None:
        def seen(foreign: list[tuple[int, list[str], str | None]]) -> Iterator[tuple[str, int, int, int]]:
            # The engine has room for all of them.
            orderer = strict(capacity_tokens=40_000, moves=moves)
            for number, request in enumerate(stream):
                for place, others, scope in foreign:
                    if place == number:
                        ordering = orderer.order(documents(others), scope=scope, waiting=[documents("hgfedcba")])
                        ordering.confirm(0) if place % 2 else ordering.discard()
                ordering = orderer.order(documents(request), scope="mine")
                yield ids(ordering), ordering.cached_tokens, ordering.prefix_documents, ordering.guard_cost_tokens
                ordering.confirm()

        assert list(seen(foreign)) == list(seen([]))

    def test_of_others_a_scope_sees_no_more_than_the_engine_shows_it(self) -> None:
        """What they have displaced is gone: neither which documents these were, nor in which order, plays a part."""

        def seen(foreign: str, scopes: str) -> list[tuple[str, int]]:
            orderer, results = strict(capacity_tokens=400), []
            for request in ["abc", "cab", "bcd", "dabc"]:
                for scope in scopes:
                    orderer.order(documents(foreign), scope=scope).confirm()
                ordering = orderer.order(documents(request), scope="mine")
                results.append((ids(ordering), ordering.cached_tokens))
                ordering.confirm()
            return results

        assert seen("efgh", "y") == seen("abcd", "y") == seen("dcba", "y")
        assert seen("efgh", "yz") != seen("", "yz")

    def test_a_batch_belongs_to_its_scope(self) -> None:
        orderer = strict()
        for ordering in orderer.order_batch([documents("abc"), documents("bcd")], scope="one"):
            ordering.confirm()
        assert orderer.order(documents("cba"), scope="other").cached_tokens == 0
        assert orderer.order(documents("cba"), scope="one").cached_tokens > 0

    def test_the_least_recently_used_scope_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 3)
        orderer = strict()
        for scope in [1, 2, 3, 1, 4]:
            serve(orderer, "ab", scope=scope)
        assert list(scopes_of(orderer)) == [3, 1, 4]
        assert orderer.order(documents("ba"), scope=1).cached_tokens == 64
        assert orderer.order(documents("ba"), scope=2).cached_tokens == 0

    def test_a_request_of_a_forgotten_scope_can_still_be_confirmed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 1)
        orderer = strict()
        ordering = orderer.order(documents("ab"), scope=1)
        orderer.order(documents("ab"), scope=2)
        ordering.confirm(0)
        ordering.discard()
        assert orderer.order(documents("ba"), scope=2).cached_tokens == 64
