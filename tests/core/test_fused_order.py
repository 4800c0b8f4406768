"""Orders for an engine that reuses documents from wherever it has computed them (FusionRAG)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Document, Orderer, Ordering
from ragorder.eval.data.workloads import make_workload
from ragorder.ordering import Reuse
from ragorder.scope.fused import FusedReuse
from ragorder.settings import Settings
from ragorder.trie.residency import Loads
from ragorder.trie.search import PricedPaths
from ragorder.trie.tree import KnowledgeTree, Node

DOCUMENTS = [Document(f"d{number}", f"d{number}", tokens=64) for number in range(12)]


@dataclass
class FusingEngine:
    """What the embedded engine does with a fused request, without a model or a limit of memory."""

    paths: set[tuple[str, ...]] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    all_copied: bool = False

    def serve(self, documents: Sequence[Document], exact_documents: int = 0) -> list[Reuse]:
        ids = tuple(document.id for document in documents)
        exact = 0
        while exact < len(ids) and ids[: exact + 1] in self.paths:
            exact += 1
        reuse: list[Reuse] = ["exact"] * exact
        first = max(exact, exact_documents)
        reuse += ["computed"] * (first - exact)
        reuse += ["fused" if self.all_copied or each in self.copies else "computed" for each in ids[first:]]
        kept = exact
        while kept < len(ids) and reuse[kept] == "computed":
            kept += 1
        self.paths.update(ids[: end + 1] for end in range(kept))
        self.copies.update(ids[:kept])
        return reuse


def fusing(**options: object) -> Orderer:
    return Orderer(reuse="fused", capacity_tokens=None, suffix_tokens=0, strict=True, **options)  # type: ignore[arg-type]


REQUESTS = st.lists(st.lists(st.sampled_from(range(12)), min_size=1, max_size=6, unique=True), max_size=40)


def ids(ordering: Ordering[Document]) -> str:
    return " ".join(document.id for document in ordering.documents)


@given(REQUESTS, st.sampled_from([{}, {"best": "first"}, {"best": "last"}, {"keep_first": 1}]))
def test_what_is_reused_is_what_the_engine_reuses(requests: list[list[int]], options: dict[str, Any]) -> None:
    orderer, engine = fusing(**options), FusingEngine()
    for numbers in requests:
        documents = [DOCUMENTS[number] for number in numbers]
        ordering = orderer.order(documents)
        assert sorted(ordering.permutation) == list(range(len(documents)))
        assert ordering.permutation[0] == 0 or "keep_first" not in options
        assert ordering.reuse == engine.serve(ordering.documents, ordering.exact_documents)
        assert ordering.prefix_documents == ordering.reuse.count("exact")
        assert ordering.documents_end == 64 * len(documents)
        ordering.confirm(ordering.cached_tokens, prompt_tokens=64 * len(documents))
        ordering.discard()
    assert orderer.tree_size == len(engine.paths)


@given(REQUESTS)
def test_so_it_is_if_all_have_copies_and_some_are_computed_anyway(requests: list[list[int]]) -> None:
    orderer, engine = fusing(copies="all", recompute=1.0), FusingEngine(all_copied=True)
    for numbers in requests:
        ordering = orderer.order([DOCUMENTS[number] for number in numbers])
        assert ordering.reuse == engine.serve(ordering.documents, ordering.exact_documents)
        ordering.confirm(ordering.cached_tokens)
    assert orderer.tree_size == len(engine.paths)


def test_documents_to_compute_follow_the_prefix_and_others_stay_as_ranked() -> None:
    orderer = fusing()
    orderer.order(DOCUMENTS[:3]).confirm()
    ordering = orderer.order([DOCUMENTS[number] for number in (2, 1, 5, 0, 6)])
    assert ids(ordering) == "d0 d1 d2 d5 d6"
    ordering.confirm()
    ordering = orderer.order([DOCUMENTS[number] for number in (6, 7, 5, 0, 2)])
    assert ids(ordering) == "d0 d7 d6 d5 d2"
    assert ordering.reuse == ["exact", "computed", "fused", "fused", "fused"]


@pytest.mark.parametrize(("best", "expected"), [("last", "d0 d2 d5 d7"), ("first", "d0 d7 d2 d5")])
def test_the_best_document_stands_last_though_it_is_computed_or_first_of_those_computed(
    best: str, expected: str
) -> None:
    orderer = fusing(best=best, best_tokens=0)
    for number in (2, 5, 0):
        orderer.order([DOCUMENTS[number]]).confirm()
    assert ids(orderer.order([DOCUMENTS[number] for number in (7, 2, 5, 0)])) == expected


def test_a_best_document_that_is_reused_is_never_before_one_to_compute() -> None:
    orderer = fusing(best="first")
    orderer.order(DOCUMENTS[:2]).confirm()
    ordering = orderer.order([DOCUMENTS[number] for number in (1, 5, 6)])
    assert ids(ordering) == "d5 d6 d1"
    assert ordering.reuse == ["computed", "computed", "fused"]


def test_after_a_build_all_others_are_reused() -> None:
    orderer = fusing(copies="all")
    ordering = orderer.order(DOCUMENTS[:5])
    assert ordering.reuse == ["fused"] * 5
    assert list(ordering.permutation) == list(range(5))
    assert orderer.tree_size == 0


def cost(reuse: Sequence[Reuse], documents: Sequence[Document], recompute: float) -> float:
    """Tokens computed."""
    shares = {"exact": 0.0, "fused": recompute, "computed": 1.0}
    return sum(shares[kind] * document.token_count for kind, document in zip(reuse, documents, strict=True))


def served(**options: object) -> tuple[float, int]:
    """Tokens that an engine computes of a workload's documents, and those found exact."""
    workload = make_workload("zipf10", 0, requests=1_500)
    orderer, engine = fusing(copies="all", **options), FusingEngine(all_copied=True)
    computed, exact = 0.0, 0
    for ranking in workload.rankings:
        ordering = orderer.order([workload.documents[number] for number in ranking])
        reuse = engine.serve(ordering.documents, ordering.exact_documents)
        assert ordering.reuse == reuse
        computed += cost(reuse, ordering.documents, 0.15)
        exact += reuse.count("exact")
        ordering.confirm(ordering.cached_tokens)
    return computed, exact


def test_documents_of_many_requests_become_exact_though_all_could_be_reused() -> None:
    """And all requests together compute less for it."""
    without, found_without = served(invest=False)
    computed, found = served()
    assert computed < 0.9 * without
    assert found > 1_000
    assert not found_without


def popular(orderer: Orderer) -> None:
    """Two hundred requests with d0 and something else each time, all discarded."""
    for number in range(200):
        orderer.order([Document(f"x{number}", f"x{number}", tokens=64), DOCUMENTS[0]]).discard()


def test_exact_documents_are_the_leading_ones_up_to_the_last_that_is_invested_in() -> None:
    orderer = fusing(copies="all", recompute=0.5)
    popular(orderer)
    ordering = orderer.order([DOCUMENTS[7], DOCUMENTS[1], DOCUMENTS[0]])
    assert ids(ordering) == "d0 d7 d1"
    assert (ordering.exact_documents, ordering.reuse) == (1, ["computed", "fused", "fused"])
    ordering.confirm()
    ordering = orderer.order([DOCUMENTS[8], DOCUMENTS[1], DOCUMENTS[0]])
    assert (ordering.exact_documents, ordering.reuse) == (0, ["exact", "fused", "fused"])


def test_a_preview_places_documents_as_the_order_does() -> None:
    orderer = fusing(copies="all", recompute=0.5)
    popular(orderer)
    documents = [DOCUMENTS[5], DOCUMENTS[1], DOCUMENTS[0]]
    previewed = orderer.preview(documents)
    assert previewed[0] is DOCUMENTS[0]
    assert previewed == orderer.order(documents).documents


def test_guards_hold_documents_that_would_be_computed_first() -> None:
    orderer = fusing(copies="all", recompute=0.5, keep_first=1)
    popular(orderer)
    ordering = orderer.order([DOCUMENTS[5], DOCUMENTS[0]])
    assert ordering.documents[0] is DOCUMENTS[5]
    # After a document that nothing else contains it would be of no use.
    assert (ordering.exact_documents, ordering.reuse) == (0, ["fused", "fused"])


@pytest.mark.parametrize(
    "guard",
    [{"keep_first": 1}, {"keep_last": 1}, {"max_displacement": 3}, {"keep_groups": True}, {"max_gain_lost": 0.3}],
    ids=str,
)
def test_guards_hold_while_moves_are_earned_though_only_documents_to_compute_are_moved(guard: dict[str, Any]) -> None:
    rng = random.Random(1)
    orderer = Orderer(reuse="fused", capacity_tokens=20_000, strict=True, **guard)
    documents = [Document(f"d{number}", "", tokens=200) for number in range(200)]
    for _ in range(20):
        topic = rng.sample(documents, 8)
        for _ in range(12):
            asked = rng.sample(topic, 5)
            ordering = orderer.order(asked)
            assert sorted(each.id for each in ordering.documents) == sorted(each.id for each in asked)
            ordering.confirm()


def test_batches_invest_as_well() -> None:
    orderer = fusing(copies="all", recompute=0.5)
    popular(orderer)
    orderings = list(orderer.order_batch([[DOCUMENTS[place], DOCUMENTS[0]] for place in (3, 4, 5)]))
    assert [ordering.documents[0].id for ordering in orderings] == ["d0"] * 3
    assert [ordering.exact_documents for ordering in orderings] == [1, 0, 0]


def test_what_the_engine_has_evicted_is_computed() -> None:
    orderer = Orderer(reuse="fused", capacity_tokens=4 * 64, suffix_tokens=0, strict=True)
    orderer.order(DOCUMENTS[:4]).confirm()
    orderer.order(DOCUMENTS[4:8]).confirm()
    assert orderer.order(DOCUMENTS[:4]).reuse == ["computed"] * 4


def test_an_exact_engine_fuses_nothing() -> None:
    orderer = Orderer(capacity_tokens=None, strict=True)
    orderer.order(DOCUMENTS[:3]).confirm()
    ordering = orderer.order([DOCUMENTS[2], DOCUMENTS[9], DOCUMENTS[0]])
    assert ordering.fused == ()
    assert ordering.reuse == ["exact", "computed", "computed"]


class OnDisk:
    """A documents' path that lies on the disk, and everything else on the device."""

    def __init__(self, path: Sequence[Node]) -> None:
        self.path = set(path)

    def loads(self, node: Node) -> Loads:
        return Loads(0, node.blocks if node in self.path else 0)

    def serve(self, *_: object) -> None: ...


def held(*paths: str) -> tuple[KnowledgeTree, Sequence[Node]]:
    """A tree that holds these paths of 64 tokens a document, and the first of them."""
    tree = KnowledgeTree(16, indexed=True)
    found = [tree.insert(path, [64] * len(path), range(len(path))) for path in paths]
    for stamp, node in enumerate([node for path in found for node in path], 1):
        node.missing, node.stamp = 0, stamp
    return tree, found[0]


@pytest.mark.parametrize(("load_s", "followed"), [(0.1, 2), (0.5, 0)])
def test_a_path_is_followed_if_its_loads_cost_less_than_computing(load_s: float, followed: int) -> None:
    """A token computed takes a second, and a fifth of those reused are."""
    tree, on_disk = held("ab", "ca", "db")
    places = OnDisk(on_disk)
    fused = FusedReuse(Settings(reuse="fused", recompute=0.2), tree)
    rest = fused.rest(["a", "b"], [64, 64], places)
    assert rest.loads == {"a": (0, 0), "b": (0, 0)}
    assert rest.new_tokens(0) == pytest.approx(25.6)
    assert rest.new_tokens(64) == pytest.approx(12.8)
    paths = PricedPaths(100, lambda _, new, host, disk: new + load_s * disk, places.loads)
    assert paths.improve(on_disk[-1], tree, {"a": 0, "b": 1}, rest).end == 64 * followed


def test_what_lies_on_the_disk_alone_is_loaded_either_way() -> None:
    tree, path = held("ab")
    places = OnDisk(path)
    rest = FusedReuse(Settings(reuse="fused", recompute=0.2), tree).rest(["a", "b", "c"], [64, 64, 64], places)
    assert rest.loads == {"a": (0, 64), "b": (0, 64)}
    assert rest.new_tokens(128) == 64
    paths = PricedPaths(100, lambda _, new, host, disk: new + 100 * disk, places.loads)
    assert paths.improve(path[-1], tree, {"a": 0, "b": 1, "c": 2}, rest) is path[-1]


def test_most_of_a_zipf_workload_is_reused() -> None:
    workload = make_workload("zipf10", 0, requests=600)
    reused = {}
    for reuse in ("exact", "fused"):
        orderer = Orderer(reuse=reuse, capacity_tokens=None, strict=True)  # type: ignore[arg-type]
        tokens = 0
        for ranking in workload.rankings:
            ordering = orderer.order([workload.documents[number] for number in ranking])
            kinds = zip(ordering.documents, ordering.reuse, strict=True)
            tokens += sum(document.token_count for document, kind in kinds if kind != "computed")
            ordering.confirm()
        reused[reuse] = tokens
    assert reused["fused"] > 1.5 * reused["exact"]


def test_estimated_lengths_are_learnt_from_whole_prompts() -> None:
    """Although only the exact documents are in the tree."""
    documents = [Document(f"d{number}", "x" * (200 + 40 * number)) for number in range(12)]
    orderer = fusing(prefix_tokens=40)

    def served(turn: int) -> tuple[int, int]:
        ordering = orderer.order([documents[(5 * turn + step) % 12] for step in range(1 + turn % 6)])
        true = 40 + round(1.6 * sum(document.token_count for document in ordering.documents))
        ordering.confirm(prompt_tokens=true + 12)
        return ordering.documents_end, true

    first = [served(turn) for turn in range(40)]
    assert all(predicted < true for predicted, true in first[:6])
    assert "fused" in orderer.order(documents[:6]).reuse
    assert all(abs(predicted - true) <= 0.05 * true for predicted, true in map(served, range(40, 60)))
