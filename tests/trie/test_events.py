"""Residency by events: the tree follows the engine, with other clients too, and predicts its next steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import scopes_of
from support.rings import examples, grid
from support.told_engine import BLOCK, LENGTHS, STEP, STEPS, SYSTEM, Live, make_workers, token_ids

from ragorder import Orderer
from ragorder.eval.engines.base import settings_of


class TestExactness:
    @settings(max_examples=examples(300))
    @given(
        LENGTHS, st.integers(40, 200), STEPS, st.sampled_from([None, 3, 40]), st.booleans(), st.sampled_from([4, 10**6])
    )
    def test_after_all_events_the_tree_is_what_the_engine_holds(
        self,
        lengths: list[int],
        capacity_blocks: int,
        steps: list[tuple[str, Any]],
        suffix_tokens: int | None,
        feedback: bool,
        max_nodes: int,
    ) -> None:
        live = Live(lengths, capacity_blocks, feedback=feedback, max_nodes=max_nodes)
        live.serve([0])
        for step, value in steps:
            if not ((step == "begin" and len(live.in_flight) == 3) or (step == "clear" and live.in_flight)):
                live.do(step, value, suffix_tokens=suffix_tokens)
        live.settle()
        live.check(exact=max_nodes > 4)

    @pytest.mark.parametrize("processes", [1, 3])
    @settings(max_examples=examples(200))
    @given(
        LENGTHS,
        st.integers(40, 200),
        st.lists(st.tuples(st.integers(0, 2), STEP), max_size=60),
        st.sampled_from([None, 0, 3, 40]),
    )
    def test_each_request_alone_is_predicted_to_the_token_with_other_clients_and_processes(
        self, processes: int, lengths: list[int], capacity_blocks: int, steps: list[Any], suffix_tokens: int | None
    ) -> None:
        workers = make_workers(processes, lengths, capacity_blocks)
        for turn, (step, value) in steps:
            worker = workers[turn % processes]
            if step in ("serve", "begin"):
                predicted, reported = worker.serve(value, suffix_tokens=suffix_tokens)
                assert predicted - reported in (0, BLOCK), "a prompt of whole blocks has its last one computed again"
                prompt_tokens = len(SYSTEM) + sum(lengths[number] for number in value) + 1
                assert predicted == reported or predicted >= prompt_tokens - BLOCK
            elif step in ("foreign", "clear"):
                worker.do(step, value)
                worker.engine.tell()
        for worker in workers:
            if scopes_of(worker.orderer):
                worker.check()

    def test_an_answer_before_its_events_spoils_no_prediction(self) -> None:
        live = Live([8] * 12, 20, suffix_tokens=3)
        rng = random.Random(0)
        for _ in range(300):
            predicted, reported = live.begin(rng.sample(range(12), 3))
            live.end()
            assert abs(predicted - reported) <= BLOCK
            if rng.random() < 0.5:
                live.engine.tell()

    @pytest.mark.parametrize(("believed", "foreign_blocks"), grid(list(product([3, 40, 200], [0, 10, 40])), 2))
    def test_under_load_with_late_events_few_predictions_are_wrong_and_hits_are_kept(
        self, believed: int, foreign_blocks: int
    ) -> None:
        """Eight in flight, answers of unknown length, another client."""

        def run(suffix_tokens: int) -> tuple[int, int]:
            live = Live([12] * 60, 200)
            rng = random.Random(3)
            topics = [rng.sample(range(60), 6) for _ in range(25)]
            wrong = hits = 0
            for number in range(1_500):
                topic = topics[min(int(rng.paretovariate(0.8)) - 1, 24)]
                predicted, reported = live.begin(rng.sample(topic, 4), suffix_tokens=suffix_tokens)
                wrong += abs(predicted - reported) > BLOCK
                hits += reported
                if foreign_blocks and number % 5 == 0:
                    live.engine.foreign(foreign_blocks * BLOCK)
                if number % 3 == 0:
                    live.engine.tell()
                if len(live.in_flight) == 8:
                    live.end()
            return wrong, hits

        wrong, hits = run(believed)
        assert wrong <= 0.025 * 1_500
        assert hits >= 0.97 * run(3)[1]

    def test_a_request_whose_events_are_late_has_displaced_what_it_displaced(self) -> None:
        live = Live([16] * 8, 12, suffix_tokens=3)
        live.serve([0])
        live.serve([1])
        live.begin([2, 3])  # takes the room of the first
        live.end()
        assert live.begin([0]) == (8, 8)

    def test_documents_shorter_than_a_block_are_displaced_with_what_they_follow(self) -> None:
        live = Live([1, 0, 1, 8, 8], 12, suffix_tokens=3)
        live.serve([0, 1, 2])
        live.serve([4, 3])
        live.begin([3])
        assert live.serve([0, 2]) == (8, 8)

    def test_a_failed_request_does_not_fill_what_it_had_lost(self) -> None:
        live = Live([20, 20, 20], 40, suffix_tokens=3)
        live.serve([0, 1])
        ordering = live.orderer.order([live.documents[0], live.documents[1]])
        live.engine.foreign(40 * BLOCK)
        live.engine.tell()
        live.residency.refresh()
        ordering.discard()
        assert live.begin([0, 1]) == (0, 0)

    def test_lengths_that_others_have_learned_move_no_node(self) -> None:
        """With events tokens are known, and lengths are of all orderers of an engine."""
        live = Live([20, 20], 100)
        live.serve([0, 1])
        scope = scopes_of(live.orderer)[None]
        ends = [node.end for node in live.residency.tree.walk()]
        scope.residency.lengths.prefix_tokens = 99
        scope.residency.lengths.version += 1
        scope.residency.refresh()
        assert [node.end for node in live.residency.tree.walk()] == ends

    def test_what_the_events_say_is_held_no_report_takes_away(self) -> None:
        live = Live([20, 20, 20, 20], 40, suffix_tokens=3)
        live.serve([0])
        live.serve([1])
        for _ in range(2):
            # Another client uses the older document, and pushes the newer one out.
            live.engine.sim.finish(live.engine.admit([*SYSTEM, *token_ids(live.documents[0]), -7], 0)[1])
        live.engine.foreign(29 * BLOCK)
        predicted, reported = live.begin([1])
        assert predicted > reported + BLOCK, "the events are late"
        live.engine.tell()
        live.end()
        predicted, reported = live.begin([0])
        assert predicted == reported > 2 * BLOCK

    def test_a_pool_larger_than_believed_keeps_what_a_long_answer_was_to_displace(self) -> None:
        live = Live([20, 20, 20], 100, capacity_tokens=20 * BLOCK, suffix_tokens=3)
        live.serve([0])
        live.total_tokens = 31 + 30
        live.serve([1], answer_tokens=30)
        assert live.begin([0]) == (28, 28)

    def test_answers_that_turn_out_longer_displace_at_once(self) -> None:
        live = Live([20, 20, 20], 40, suffix_tokens=3)
        live.serve([0])
        live.serve([1], answer_tokens=90)
        live.total_tokens = 31 + 91
        live.serve([2], answer_tokens=90)
        predicted, reported = live.begin([0])
        assert abs(predicted - reported) <= BLOCK


class TestSilence:
    """An engine without events."""

    @settings(max_examples=examples(100))
    @given(LENGTHS, st.integers(20, 100), STEPS, st.booleans())
    def test_the_mirror_with_feedback_stands(
        self, lengths: list[int], capacity_blocks: int, steps: list[tuple[str, Any]], feedback: bool
    ) -> None:
        silent, mirrored = (Live(lengths, capacity_blocks, feedback=feedback) for _ in range(2))
        options = {"prefix_tokens": len(SYSTEM), "feedback": feedback, "strict": True}
        mirrored.orderer = Orderer(settings_of(mirrored.engine.sim, **options))
        for step, value in steps:
            if step not in ("tell", "clear"):
                step = "begin" if step == "serve" else step
                assert silent.do(step, value, suffix_tokens=9) == mirrored.do(step, value, suffix_tokens=9)
        if scopes_of(silent.orderer):
            assert not silent.residency.pool.doomed
            assert not silent.residency.pool.pending

    def test_what_is_awaited_for_ever_is_forgotten(self) -> None:
        live = Live([8] * 12, 40, suffix_tokens=60)
        rng = random.Random(0)
        live.serve([0, 1, 2])
        for _ in range(3_000):
            # Events stop after the first request, and every answer is believed to be longer than it is.
            live.begin(rng.sample(range(12), 3))
            live.end()
        assert len(live.residency.pool.pending) <= 1_024
        assert len(live.residency.pool.doomed) <= live.residency.tree.size <= 40

    def test_other_clients_that_leave_make_room_for_requests_in_flight(self) -> None:
        live = Live([40] * 12, 100, suffix_tokens=3)
        live.serve([0, 1])
        for _ in range(5):
            live.engine.foreign(90 * BLOCK)
            live.engine.tell()
            live.serve([2])
        assert live.residency.pool.capacity_blocks < 80
        for numbers in ([3, 4], [5, 6], [7, 8], [9, 10]):
            live.begin(numbers)
        assert [lease.open for _, lease in live.residency.pool.in_flight if lease.open] == [True] * 4
        live.settle()
        live.check()


class TestTwins:
    """Documents of other names with the same tokens, which the engine has once."""

    @staticmethod
    def live(lengths: Sequence[int], capacity_blocks: int, **options: Any) -> Live:
        """Every other document is a copy of the one before it."""
        live = Live(lengths, capacity_blocks, **options)
        live.documents[1::2] = [replace(each, text="a copy") for each in live.documents[:-1:2]]
        return live

    @staticmethod
    def evict(live: Live, number: int) -> None:
        """The engine evicts a document, and says so."""
        hashes = live.engine.sim.block_hashes(SYSTEM + token_ids(live.documents[number]))
        live.blocks.remove(hashes[len(SYSTEM) // BLOCK :])

    @staticmethod
    def predicted(live: Live) -> list[int]:
        return [live.orderer.predict_cached_tokens([each])[0] for each in live.documents]

    @pytest.mark.parametrize("served", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 3, 0)], ids=str)
    @pytest.mark.parametrize("evicted", range(2))
    def test_each_hears_that_they_are_evicted(self, served: Sequence[int], evicted: int) -> None:
        live = self.live([20, 20, 30, 30], 1000)
        for number in served:
            live.serve([number])
        assert self.predicted(live) == [28, 28, 40, 40]
        self.evict(live, evicted)
        assert self.predicted(live) == [8, 8, 40, 40]
        self.evict(live, 2 + evicted)
        assert self.predicted(live) == [8, 8, 8, 8]

    @pytest.mark.parametrize("gone", range(2))
    def test_one_hears_that_they_are_evicted_though_the_other_has_left_the_tree(self, gone: int) -> None:
        live = self.live([20, 20], 1000)
        for number in (0, 1):
            live.begin([number])
        live.end(served=gone != 0)
        live.end(served=gone != 1)
        live.engine.tell()
        assert self.predicted(live)[1 - gone] == 28
        self.evict(live, 1 - gone)
        assert self.predicted(live)[1 - gone] == 8

    def test_a_cleared_cache_is_empty_for_each(self) -> None:
        live = self.live([20, 20], 40)
        live.serve([0])
        live.begin([1])
        live.engine.clear()
        live.settle()
        assert [live.orderer.predict_cached_tokens([each])[0] for each in live.documents] == [0, 0]
        live.check()

    @settings(max_examples=examples(300))
    @given(LENGTHS, st.integers(40, 200), STEPS, st.sampled_from([4, 10**6]))
    def test_after_all_events_the_tree_claims_nothing_evicted(
        self, lengths: list[int], capacity_blocks: int, steps: list[tuple[str, Any]], max_nodes: int
    ) -> None:
        live = self.live([length for length in lengths[::2] for _ in "ab"], capacity_blocks, max_nodes=max_nodes)
        live.serve([0])
        for step, value in steps:
            if not ((step == "begin" and len(live.in_flight) == 3) or (step == "clear" and live.in_flight)):
                live.do(step, value)
        live.settle()
        live.check(exact=False)


class TestOthers:
    def test_a_cleared_cache_is_empty_for_us_and_does_not_hold_the_prefix(self) -> None:
        live = Live([20, 20], 100)
        assert not live.orderer.holds_prefix()
        live.serve([0, 1])
        assert live.orderer.holds_prefix()
        nominal = live.residency.pool.capacity_blocks
        live.engine.foreign(90 * BLOCK)
        live.engine.tell()
        live.serve([0])
        assert live.residency.pool.capacity_blocks < nominal
        live.engine.clear()
        live.engine.tell()
        assert not live.orderer.holds_prefix()
        assert live.begin([0, 1]) == (0, 0)
        assert live.residency.pool.capacity_blocks == nominal

    def test_another_engine_ends_what_is_in_flight(self) -> None:
        live = Live([20, 20, 20], 100)
        live.begin([0, 1])
        ordering, _, _ = live.in_flight.popleft()
        live.engine.sim.reset()
        live.blocks.replace(live.blocks.make_successor(same_engine=False), same_engine=False)
        live.engine.told.clear()
        live.engine.untold.clear()
        assert live.serve([1, 0]) == (0, 0)
        before = live.residency.pool.used_blocks
        ordering.confirm(48)
        assert live.residency.pool.used_blocks == before
        live.settle()
        live.check()
