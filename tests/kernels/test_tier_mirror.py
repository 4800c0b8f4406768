"""The mirror of an engine's tiers: which documents' KV they hold, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import key_in, room_of
from support.rings import examples

from ragorder.trie.mirror import MirroredTier, TieredPool, TieredResidency, TierMirror
from ragorder.trie.policies import POLICIES, History, Tier, make_policy
from ragorder.trie.profile import PrefillProfile
from ragorder.trie.residency import Lease, Loads, LRUResidency, TierLevel
from ragorder.trie.tree import KnowledgeTree, Node

BLOCK = 16
TOKENS = 32
"""Of each document: two blocks."""


class Scope:
    """A tree whose requests an engine serves; the system prompt has one block."""

    def __init__(self, pool: TieredPool, name: str = "tenant") -> None:
        self.tree = KnowledgeTree(BLOCK, BLOCK)
        self.residency = TieredResidency(self.tree, pool, name)

    def begin(
        self, documents: Sequence[str], suffix_tokens: int = 0, expected: Sequence[float] = (), tokens: int = TOKENS
    ) -> Lease:
        self.residency.refresh()
        path = self.tree.insert(documents, [tokens] * len(documents), range(len(documents)))
        lease = self.residency.lease(path, suffix_tokens)
        self.residency.serve(path, lease, lambda: expected)
        return lease

    def serve(self, documents: Sequence[str], **options: Any) -> int:
        """Returns the documents that should be cached."""
        lease = self.begin(documents, **options)
        cached = lease.cached_documents
        self.residency.release(lease)
        return cached

    def serve_each(self, documents: Sequence[str]) -> None:
        """Serve a request for each document."""
        for document in documents:
            self.serve(document)

    def loads(self, documents: str) -> list[Loads]:
        return [self.residency.loads(node) for node in path_of(self.tree, documents)[1:]]

    def held(self, documents: str) -> int:
        """Documents of the path that the engine holds."""
        node, count = self.tree.root, 0
        for document in documents:
            child = (node.children or {}).get(document)
            if child is None or child.missing or not child.stamp:
                break
            node, count = child, count + 1
        return count


class Engine(Scope):
    """One scope on tiers of so many documents each, the system prompt aside."""

    def __init__(
        self,
        device: int,
        host: int,
        disk: int,
        *,
        write_through: bool = False,
        policy: str = "lru",
        profile: PrefillProfile | None = None,
        max_nodes: int = 1000,
    ) -> None:
        tiers = [
            MirroredTier(place, documents * TOKENS + BLOCK, Tier(make_policy(policy), History(100)))
            for place, documents in zip(TierLevel, (device, host, disk), strict=True)
            if documents
        ]
        options = {} if profile is None else {"profile": profile}
        self.mirror = TierMirror(tiers, write_through=write_through, **options)
        sizes = [tier.capacity_tokens for tier in tiers]
        held = max(sizes) if write_through else sum(sizes)
        self.pool = TieredPool(self.mirror, held, BLOCK, max_nodes)
        super().__init__(self.pool)


def path_of(tree: KnowledgeTree, documents: Sequence[str]) -> list[Node]:
    path = [tree.root]
    for document in documents:
        path.append((path[-1].children or {})[document])
    return path


DEVICE, HOST, DISK = Loads(), Loads(host=2), Loads(disk=2)


@pytest.mark.parametrize("write_through", [True, False])
class TestWhereDocumentsAre:
    def test_a_tail_leaves_before_its_head(self, write_through: bool) -> None:
        engine = Engine(3, 9, 0, write_through=write_through)
        engine.serve("abc")
        engine.serve("d")
        assert engine.loads("abc") == [DEVICE, DEVICE, HOST]
        engine.serve("e")
        assert engine.loads("abc") == [DEVICE, HOST, HOST]

    def test_only_held_blocks_are_loaded(self, write_through: bool) -> None:
        engine = Engine(1, 9, 0, write_through=write_through)
        engine.serve_each("ab")
        (node,) = path_of(engine.tree, "a")[1:]
        engine.residency.truncate(node, 1)
        assert engine.residency.loads(node) == Loads(host=1)

    def test_question_and_answer_take_room(self, write_through: bool) -> None:
        engine = Engine(3, 9, 0, write_through=write_through)
        engine.serve("ab", suffix_tokens=TOKENS)
        engine.serve("c")
        assert engine.loads("ab") == [DEVICE] * 2, "the question went first"
        engine.serve("d")
        assert engine.loads("ab") == [DEVICE, HOST]

    def test_tenants_have_nodes_of_their_own_and_share_the_room(self, write_through: bool) -> None:
        engine = Engine(1, 9, 0, write_through=write_through)
        other = Scope(engine.pool, "other")
        engine.serve("a")
        assert other.serve("a") == 0
        assert engine.loads("a") == [HOST]
        assert other.loads("a") == [DEVICE]


@pytest.mark.parametrize("write_through", [True, False])
class TestWhatIsHeld:
    def test_what_no_tier_has_is_gone(self, write_through: bool) -> None:
        engine = Engine(1, 2 if write_through else 1, 0, write_through=write_through)
        engine.serve_each("abc")
        assert [engine.held(document) for document in "abc"] == [0, 1, 1]
        assert engine.tree.size == 2 and engine.pool.evicted_blocks == 2

    @pytest.mark.parametrize(("policy", "kept"), [("lru", 0), ("lfu", 1), ("gdsf", 1), ("pgdsf", 1), ("forecast", 1)])
    def test_the_tiers_policy_decides(self, write_through: bool, policy: str, kept: int) -> None:
        """What is used often stays longer than what was used last, but with LRU."""
        engine = Engine(1, 2, 0, write_through=write_through, policy=policy)
        engine.serve_each("aaaaaabcde")
        assert engine.held("a") == kept
        assert engine.serve("a") == kept

    def test_what_is_expensive_to_compute_stays(self, write_through: bool) -> None:
        """A token after 64 cached ones takes ten times as long here."""
        slow = PrefillProfile((0, 16, 64), (1, 1000), ((0.001, 1.0), (0.001, 1.0), (0.01, 10.0)))
        engine = Engine(2, 4, 0, write_through=write_through, policy="pgdsf", profile=slow)
        engine.serve("a")
        engine.serve("ab")
        engine.serve("ac")
        engine.serve_each("defghi")
        assert engine.held("ac") == 2, "three documents of the six were computed after a"

    def test_a_request_in_flight_keeps_its_documents(self, write_through: bool) -> None:
        engine = Engine(1, 2 if write_through else 1, 0, write_through=write_through)
        lease = engine.begin("a")
        engine.serve_each("bcd")
        assert engine.held("a") == 1, "the engine cannot evict what it computes with"
        engine.residency.release(lease)
        assert engine.held("a") == 0, "by then the tiers have others' documents"

    def test_a_discarded_request_leaves_what_was_there(self, write_through: bool) -> None:
        engine = Engine(3, 6, 0, write_through=write_through)
        engine.serve("a")
        engine.residency.cancel(engine.begin("ab"))
        assert engine.held("ab") == 1
        assert engine.serve("ab") == 1

    def test_a_scope_that_lost_everything_is_reported(self, write_through: bool) -> None:
        engine = Engine(1, 2 if write_through else 1, 0, write_through=write_through)
        other = Scope(engine.pool, "other")
        other.serve("a")
        engine.serve_each("bcdef")
        assert engine.pool.emptied == [other.residency]

    def test_a_closed_scope_takes_room_until_it_is_evicted(self, write_through: bool) -> None:
        engine = Engine(1, 3 if write_through else 2, 0, write_through=write_through)
        other = Scope(engine.pool, "other")
        lease = other.begin("a")
        other.residency.close()
        assert other.residency.closed and not engine.pool.nodes_by_key
        engine.serve_each("bc")
        other.residency.release(lease)
        assert engine.held("b") == engine.held("c") == 1

    def test_documents_shorter_than_a_block_take_room_as_well(self, write_through: bool) -> None:
        """Otherwise the mirror would grow for ever."""
        engine = Engine(1, 1, 1, write_through=write_through)
        for number in range(300):
            engine.serve([str(number)], tokens=0)
        assert sum(map(len, engine.mirror.tiers)) <= 3 * (TOKENS + BLOCK)
        assert engine.tree.size <= 3 * (TOKENS + BLOCK)

    def test_an_interrupt_costs_only_what_is_known(self, write_through: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(2, 9, 0, write_through=write_through)
        other = Scope(engine.pool, "other")
        other.serve("x")
        engine.serve("ab")
        insert = Tier.insert

        def interrupted(tier: Tier, *arguments: Any) -> None:
            insert(tier, *arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Tier, "insert", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.serve("c")
        assert engine.serve("c") == 0
        assert other.held("x") == 0
        engine.serve("ab")
        assert engine.loads("ab") == [DEVICE] * 2
        assert engine.loads("c") == [HOST]


@pytest.mark.parametrize("write_through", [True, False])
class TestReports:
    """The engine reused less than predicted: others have taken its room."""

    def test_what_goes_before_the_missing_documents_is_gone_too(self, write_through: bool) -> None:
        engine = Engine(1, 4, 0, write_through=write_through)
        engine.serve_each("abcd")
        lease = engine.begin("c")
        assert lease.cached_documents == 1
        engine.residency.correct(lease)
        engine.residency.release(lease)
        assert [engine.held(document) for document in "abcd"] == [0, 0, 1, 1]

    def test_of_one_scope_alone(self, write_through: bool) -> None:
        engine = Engine(3, 9, 0, write_through=write_through)
        other = Scope(engine.pool, "other")
        other.serve("x")
        engine.serve_each("ab")
        lease = engine.begin("b")
        engine.residency.correct(lease, alone=True)
        engine.residency.release(lease)
        assert (engine.held("a"), engine.held("b"), other.held("x")) == (0, 1, 1)

    def test_another_mirror_hears_of_it(self, write_through: bool) -> None:
        engine = Engine(2, 4, 0, write_through=write_through)
        engine.serve_each("abcd")
        engine.pool.shrink_to(engine.pool.used_blocks - 2, engine.residency)
        assert [engine.held(document) for document in "abcd"] == [0, 1, 1, 1]


class TestInFlight:
    def test_what_requests_in_flight_use_leaves_the_host_last(self) -> None:
        engine = Engine(1, 4, 0, write_through=True)
        engine.serve("a")
        lease = engine.begin("a")
        engine.serve_each("bcdefg")
        assert engine.loads("a") == [HOST]
        engine.residency.release(lease)
        engine.serve_each("hijk")
        assert engine.held("a") == 0

    def test_at_most_half_of_the_host_is_kept_for_them(self) -> None:
        engine = Engine(1, 4, 0, write_through=True)
        leases = [engine.begin(document) for document in "abcdefgh"]
        kept = [
            document
            for document in "abcdefgh"
            if key_in(engine.residency, path_of(engine.tree, document)[1]) in engine.mirror
        ]
        assert kept[:1] == ["a"] and kept[-1] == "h" and len(kept) <= 5
        for lease in leases:
            engine.residency.release(lease)
        held = [document for document in "abcdefgh" if engine.held(document)]
        assert held == kept


def test_of_a_request_longer_than_the_device_the_beginning_is_kept() -> None:
    engine = Engine(2, 9, 0, write_through=True)
    engine.serve("abc")
    assert engine.loads("abc") == [DEVICE, DEVICE, HOST]
    engine = Engine(2, 9, 0, write_through=False)
    engine.serve("abc")
    assert engine.held("abc") == 2


def test_a_lost_node_takes_those_after_it_with_it() -> None:
    """The host has b, and no room for a, which it follows: nothing finds b any more."""
    engine = Engine(2, 1, 0)
    path = engine.tree.insert(["a", "b"], [2 * TOKENS, TOKENS], [0, 1])
    engine.mirror.tiers[0].capacity_tokens += TOKENS
    lease = engine.residency.lease(path, 0)
    engine.residency.serve(path, lease, tuple)
    engine.residency.release(lease)
    engine.serve("c")
    assert engine.held("ab") == 2 and engine.loads("ab") == [DEVICE, HOST]
    engine.serve("de")
    assert engine.held("ab") == 0
    assert key_in(engine.residency, path[2]) not in engine.mirror


def test_an_engine_that_copies_evicted_documents_holds_more() -> None:
    """In both tiers together: one that copies all that it computes holds the same twice."""
    for write_through, place in ((False, HOST), (True, DISK)):
        engine = Engine(2, 2, 9, write_through=write_through)
        engine.serve_each("abcd")
        assert [engine.loads(document) for document in "abcd"] == [[place], [place], [DEVICE], [DEVICE]]


def test_a_dry_run_has_the_same_room_and_changes_nothing() -> None:
    engine = Engine(2, 2, 0)
    engine.serve_each("abcd")
    room = room_of(engine.pool)
    before = [engine.loads(document) for document in "abcd"]
    copy = engine.residency.copy()
    assert type(copy) is LRUResidency and not copy.pool.unlimited
    for document in "efghij":
        path = copy.tree.insert([document], [TOKENS], [0])
        copy.release(copy.lease(path, 0))
    assert copy.used_blocks == room // BLOCK
    assert [engine.loads(document) for document in "abcd"] == before


requests = st.lists(
    st.tuples(
        st.sampled_from("AB"),
        st.text("abcdef", min_size=1, max_size=4).map(lambda text: "".join(dict.fromkeys(text))),
        st.sampled_from(["serve", "begin", "release", "cancel", "correct", "close"]),
        st.integers(0, 40),
    ),
    max_size=30,
)


@settings(max_examples=examples(60))
@given(
    requests,
    st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 6)),
    st.booleans(),
    st.sampled_from(POLICIES),
    st.integers(4, 20),
)
def test_trees_have_what_the_tiers_have(
    steps: list[tuple[str, str, str, int]], sizes: tuple[int, int, int], write_through: bool, policy: str, nodes: int
) -> None:
    engine = Engine(*sizes, write_through=write_through, policy=policy, max_nodes=nodes)
    pool = engine.pool
    scopes = {"A": engine, "B": Scope(pool, "B")}
    in_flight: list[tuple[Scope, Lease]] = []
    for name, documents, step, suffix in steps:
        scope = scopes[name]
        if step in ("release", "cancel", "correct") and in_flight:
            owner, lease = in_flight.pop(0)
            if owner.residency.closed:
                continue
            if step == "correct":
                owner.residency.correct(lease, alone=bool(suffix % 2))
            (owner.residency.cancel if step == "cancel" else owner.residency.release)(lease)
        elif step == "close":
            scope.residency.close()
            scopes[name] = Scope(pool, name)
        else:
            lease = scope.begin(documents, suffix_tokens=suffix, expected=[1.0 + suffix] * len(documents))
            if step == "begin":
                in_flight.append((scope, lease))
            else:
                scope.residency.release(lease)
        check(pool, list(scopes.values()))
        assert pool.nodes <= nodes


def check(pool: TieredPool, scopes: Sequence[Scope]) -> None:
    live = [scope.residency for scope in scopes if not scope.residency.closed]
    assert pool.used_blocks == sum(each.used_blocks for each in live)
    assert pool.nodes == sum(each.tree.size for each in live)
    for tier in pool.mirror.tiers:
        assert tier.tier.used <= tier.capacity_tokens
        assert len(tier) == len(tier.tier)
    known = {node for _, node in pool.nodes_by_key.values()}
    for residency in live:
        held = 0
        for node in residency.tree.walk():
            held += node.blocks - node.missing
            if node.parent is not None:
                assert node in known
            if node.stamp and not node.leases and node.missing < node.blocks:
                assert key_in(residency, node) in pool.mirror, "held, and in no tier"
        in_flight = sum(
            lease.suffix_blocks + lease.partial_blocks
            for each, lease in pool.in_flight
            if each is residency and lease.open
        )
        assert residency.used_blocks == held + in_flight
