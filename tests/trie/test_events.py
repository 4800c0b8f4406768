"""Residency by events: the tree follows the engine, with other clients too, and predicts its next steps."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.inside import blocks_in, contents_in, scopes_of, watchers_of
from support.rings import examples, grid

from ragorder import Document, Lengths, Orderer, Settings
from ragorder.adapters.observing.observed import Observation, ObservedOrderer
from ragorder.eval.engines.base import settings_of
from ragorder.eval.engines.sim import SimEngine
from ragorder.scope.scopes import MAX_NODES
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.residency.events import EventsResidency
from ragorder.trie.tree import Node

BLOCK = 4
SYSTEM = list(range(1, 11))
DOCUMENTS = 12


def token_ids(document: Document) -> list[int]:
    """The tokens of a document, all its own."""
    number = int(document.id)
    return list(range(1000 * number + 100, 1000 * number + 100 + document.token_count))


def make_documents(lengths: Sequence[int]) -> list[Document]:
    return [Document(str(number), "", tokens=length) for number, length in enumerate(lengths)]


def hearing(
    blocks: EngineBlocks, engine: SimEngine | None = None, *, prefix_ids: Sequence[int] = SYSTEM, **options: Any
) -> Orderer:
    """An orderer that hears of an engine's blocks."""
    options = {"block_size": BLOCK, "prefix_tokens": len(prefix_ids), "strict": True} | options
    settings = Settings(**options) if engine is None else settings_of(engine, **options)
    return Orderer(settings, token_ids=token_ids, prefix_ids=prefix_ids, blocks=blocks)


class TellingEngine:
    """The simulated engine, with KV events that come when the test says so."""

    def __init__(self, blocks: EngineBlocks, capacity_blocks: int) -> None:
        self.sim = SimEngine(block_size=BLOCK, capacity_tokens=capacity_blocks * BLOCK, in_flight=10**6)
        self.blocks = blocks
        self.running: deque[int] = deque()
        self.told: dict[int, None] = {}
        self.untold: deque[Any] = deque()
        self._foreign = 0

    def admit(self, prompt: Sequence[int], answer_tokens: int) -> tuple[int, int]:
        """Begin a request: the cached tokens of its prompt and a handle. Its events wait for `tell`."""
        completion, handle = self.sim.admit(prompt, answer_tokens)
        hashes = self.sim.block_hashes(prompt)
        held = dict.fromkeys(blocks_in(self.sim))
        self.untold.append(("removed", [each for each in self.told if each not in held]))
        new = [(place, each) for place, each in enumerate(hashes) if each not in self.told and each in held]
        for place, each in new:
            parent = hashes[place - 1] if place else None
            self.untold.append(("stored", each, parent, list(prompt[place * BLOCK : (place + 1) * BLOCK])))
        self.told = {each: None for each in [*self.told, *hashes] if each in held}
        return completion.cached_tokens, handle

    def foreign(self, tokens: int) -> None:
        """Another client's prompt, served at once."""
        self._foreign += 1
        _, handle = self.admit(range(-(10**6) * self._foreign - tokens, -(10**6) * self._foreign), 0)
        self.sim.finish(handle)

    def clear(self) -> None:
        self.sim.reset()
        self.told.clear()
        self.untold.append(("cleared",))

    def tell(self) -> None:
        """Whatever happened since the last time."""
        while self.untold:
            kind, *facts = self.untold.popleft()
            if kind == "stored":
                block_hash, parent, ids = facts
                self.blocks.store([block_hash], parent, ids)
            elif kind == "removed":
                self.blocks.remove(facts[0])
            else:
                self.blocks.clear()


class Live:
    """An orderer that hears of an engine, and requests in flight between them."""

    def __init__(self, lengths: Sequence[int], capacity_blocks: int, **options: Any) -> None:
        self.documents = make_documents(lengths)
        self.blocks = EngineBlocks(BLOCK)
        self.engine = TellingEngine(self.blocks, capacity_blocks)
        self.orderer = self.make_orderer(**options)
        self.in_flight: deque[tuple[Any, int, int]] = deque()
        self.served = 0
        self.total_tokens: int | None = None

    def make_orderer(self, *, max_nodes: int = MAX_NODES, **options: Any) -> Orderer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ragorder.scope.scopes.MAX_NODES", max_nodes)
            return hearing(self.blocks, self.engine.sim, **options)

    @property
    def residency(self) -> EventsResidency:
        mirror = scopes_of(self.orderer)[None].mirror
        assert isinstance(mirror, EventsResidency)
        return mirror

    def begin(self, numbers: Sequence[int], suffix_tokens: int | None = 3, answer_tokens: int = 2) -> tuple[int, int]:
        """Order a request and send it: cached tokens predicted and reported."""
        self.served += 1
        ordering = self.orderer.order(
            [self.documents[number] for number in numbers], lengths=Lengths(suffix=suffix_tokens)
        )
        assert sorted(int(document.id) for document in ordering.documents) == sorted(numbers)
        prompt = array("q", SYSTEM)
        for document in ordering.documents:
            prompt.extend(token_ids(document))
        prompt.append(-self.served)
        reported, handle = self.engine.admit(prompt, answer_tokens)
        self.in_flight.append((ordering, handle, reported))
        return ordering.cached_tokens, reported

    def end(self, *, served: bool = True) -> None:
        ordering, handle, reported = self.in_flight.popleft()
        self.engine.sim.finish(handle)
        ordering.confirm(reported, self.total_tokens) if served else ordering.discard()

    def serve(self, numbers: Sequence[int], **options: Any) -> tuple[int, int]:
        both = self.begin(numbers, **options)
        self.engine.tell()
        self.end()
        return both

    def do(self, step: str, value: Any, **options: Any) -> Any:
        """A step of a property, where it can be taken."""
        if step in ("serve", "begin"):
            return getattr(self, step)(value, **options)
        if step == "foreign":
            self.engine.foreign(value)
        elif step in ("tell", "clear"):
            getattr(self.engine, step)()
        elif self.in_flight:
            self.end(served=step == "end")

    def settle(self) -> None:
        """Everything is answered, and everything told."""
        while self.in_flight:
            self.end()
        self.engine.tell()

    def check(self, exact: bool = True) -> None:
        """The tree is sound, and of each path the engine holds what it says, or at least that."""
        residency, pool = self.residency, self.residency.pool
        residency.refresh()
        prompts: dict[Node, list[int]] = {}
        # What the last requests may have displaced, until a later one is heard of.
        in_doubt = {node for pending in pool.pending for _, node in pending.displaced}
        for node in residency.tree.walk():
            above = prompts[node.parent] if node.parent is not None else []
            ids = [token_ids(each) for each in self.documents if each.key == node.key] or [SYSTEM]
            prompts[node] = above + ids[0]
            assert 0 <= node.missing <= node.blocks
            assert node.leases == 0
            assert node in contents_in(residency)
            held = self.engine.sim.cached_tokens(prompts[node])
            if node.parent is None or not node.parent.missing:
                claimed = residency.tree.cached_tokens(node)
                assert claimed == held if exact and node not in in_doubt else claimed <= held
        assert residency.tree.size == len(prompts) - 1
        assert set(contents_in(residency)) == set(prompts)
        # An empty document makes two paths of the same tokens.
        assert len(pool.watched) <= sum(len(known.blocks) for known in contents_in(residency).values())
        assert {node for _, node in pool.watched.values()} <= set(prompts)
        suffixes = sum(use.suffix_blocks for use in pool.log)
        assert pool.used_blocks == suffixes + sum(node.blocks - node.missing for node in prompts)
        pool.capacity_blocks = 0
        pool.make_room(residency)
        assert pool.used_blocks == 0, "all that is held has its turn to go"


class Tables(list[EngineBlocks]):
    """The tables of several processes: each hears what the engine says."""

    def store(self, *event: Any) -> None:
        for table in self:
            table.store(*event)

    def remove(self, *event: Any) -> None:
        for table in self:
            table.remove(*event)

    def clear(self) -> None:
        for table in self:
            table.clear()


def make_workers(count: int, lengths: Sequence[int], capacity_blocks: int, **options: Any) -> list[Live]:
    """Orderers in processes of their own, with one engine."""
    workers = [Live(lengths, capacity_blocks, **options) for _ in range(count)]
    for number, worker in enumerate(workers):
        worker.engine = workers[0].engine
        worker.served = 10**5 * number
    workers[0].engine.blocks = Tables(worker.blocks for worker in workers)  # type: ignore[assignment]
    return workers


REQUESTS = st.lists(st.integers(0, DOCUMENTS - 1), min_size=1, max_size=5, unique=True)
STEP = st.one_of(
    *(st.tuples(st.just(step), REQUESTS) for step in ("serve", "begin")),
    *(st.tuples(st.just(step), st.none()) for step in ("end", "tell", "discard", "clear")),
    st.tuples(st.just("foreign"), st.integers(1, 120)),
)
STEPS = st.lists(STEP, max_size=60)
LENGTHS = st.lists(st.integers(0, 30), min_size=DOCUMENTS, max_size=DOCUMENTS)


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

    def test_of_two_documents_with_the_same_tokens_no_block_is_watched_twice(self) -> None:
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
