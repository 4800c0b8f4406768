"""Residency by events: what other processes and tenants have computed, in the tree or not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.inside import scopes_of, watchers_of
from support.rings import examples
from support.told_engine import (
    BLOCK,
    LENGTHS,
    STEP,
    SYSTEM,
    Live,
    hearing,
    make_documents,
    make_workers,
    token_ids,
)

from ragorder import Document
from ragorder.adapters.observing.observed import Observation, ObservedOrderer
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.residency.events import EventsResidency


class TestOtherOrderers:
    """Whatever one process had computed, the others find by the tokens of their documents."""

    def test_a_cold_one_finds_all_that_was_served_before_it_came(self) -> None:
        live = Live([20] * 6, 100)
        live.serve([0, 1])
        live.serve([3, 0, 4])
        live.orderer = live.make_orderer()
        assert [document.id for document in live.orderer.preview(live.documents[4::-1])] == ["0", "3", "4", "2", "1"]
        assert live.orderer.tree_size == 0, "a scope that was looked at alone is not kept"
        (ordering,) = live.orderer.order_batch([live.documents[1::-1]])
        assert (ordering.permutation, ordering.cached_tokens) == ([1, 0], 48)
        assert live.orderer.predict_cached_tokens([live.documents[number] for number in (4, 3, 0)]) == (68, 70)
        assert live.begin([4, 3, 2, 1, 0])[0] == 68

    def test_a_batch_is_planned_where_documents_thought_evicted_are_still_held(self) -> None:
        blocks = EngineBlocks(BLOCK)
        orderer = hearing(blocks, prefix_ids=(), capacity_tokens=48)
        documents = make_documents([16, 16, 40, 48, 24])

        def store(*given: Document) -> None:
            ids = [token for document in given for token in token_ids(document)]
            blocks.store([tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)], None, ids)

        orderer.order(documents[:2]).confirm(0)
        store(*documents[:2])
        third = orderer.order(documents[2:3])
        store(documents[2])
        third.confirm(0)
        assert orderer.predict_cached_tokens(documents[:2]) == (32, 32)
        planned = list(orderer.order_batch([documents[3:4], documents[4:]]))
        assert sorted(ordering.index for ordering in planned) == [0, 1]

    @settings(max_examples=examples(200))
    @given(
        LENGTHS,
        st.integers(40, 200),
        st.lists(st.tuples(st.integers(0, 2), STEP), max_size=60),
        st.sampled_from([4, 10**6]),
    )
    @example(
        [2] + [0] * 11, 40, [(0, step) for step in [*[("begin", [0])] * 2, ("clear", None), *[("serve", [1])] * 2]], 4
    )
    def test_after_all_events_each_tree_is_sound_and_claims_nothing_evicted(
        self, lengths: list[int], capacity_blocks: int, steps: list[tuple[int, tuple[str, Any]]], max_nodes: int
    ) -> None:
        workers = make_workers(3, lengths, capacity_blocks, max_nodes=max_nodes)
        for turn, (step, value) in steps:
            workers[turn].do(step, value)
            assert workers[turn].orderer.tree_size <= max_nodes
        for worker in workers:
            worker.settle()
        for worker in workers:
            if scopes_of(worker.orderer):
                worker.check(exact=False)

    @pytest.mark.parametrize("length", [3, 9, 20], ids=["shorter than a block", "of two blocks", "of five blocks"])
    def test_eight_find_as_much_as_one(self, length: int) -> None:
        """A session of requests about one topic follows another, spread over all of them."""

        def hits(count: int, told: bool = True) -> int:
            workers = make_workers(count, [length] * 60, 60 * length // BLOCK)
            rng = random.Random(3)
            topics = [rng.sample(range(60), 6) for _ in range(25)]
            reported = 0
            for number in range(600):
                topic = topics[min(int(rng.paretovariate(0.8)) - 1, 24)]
                worker = workers[number % count]
                reported += worker.begin(rng.sample(topic, 4))[1]
                if told:
                    worker.engine.tell()
                worker.end()
            return reported

        one, eight = hits(1), hits(8)
        assert eight >= 0.97 * one
        assert hits(8, told=False) < 0.85 * one

    def test_a_prefix_shorter_than_a_block_is_no_bar(self) -> None:
        blocks = EngineBlocks(BLOCK)
        documents = make_documents([9, 9])
        prompt = [7, *token_ids(documents[1]), *token_ids(documents[0])]
        blocks.store([1, 2, 3, 4], None, prompt[:16])
        orderer = hearing(blocks, prefix_ids=[7])
        ordering = orderer.order(documents)
        assert (ordering.permutation, ordering.cached_tokens) == ([1, 0], 16)

    def test_guards_hold_for_what_is_found(self) -> None:
        first, second = make_workers(2, [20] * 4, 100, keep_first=1)
        first.serve([2, 1, 0])
        ordering = second.orderer.order(second.documents[:3])
        assert ordering.permutation[0] == 0
        assert (ordering.cached_tokens, ordering.guard_cost_tokens) == (8, 60)

    def test_of_two_documents_with_the_same_tokens_one_is_found(self) -> None:
        """Else what is evicted would stay in the tree as the other one."""
        live = Live([20] * 3, 40)
        clone, other = live.documents[0], live.documents[1]
        live.serve([0, 1])
        ordering = live.orderer.order([other, clone, clone])
        assert (ordering.permutation[:2], ordering.cached_tokens) == ([1, 0], 48)
        ordering.discard()
        live.engine.foreign(40 * BLOCK)
        live.engine.tell()
        assert live.orderer.order([other, clone, clone]).cached_tokens == 0

    @pytest.mark.parametrize("gone", [1, 3, 8, 13])
    def test_blocks_evicted_during_discovery_are_not_found(self, gone: int) -> None:
        """Events are taken in on another thread, between any two questions."""

        class Restless(EngineBlocks):
            asked = place = 0

            def holds(self, content: bytes) -> bool:
                self.asked += 1
                if self.asked == self.place:
                    self.remove([gone])
                return super().holds(content)

        documents = make_documents([20] * 4)
        prompt = SYSTEM + [token for number in (3, 1, 0) for token in token_ids(documents[number])]
        for place in range(1, 80):
            blocks = Restless(BLOCK)
            blocks.store(range(17), None, prompt[: 17 * BLOCK])
            blocks.place = place
            orderer = hearing(blocks)
            orderer.preview(documents)
            orderer.order(documents).discard()
            residency = scopes_of(orderer)[None].mirror
            assert isinstance(residency, EventsResidency)
            residency.refresh()
            held = 0
            for node in residency.tree.walk():
                assert node.parent is None or not node.parent.missing, "below it there is nothing"
                held += node.blocks - node.missing
            assert held == residency.used_blocks == (gone if blocks.asked >= place else 17)

    def test_a_request_looks_up_a_bounded_number_of_blocks(self) -> None:
        class Counting(EngineBlocks):
            asked = 0

            def holds(self, content: bytes) -> bool:
                self.asked += 1
                return super().holds(content)

        for length in (1, 3, 9):
            live = Live([length] * 300, 3000)
            live.blocks = live.engine.blocks = Counting(BLOCK)
            live.orderer = live.make_orderer()
            for number in range(300):
                live.serve([number])
            asked = live.blocks.asked
            live.orderer = live.make_orderer()
            live.begin(range(300))
            # For each of 256 a first block, and of those that are there all blocks, when found and when reused.
            assert live.blocks.asked - asked < 256 * (2 + 2 * length) + 4 * live.residency.tree.size + 300 * length


class TestTenants:
    """Blocks with another salt have other contents."""

    @pytest.mark.parametrize("ours", [None, "", "a", "b", 7])
    @pytest.mark.parametrize("theirs", [None, "a", "b"])
    def test_an_order_is_found_with_its_own_salt_only(self, ours: Any, theirs: str | None) -> None:
        documents = make_documents([10, 10, 10])
        blocks = EngineBlocks(BLOCK)
        prompt = SYSTEM + [token for number in (2, 0, 1) for token in token_ids(documents[number])]
        blocks.store(range(10), None, prompt[: 10 * BLOCK], [[theirs] if theirs else None, *[None] * 9])
        ordering = hearing(blocks).order(documents, scope=ours)
        found = ([2, 0, 1], 40) if ours == theirs else ([0, 1, 2], 0)
        assert (ordering.permutation, ordering.cached_tokens) == found

    @pytest.mark.parametrize("scope", ["", 7, ("a",)])
    def test_a_scope_that_is_no_salt_has_the_mirror_alone(self, scope: Any) -> None:
        documents = make_documents([10, 10])
        blocks = EngineBlocks(BLOCK)
        blocks.store([1, 2], None, SYSTEM[: 2 * BLOCK])
        orderer = hearing(blocks)
        assert orderer.order(documents, scope=scope).cached_tokens == 0
        assert orderer.order(documents, scope=scope).cached_tokens == 28

    def test_a_forgotten_scope_receives_no_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 2)
        blocks = EngineBlocks(BLOCK)
        orderer = hearing(blocks)
        for scope in "abcdef":
            orderer.order(make_documents([10, 10]), scope=scope)
        watchers = set(map(id, watchers_of(blocks).values()))
        assert watchers == {id(scopes_of(orderer).pool)}
        watched = {id(holder) for holder, _ in scopes_of(orderer).pool.watched.values()}
        assert watched == {id(scopes_of(orderer)[scope].mirror) for scope in "ef"}


def test_what_events_say_others_took_is_gone_in_the_other_order_as_well() -> None:
    """Events correct the served order alone: the other one's mirror would keep evicted content."""
    told: list[Observation] = []

    class Recorder:
        def ordered(self, observation: Observation) -> Any:
            told.append(observation)
            return lambda outcome: None

    live = Live([3 * BLOCK] * 9, capacity_blocks=60)
    observed: Any = ObservedOrderer(live.orderer, [Recorder()])
    live.orderer = observed
    for numbers in ([0, 1, 2], [3, 4, 5], [0, 1, 2]):
        live.serve(numbers)
    assert told[-1].retrieval_tokens == told[-1].ordered_tokens
    assert (told[-1].retrieval_tokens or 0) >= 9 * BLOCK
    live.engine.foreign(55 * BLOCK)
    live.engine.tell()
    live.serve([6, 7, 8])
    _, reported = live.serve([3, 4, 5])
    assert reported < 3 * BLOCK
    assert (told[-1].ordered_tokens, told[-1].retrieval_tokens) == (reported, reported)
