"""The contract of the orderer: always a permutation, never an exception, the same in every process, bounded."""

from __future__ import annotations

import gc
import logging
import random
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.inside import scopes_of
from support.rings import examples, grid, length
from support.waiting import counted_lines

from ragorder import Document, History, Lengths, Orderer, Ordering
from ragorder.common.degraded import DegradedWarning
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import settings_of
from ragorder.eval.engines.sim import SimEngine
from ragorder.scope.scopes import MAX_NODES
from ragorder.trie.histories import Segment

BLOCK = 16
SEARCHES = ["best", "greedy"]
MOVES = ["earned", "free", "prefix", "cohort", "queue"]
GUARDS = [{"keep_first": 3}, {"keep_last": 3}, {"max_displacement": 5}, {"max_displacement": 20_000}]

REQUESTS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)
STREAMS = st.lists(REQUESTS, max_size=20)
OPTIONS = st.fixed_dictionaries(
    {
        "capacity_tokens": st.sampled_from([None, 1, 100, 400, 100_000]),
        "block_size": st.sampled_from([1, 16]),
        "prefix_tokens": st.sampled_from([0, 40]),
        "search": st.sampled_from(SEARCHES),
        "moves": st.sampled_from(MOVES),
        "residency": st.sampled_from(["lru", "none"]),
        "keep_first": st.integers(0, 2),
        "max_displacement": st.none() | st.integers(0, 3),
        "keep_groups": st.booleans(),
        "max_nodes": st.sampled_from([3, 100_000]),
        "best": st.sampled_from(["any", "first", "last"]),
        "best_tokens": st.sampled_from([0, 32, 1000]),
    }
).map(lambda options: options | {"keep_first": 0} if options["best"] == "last" else options)


def documents(ids: Sequence[str], tokens: int = 32) -> list[Document]:
    """Fresh documents with these ids."""
    return [Document(id, f"text of {id}", tokens=tokens) for id in ids]


def ids(ordering: Ordering[Document]) -> str:
    return "".join(document.id for document in ordering.documents)


def strict(*, max_nodes: int = MAX_NODES, **options: Any) -> Orderer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragorder.scope.scopes.MAX_NODES", max_nodes)
        return Orderer(strict=True, **options)


def serve(orderer: Orderer, *requests: Sequence[str], **options: Any) -> str:
    """Serve requests one after another; the order of the last one's documents."""
    last = ""
    for request in requests:
        ordering = orderer.order(documents(request), **options)
        ordering.confirm()
        last = ids(ordering)
    return last


def check_permutation(ordering: Ordering[Any], retrieved: Sequence[Any]) -> None:
    """The caller's own objects, each as often as it was retrieved, and `permutation` says which stands where."""
    assert sorted(ordering.permutation) == list(range(len(retrieved)))
    assert len(ordering.documents) == len(retrieved)
    assert all(placed is retrieved[rank] for placed, rank in zip(ordering.documents, ordering.permutation, strict=True))
    assert 0 <= ordering.prefix_documents <= len(retrieved)
    assert ordering.cached_tokens >= 0
    assert ordering.guard_cost_tokens >= 0


def check_tree(orderer: Orderer, scope: object = None, *, idle: bool = True) -> None:
    residency = scopes_of(orderer)[scope].mirror
    tree = residency.tree
    nodes = list(tree.walk())
    assert tree.size == len(nodes) - 1
    for node in nodes:
        assert 0 <= node.missing <= node.blocks
        assert not (node.missing and node.children)
        assert node.leases >= 0
        assert not (idle and node.leases)
    held = sum(node.blocks - node.missing for node in nodes)
    assert held <= residency.used_blocks <= residency.pool.capacity_blocks


class TestPermutation:
    @given(OPTIONS, STREAMS, st.data())
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
            check_tree(orderer, idle=False)

    @given(OPTIONS, st.lists(st.lists(st.sampled_from("abc"), max_size=7), max_size=8))
    def test_duplicates_keep_their_number(self, options: dict[str, Any], stream: list[list[str]]) -> None:
        orderer = strict(**options)
        for request in stream:
            retrieved = documents(request)
            check_permutation(orderer.order(retrieved, waiting=[retrieved]), retrieved)

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

    def test_discard_leaves_what_others_use(self) -> None:
        orderer = strict()
        failing, other = orderer.order(documents("abc")), orderer.order(documents("bad"))
        failing.discard()
        assert ids(orderer.order(documents("dcba"))) == "abdc"
        other.confirm()

    def test_when_all_that_shared_are_discarded_nothing_counts_as_cached(self) -> None:
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
            check_tree(orderer)
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
        check_tree(orderer)

    def test_a_report_of_the_engine_corrects_what_is_predicted(self) -> None:
        orderer = strict()
        serve(orderer, "ab", "cd", "ef")
        ordering = orderer.order(documents("cd"))
        assert ordering.cached_tokens == 64
        ordering.confirm(cached_tokens=0)
        assert orderer.order(documents("ab")).cached_tokens == 0
        assert orderer.order(documents("ef")).cached_tokens == 64
        assert orderer.order(documents("cd")).cached_tokens == 64

    def test_waiting_requests_decide_the_order_of_the_rest(self) -> None:
        ordering = strict().order(documents("abcde"), waiting=[documents("dbx"), documents("byd")])
        assert ids(ordering) == "bdace"

    def test_waiting_requests_are_not_in_flight(self) -> None:
        orderer = strict()
        orderer.order(documents("a"), waiting=[documents("bc")]).confirm()
        assert orderer.order(documents("cb")).cached_tokens == 0

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

    def test_one_document_larger_than_the_cache(self) -> None:
        orderer = strict(capacity_tokens=320, prefix_tokens=32)
        for _ in range(3):
            retrieved = [Document("huge", "x", tokens=100_000), *documents("ab")]
            ordering = orderer.order(retrieved)
            check_permutation(ordering, retrieved)
            assert ordering.cached_tokens <= 320
            ordering.confirm()
            check_tree(orderer)
        serve(orderer, "ab")
        assert orderer.order(documents("ba")).cached_tokens == 32 + 64


class TestBestPlace:
    """Where the most relevant document stands: first or last, unless that costs too many cached tokens."""

    LISTS = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1, max_size=6)

    @pytest.mark.parametrize(("best", "expected"), [("last", "bcdea"), ("first", "abcde"), ("any", "abcde")])
    def test_of_documents_that_are_not_cached(self, best: Any, expected: str) -> None:
        assert serve(strict(best=best), "xyz", "abcde") == expected

    @given(st.sampled_from(["first", "last"]), st.sampled_from(MOVES), STREAMS, LISTS)
    def test_is_its_own_at_any_price(self, best: Any, moves: str, earlier: list[list[str]], request: list[str]) -> None:
        orderer = strict(best=best, best_tokens=1_000_000, moves=moves)
        serve(orderer, *earlier)
        ordering = orderer.order(documents(request), waiting=[*map(documents, earlier)])
        assert ordering.permutation[0 if best == "first" else -1] == 0

    @pytest.mark.parametrize(
        ("best", "best_tokens", "expected"),
        [
            ("last", 0, "abc"),
            ("last", 63, "abc"),
            ("last", 64, "acb"),
            ("first", 95, "abc"),
            ("first", 96, "bca"),
        ],
    )
    def test_is_weighed_against_the_cached_tokens(self, best: Any, best_tokens: int, expected: str) -> None:
        """`abc` is cached, 32 tokens each, and rank order is `bca`: last, its place costs two of them, first all."""
        orderer = strict(best=best, best_tokens=best_tokens, moves="prefix")
        orderer.record(documents("abc"))
        assert ids(orderer.order(documents("bca"))) == expected

    def test_what_follows_a_prefix_that_holds_the_best_has_the_next_best_last(self) -> None:
        orderer = strict(best="last", best_tokens=0)
        serve(orderer, "ba")
        assert serve(orderer, "bacd") == "abdc"

    @given(st.sampled_from(["first", "last"]), st.sampled_from([0, 32, 1000]), STREAMS, LISTS)
    def test_a_recurring_list_makes_the_same_prompt_and_is_found_whole(
        self, best: Any, best_tokens: int, between: list[list[str]], request: list[str]
    ) -> None:
        orderer = strict(best=best, best_tokens=best_tokens, block_size=1, capacity_tokens=None)
        first = serve(orderer, request)
        serve(orderer, *between)
        again = orderer.order(documents(request))
        assert again.cached_tokens == 32 * len(request)
        assert ids(again) == first or set(request) in map(set, between)

    @pytest.mark.parametrize(
        ("guard", "expected"),
        [
            ({"keep_last": 2}, "cdeba"),
            ({"max_displacement": 0}, "abcde"),
            ({"max_displacement": 2}, "bcade"),
            ({"max_gain_lost": 0.0}, "abcde"),
            ({"keep_groups": True}, "abcde"),
        ],
        ids=str,
    )
    def test_guards_hold(self, guard: dict[str, Any], expected: str) -> None:
        assert serve(strict(best="last", group=lambda _: "one", **guard), "abcde") == expected

    def test_a_guard_that_keeps_it_from_its_place_costs_no_cached_tokens(self) -> None:
        orderer = strict(best="last", best_tokens=1000, max_displacement=1)
        orderer.record(documents("bac"))
        assert ids(orderer.order(documents("abc"))) == "bac"

    @pytest.mark.parametrize(("best_tokens", "expected"), [(0, {"xab", "xac"}), (32, {"xba", "xca"})])
    def test_a_batch_weighs_its_place_as_well(self, best_tokens: int, expected: set[str]) -> None:
        """Both requests have `a` as the best document."""
        batch = strict(best="last", best_tokens=best_tokens).order_batch(map(documents, ["axb", "axc"]))
        assert {ids(ordering) for ordering in batch} == expected

    @pytest.mark.parametrize(
        "make",
        [
            lambda **options: Orderer.for_cloud("anthropic", model="claude-opus-5", clock=lambda: 0.0, **options),
            lambda **options: strict(capacity_tokens=4_000, host_tokens=8_000, **options),
            lambda **options: strict(search="greedy", **options),
        ],
        ids=["cloud", "tiers", "greedy"],
    )
    def test_other_caches_and_searches_keep_it_too(self, make: Any) -> None:
        orderer, rng = make(best="last", best_tokens=1_000_000), random.Random(0)
        cached_tokens = 0
        for _ in range(60):
            ordering = orderer.order(documents(rng.sample("abcdefgh", 4), tokens=400))
            assert ordering.permutation[-1] == 0
            cached_tokens += ordering.cached_tokens
            ordering.confirm()
        assert orderer.fallbacks == 0
        assert cached_tokens > 0

    def test_in_a_conversation_it_is_next_to_the_question_too(self) -> None:
        orderer = strict(best="last")
        history = History([Segment("told", 40)], question=Segment("asked", 10))
        assert serve(orderer, "abc", history=history) == "bca"
        assert orderer.order(documents("abc"), history=history).prefix_documents == 3


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


class BoomError(Exception):
    pass


def raising(value: Any) -> Any:
    raise BoomError(f"SECRET in the text of {value!r}")


BROKEN: dict[str, dict[str, Any]] = {
    "key raises": {"key": raising},
    "tokens raises": {"tokens": raising},
    "key is unhashable": {"key": lambda document: [document.id]},
    "tokens are a string": {"tokens": lambda document: "200"},
    "tokens are None": {"tokens": lambda document: None},
    "tokens are negative": {"tokens": lambda document: -5},
    "tokens are very negative": {"tokens": lambda document: -(10**9)},
    "tokens are not a number": {"tokens": lambda document: float("nan")},
    "group raises": {"group": raising, "keep_groups": True},
    "group is unhashable": {"group": lambda document: [], "keep_groups": True},
}


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
            predicted = "".join(each.id for each in previewed.preview(documents(request)))
            expected, ordering = plain.order(documents(request)), previewed.order(documents(request))
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

    def test_preview_considers_waiting_requests(self) -> None:
        waiting = [documents("c"), documents("cd")]
        assert [each.id for each in strict().preview(documents("abc"), waiting=waiting)] == ["c", "a", "b"]
        assert ids(strict().order(documents("abc"), waiting=waiting)) == "cab"

    def test_the_callers_own_objects_each_as_often_as_given(self) -> None:
        a, b = documents("ab")
        given = [a, b, a]
        assert list(map(id, strict().preview(given))) == list(map(id, given))

    def test_order_never_raises(self) -> None:
        orderer = Orderer(key=lambda document: [])
        assert orderer.preview(["a", "b"]) == ["a", "b"] and orderer.fallbacks == 1


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

    def test_order_never_raises(self) -> None:
        orderer = Orderer(prefix_tokens=40)
        assert orderer.holds_prefix(scope=[]) and orderer.fallbacks == 1  # type: ignore[arg-type]


class TestNeverRaises:
    @pytest.mark.parametrize("broken", BROKEN)
    def test_an_error_leaves_retrieval_order_and_is_counted_or_is_raised_if_strict(self, broken: str) -> None:
        with pytest.raises((BoomError, TypeError, ValueError)):
            Orderer(strict=True, **BROKEN[broken]).order(documents("cab"))
        orderer = Orderer(**BROKEN[broken])
        for number in range(1, 4):
            retrieved = documents("cab")
            ordering = orderer.order(retrieved)
            check_permutation(ordering, retrieved)
            assert ids(ordering) == "cab"
            assert ordering.fallback
            assert (ordering.cached_tokens, ordering.prefix_documents) == (0, 0)
            assert orderer.fallbacks == number
            ordering.confirm(3)
            ordering.discard()
            assert orderer.fallbacks == number

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_batch_falls_back_to_retrieval_order(self, broken: str) -> None:
        orderer = Orderer(**BROKEN[broken])
        retrieved = [documents("cab"), [], documents("ba")]
        batch = orderer.order_batch(retrieved)
        assert sorted(batch.indices) == [0, 1, 2]
        for ordering in batch:
            check_permutation(ordering, retrieved[ordering.index])
            if retrieved[ordering.index]:
                assert list(ordering.permutation) == sorted(ordering.permutation)
                assert ordering.fallback
        assert orderer.fallbacks >= 1

    @pytest.mark.parametrize("broken", BROKEN)
    def test_one_bad_document_does_not_spoil_the_requests_after_it(self, broken: str) -> None:
        """The callable is wrong for the document `z` only."""
        options = dict(BROKEN[broken])
        for name, right in {"key": "key", "tokens": "token_count", "group": "id"}.items():
            if name in options:
                wrong = options[name]
                options[name] = lambda document, wrong=wrong, right=right: (
                    wrong(document) if document.id == "z" else getattr(document, right)
                )
        orderer = Orderer(capacity_tokens=2_000, **options)
        serve(orderer, "abc", "azb", "zab", "abc")
        check_tree(orderer)
        assert serve(orderer, "cba" if "keep_groups" not in options else "abc") == "abc"
        assert orderer.order(documents("abc")).cached_tokens == 96
        assert orderer.fallbacks == 2

    @pytest.mark.parametrize("waiting", [[["not a document"]], [3], [None]], ids=str)
    def test_waiting_requests_that_are_no_requests(self, waiting: Any) -> None:
        orderer = Orderer()
        ordering = orderer.order(documents("ba"), waiting=waiting)
        assert (ids(ordering), ordering.fallback, orderer.fallbacks) == ("ba", True, 1)

    @pytest.mark.parametrize("suffix_tokens", ["x", float("nan"), [], -100_000], ids=str)
    def test_nonsense_for_the_length_of_the_suffix(self, suffix_tokens: Any) -> None:
        orderer = Orderer(capacity_tokens=1_000)
        retrieved = documents("ba")
        check_permutation(orderer.order(retrieved, lengths=Lengths(suffix=suffix_tokens)), retrieved)
        serve(orderer, "ab", "abc", "xyz")
        check_tree(orderer, idle=False)

    def test_logged_once_and_without_a_word_of_the_documents(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        orderer = Orderer(key=raising)
        for _ in range(5):
            orderer.order([Document("id", "SECRET text")])
            list(orderer.order_batch([[Document("id", "SECRET text")]]))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert caplog.records[0].name.startswith("ragorder")
        assert "BoomError" in caplog.text
        assert "SECRET" not in caplog.text

    def test_an_error_inside_starts_the_scope_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer()
        serve(orderer, "abc")
        monkeypatch.setattr(type(scopes_of(orderer)[None].residency), "lease", raising)
        assert orderer.order(documents("cba")).fallback
        monkeypatch.undo()
        assert orderer.order(documents("cba")).cached_tokens == 0
        check_tree(orderer, idle=False)


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


LARGE = [Document(f"d{number}", "", tokens=10) for number in range(10_000)]


class TestTenThousandDocuments:
    @pytest.mark.parametrize(("search", "moves", "queue"), grid(list(product(SEARCHES, MOVES, [False, True])), 5))
    def test_ten_thousand_documents_in_one_request(self, search: str, moves: str, queue: bool) -> None:
        orderer = strict(search=search, moves=moves, capacity_tokens=1_000_000)
        shuffled = random.Random(0).sample(LARGE, len(LARGE))
        waiting = [LARGE[::step] for step in range(1, 9)] if queue else []
        for retrieved in (LARGE, shuffled, shuffled[:9_000]):
            ordering = orderer.order(retrieved, waiting=waiting)
            check_permutation(ordering, retrieved)
            ordering.confirm()

    @pytest.mark.parametrize(
        ("search", "options", "queue"),
        grid(list(product(SEARCHES, [*GUARDS, *({"moves": moves} for moves in MOVES)], [False, True])), 5),
    )
    def test_steps_grow_no_faster_than_documents(
        self, search: str, options: dict[str, Any], queue: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.scope.scope.SEARCH_BUDGET", 64)
        steps = []
        for count in (1_000, 4_000):
            orderer = strict(search=search, capacity_tokens=1_000_000, **options)
            waiting = [LARGE[:count:step] for step in range(1, 9)] if queue else []
            with counted_lines() as lines:
                for retrieved in (LARGE[:count], LARGE[:count][::-1]):
                    ordering = orderer.order(retrieved, waiting=waiting)
                    ordering.confirm()
            check_permutation(ordering, retrieved)
            steps += lines
        assert steps[1] <= 4 * 1.5 * steps[0]

    def test_steps_of_a_batch_grow_no_faster_than_documents(self) -> None:
        steps = []
        for count in (2_500, 10_000):
            orderer = strict(capacity_tokens=1_000_000)
            with counted_lines() as lines:
                batch = orderer.order_batch([LARGE[:count], LARGE[:count][::-1], LARGE[:count:2]])
            assert list(batch)[1].prefix_documents >= count // 2
            steps += lines
        assert steps[1] <= 4 * 1.5 * steps[0]


class TestMemory:
    @staticmethod
    def requests(count: int, corpus: int, seed: int = 0) -> Iterator[list[Document]]:
        """Fresh documents for each request, of Zipf popularity."""
        rng = random.Random(seed)
        weights = list(accumulate(1 / (rank + 1) for rank in range(corpus)))
        for _ in range(count):
            drawn = dict.fromkeys(rng.choices(range(corpus), cum_weights=weights, k=5))
            yield [Document(f"document {number}", f"text of {number}", tokens=20) for number in drawn]

    def test_a_node_takes_at_most_400_bytes(self) -> None:
        orderer = strict(capacity_tokens=100_000, moves="prefix", suffix_tokens=16)
        for retrieved in self.requests(200, 50_000, seed=1):
            orderer.order(retrieved).confirm()
        scopes_of(orderer).clear()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for retrieved in self.requests(length(6_000, 2_500), 50_000):
                orderer.order(retrieved).confirm()
            del retrieved
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        size = scopes_of(orderer)[None].tree.size
        assert size > 1_000
        assert (after - before) / size <= 400

    @pytest.mark.parametrize("end", ["confirm", "discard", "forget"])
    def test_does_not_grow(self, end: str) -> None:
        orderer = strict(capacity_tokens=20_000, prefix_tokens=64)
        sizes: list[dict[str, int]] = []
        count = length(20_000, 4_000)
        for number, retrieved in enumerate(self.requests(count, 40_000), 1):
            ordering = orderer.order(retrieved)
            if end != "forget":
                getattr(ordering, end)()
            if number % (count // 4) == 0:
                scope = scopes_of(orderer)[None]
                sizes.append(
                    {
                        "nodes": scope.tree.size,
                        "log": len(scope.mirror.pool.log),
                        "in flight": len(scope.mirror.pool.in_flight),
                        "remembered": len(scope.tail.fallback.uses.cohorts.masks),
                    }
                )
        blocks = 20_000 // BLOCK
        for size in sizes:
            assert size["nodes"] <= 2 * blocks
            assert size["log"] <= 2 * blocks + 2 * 1_024
            assert size["in flight"] <= 1_024
            assert size["remembered"] <= 16_384

    def test_holds_on_to_no_documents(self) -> None:
        class Heavy:
            alive = 0

            def __init__(self, id: str) -> None:
                self.id = id
                Heavy.alive += 1

            def __del__(self) -> None:
                Heavy.alive -= 1

        orderer = strict(key=lambda document: document.id, tokens=lambda document: 32)
        for number in range(50):
            orderer.order([Heavy(f"{number} {place}") for place in range(5)])
        gc.collect()
        assert Heavy.alive == 0


class Prompts:
    """Token ids of prompts: system prompt, documents, a question of its own."""

    def __init__(self, prefix_tokens: int) -> None:
        self.prefix_tokens = prefix_tokens
        self._first: dict[str, int] = {}
        self._questions = 0

    def documents(self, retrieved: Sequence[Document]) -> array[int]:
        prompt = array("q", range(-self.prefix_tokens, 0))
        for document in retrieved:
            first = self._first.setdefault(document.key, len(self._first) * 1_000_000)
            prompt.extend(range(first, first + document.token_count))
        return prompt

    def __call__(self, retrieved: Sequence[Document]) -> array[int]:
        self._questions += 1
        first = -10_000_000_000 - self._questions * 100
        return self.documents(retrieved) + array("q", range(first, first + 20))


def mirroring(engine: SimEngine, prefix_tokens: int, **options: Any) -> Orderer:
    options |= {"prefix_tokens": prefix_tokens, "suffix_tokens": 20 + engine.kept_output_tokens}
    return Orderer(settings_of(engine, strict=True, **options))


class TestNeverWorseThanRetrievalOrder:
    """Whatever the engine holds when a request comes: in our order at least as much of it is reused, to the token."""

    @staticmethod
    def check(orderer: Orderer, engine: SimEngine, prompts: Prompts, stream: Sequence[list[Document]]) -> int:
        won = 0
        for number, retrieved in enumerate(stream):
            ordering = orderer.order(retrieved, waiting=stream[number + 1 : number + 3])
            ours = engine.cached_tokens(prompts.documents(ordering.documents))
            retrieval = engine.cached_tokens(prompts.documents(retrieved))
            assert ours >= retrieval
            assert ours == ordering.cached_tokens
            won += ours > retrieval
            ordering.confirm(engine.generate(prompts(ordering.documents)).cached_tokens)
        return won

    @settings(max_examples=examples(150), deadline=None)
    @given(
        STREAMS,
        st.lists(st.integers(1, 60), min_size=8, max_size=8),
        st.none() | st.integers(1, 60),
        st.integers(0, 40),
        st.sampled_from(SEARCHES),
        st.sampled_from(MOVES),
    )
    def test_on_random_streams(
        self,
        stream: list[list[str]],
        lengths: list[int],
        blocks: int | None,
        prefix_tokens: int,
        search: str,
        moves: str,
    ) -> None:
        corpus = {id: Document(id, tokens=length) for id, length in zip("abcdefgh", lengths, strict=True)}
        engine = SimEngine(capacity_tokens=None if blocks is None else blocks * BLOCK)
        orderer = mirroring(engine, prefix_tokens, search=search, moves=moves)
        self.check(orderer, engine, Prompts(prefix_tokens), [[corpus[id] for id in request] for request in stream])

    @pytest.mark.parametrize(
        ("search", "name", "capacity_tokens"),
        grid(list(product(SEARCHES, ["paper", "paper-shuf", "zipf10"], [5_000, 30_000, None])), 4),
    )
    def test_on_workloads(self, search: str, name: str, capacity_tokens: int | None) -> None:
        workload = make_workload(name, 0, requests=150)
        stream = [[workload.documents[number] for number in ranking] for ranking in workload.rankings]
        engine = SimEngine(capacity_tokens=capacity_tokens)
        orderer = mirroring(engine, 64, search=search)
        assert self.check(orderer, engine, Prompts(64), stream) > 10


class TestBatch:
    @settings(deadline=None)
    @given(OPTIONS, STREAMS, STREAMS, st.none() | st.integers(0, 10))
    def test_every_request_once_each_a_permutation_within_its_wait(
        self, options: dict[str, Any], earlier: list[list[str]], stream: list[list[str]], max_wait: int | None
    ) -> None:
        orderer = strict(**options)
        serve(orderer, *earlier)
        retrieved = [documents(request) for request in stream]
        copy = [list(request) for request in retrieved]
        batch = orderer.order_batch(retrieved, max_wait=max_wait)
        orderings = list(batch)
        assert retrieved == copy
        assert sorted(ordering.index for ordering in orderings) == list(range(len(retrieved)))
        assert [ordering.index for ordering in orderings] == list(batch.indices)
        for place, ordering in enumerate(orderings):
            check_permutation(ordering, retrieved[ordering.index])
            if max_wait is not None:
                assert place - ordering.index <= max_wait
            if options["keep_first"] and len(ordering.permutation) >= options["keep_first"]:
                assert list(ordering.permutation[: options["keep_first"]]) == list(range(options["keep_first"]))
            ordering.confirm()
        if earlier or stream:
            check_tree(orderer)

    @given(STREAMS, st.integers(0, 3))
    def test_guards_hold_in_a_batch(self, stream: list[list[str]], limit: int) -> None:
        for ordering in strict(max_displacement=limit).order_batch(map(documents, stream)):
            assert all(abs(place - rank) <= limit for place, rank in enumerate(ordering.permutation))
        for ordering in strict(keep_last=1).order_batch(map(documents, stream)):
            assert ordering.permutation[-1:] in ([0], [])
        for ordering in strict(keep_groups=True, group=lambda document: "all").order_batch(map(documents, stream)):
            assert list(ordering.permutation) == sorted(ordering.permutation)

    @settings(deadline=None)
    @given(OPTIONS, STREAMS, STREAMS, st.none() | st.integers(0, 12))
    def test_never_finds_less_than_one_by_one(
        self, options: dict[str, Any], earlier: list[list[str]], stream: list[list[str]], max_wait: int | None
    ) -> None:
        found = []
        for batched in (False, True):
            orderer = strict(**options)
            serve(orderer, *earlier)
            requests = [documents(request) for request in stream]
            orderings = orderer.order_batch(requests, max_wait=max_wait) if batched else map(orderer.order, requests)
            total = 0
            for ordering in orderings:
                total += ordering.cached_tokens
                ordering.confirm()
            found.append(total)
        assert found[1] >= found[0]

    @settings(deadline=None)
    @given(OPTIONS, STREAMS, STREAMS)
    def test_no_wait_is_one_by_one(
        self, options: dict[str, Any], earlier: list[list[str]], stream: list[list[str]]
    ) -> None:
        one, other = strict(**options), strict(**options)
        for orderer in (one, other):
            serve(orderer, *earlier)
        requests = [documents(request) for request in stream]
        batch = one.order_batch(requests, max_wait=0)
        for number, request in enumerate(requests):
            taken, ordered = batch[number], other.order(request)
            assert taken.index == number
            assert (taken.permutation, taken.cached_tokens) == (ordered.permutation, ordered.cached_tokens)
            taken.confirm()
            ordered.confirm()

    def test_a_window_is_planned_on_the_cache_left_by_the_one_before(self) -> None:
        """Each set comes twice, in different windows."""
        requests = ["abcd", "efgh", "dcba", "hgfe", "badc", "ghef"]
        for max_wait in (None, *range(6)):
            orderings = list(strict(capacity_tokens=None).order_batch(map(documents, requests), max_wait=max_wait))
            assert sum(ordering.prefix_documents for ordering in orderings) == 4 * 4, max_wait

    @pytest.mark.parametrize(
        ("name", "max_wait"), grid(list(product(["paper-shuf", "mix8", "zipf10"], [None, 100, 50, 20, 5, 1])), 7)
    )
    def test_a_wait_saves_on_workloads(self, name: str, max_wait: int | None) -> None:
        """On the engine itself, and by more than the property requires: waiting gains something."""
        workload = make_workload(name, 0, requests=200)
        stream = [[workload.documents[number] for number in ranking] for ranking in workload.rankings[:200]]
        totals = []
        for batched in (True, False):
            engine, prompts = SimEngine(capacity_tokens=16_384), Prompts(64)
            orderer = mirroring(engine, 64)
            orderings = iter(orderer.order_batch(stream, max_wait=max_wait)) if batched else map(orderer.order, stream)
            totals.append(0)
            for ordering in orderings:
                cached_tokens = engine.generate(prompts(ordering.documents)).cached_tokens
                totals[-1] += cached_tokens
                ordering.confirm(cached_tokens)
        assert totals[0] > (1.1 if max_wait in (None, 100, 50, 20) else 1) * totals[1]

    def test_planning_leaves_the_orderer_as_it_is(self) -> None:
        planned, other = strict(capacity_tokens=400), strict(capacity_tokens=400)
        for orderer in (planned, other):
            serve(orderer, "abcd", "bcde", "abce")
        flying = planned.order(documents("acx")), other.order(documents("acx"))
        planned.order_batch(map(documents, ["dcb", "xyz", "abe", "zyx"]), max_wait=2)
        planned.order_batch(map(documents, ["dcb", "xyz", "abe", "zyx"]))
        for ordering in flying:
            ordering.confirm()
        for request in ("bcd", "axyz", "abcde"):
            one, two = planned.order(documents(request)), other.order(documents(request))
            assert (one.permutation, one.cached_tokens) == (two.permutation, two.cached_tokens)
            one.confirm()
            two.confirm()
        check_tree(planned)

    def test_a_negative_wait_is_an_error_of_the_caller(self) -> None:
        with pytest.raises(ValueError, match="max_wait"):
            Orderer().order_batch([documents("ab")], max_wait=-1)

    def test_an_empty_batch(self) -> None:
        batch = strict().order_batch([])
        assert (len(batch), list(batch), list(batch.indices)) == (0, [], [])
        with pytest.raises(IndexError):
            batch[0]

    def test_a_request_is_in_flight_only_once_it_is_taken(self) -> None:
        orderer = strict()
        batch = orderer.order_batch([documents("abc"), documents("xyz")])
        assert (len(batch), sorted(batch.indices), orderer.tree_size) == (2, [0, 1], 0)
        first = batch[0]
        assert orderer.tree_size == 3
        first.discard()
        assert orderer.tree_size == 0
        batch[1].confirm()
        assert orderer.tree_size == 3

    def test_taking_an_ordering_again_gives_the_same_one(self) -> None:
        orderer = strict()
        batch = orderer.order_batch([documents("abc"), documents("cbx"), documents("xyz")])
        once = list(batch)
        assert all(one is other for one, other in zip(once, batch, strict=True))
        assert batch[-1] is once[2] and batch[1] is once[1]
        assert batch[:2] == once[:2] and batch[::-1] == once[::-1] and batch[5:] == []
        assert once[0] in batch
        assert len(scopes_of(orderer).pool.in_flight) == 3
        for place in (3, -4):
            with pytest.raises(IndexError):
                batch[place]

    def test_what_is_already_cached_comes_first_and_is_extended(self) -> None:
        orderer = strict()
        serve(orderer, "klm", "abc")
        batch = orderer.order_batch(map(documents, ["xyz", "mlkx", "wxy", "cbaz"]))
        assert list(batch.indices)[:2] == [1, 3], "what is evicted first is served first"
        assert [ids(ordering)[:3] for ordering in batch[:2]] == ["klm", "abc"]

    def test_a_request_that_cannot_start_stays_in_retrieval_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer()
        batch = orderer.order_batch([documents("abc"), documents("cbx")])
        first = batch[0]
        monkeypatch.setattr(type(scopes_of(orderer)[None].residency), "lease", raising)
        second = batch[1]
        assert (second.fallback, second.index) == (True, batch.indices[1])
        assert list(second.permutation) == [0, 1, 2]
        monkeypatch.undo()
        first.confirm()
        assert orderer.fallbacks == 1
