"""Residency: what a request holds while it is in flight, what stays after it, and what the engine gives up when."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.rings import examples, grid

from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.sim import SimEngine
from ragorder.trie.residency import FeedbackResidency, Lease, LRUResidency, Pool
from ragorder.trie.search import BestPathSearch, ranks_on_path
from ragorder.trie.tree import KnowledgeTree, Node

BLOCK = 16
PREFIX = 40
SUFFIX = 40


def recomputed_blocks(residency: LRUResidency) -> int:
    """What the tree, the log and the requests in flight say that the engine's pool holds."""
    pool = residency.pool
    served = sum(use.suffix_blocks for use in pool.log)
    in_flight = sum(lease.suffix_blocks + lease.partial_blocks for _, lease in pool.in_flight if lease.open)
    return served + in_flight + sum(node.blocks - node.missing for node in residency.tree.walk())


def prompt_blocks(documents_tokens: int, suffix_tokens: int = SUFFIX) -> int:
    return -(-(PREFIX + documents_tokens + suffix_tokens) // BLOCK)


def start(residency: LRUResidency, documents: str, tokens: int = 30, suffix_tokens: int = SUFFIX) -> Lease:
    """A request for the documents named by these letters, in this order."""
    path = residency.tree.insert(documents, [tokens] * len(documents), range(len(documents)))
    return residency.lease(path, suffix_tokens)


def serve(residency: LRUResidency, documents: str, tokens: int = 30) -> Lease:
    lease = start(residency, documents, tokens)
    residency.release(lease)
    return lease


def paths(tree: KnowledgeTree) -> dict[str, Node]:
    found = {tree.root: ""}
    for node in tree.walk():
        if node.parent is not None:
            found[node] = found[node.parent] + str(node.key)
    return {path: node for node, path in found.items()}


def check_invariants(residency: LRUResidency, leases: Sequence[tuple[Lease, Sequence[Node]]]) -> None:
    """`leases` are the open ones with their nodes."""
    tree = residency.tree
    nodes = list(tree.walk())
    assert tree.size == len(nodes) - 1
    for node in nodes:
        assert 0 <= node.missing <= node.blocks
        assert not (node.missing and node.children), "what follows a missing block is of no use"
        assert node.leases == sum(node in path for _, path in leases)
        assert node.children is None or node.children
        if node.leases:
            assert not node.missing, "blocks in use are pinned"
        if node.parent is not None:
            assert node.stamp <= node.parent.stamp, "a prefix is used whenever what follows is"
    assert all(node in nodes for _, path in leases for node in path)
    pool = residency.pool
    stamps = [use.stamp for use in pool.log]
    assert stamps == sorted(stamps)
    assert 0 <= pool.used_blocks <= pool.capacity_blocks
    if not pool.unlimited:
        assert pool.used_blocks == recomputed_blocks(residency)
    else:
        # Nothing is ever evicted for its blocks, and the log forgets the suffixes of old requests.
        assert pool.used_blocks >= recomputed_blocks(residency)
    assert tree.size == pool.nodes <= pool.max_nodes


class ResidencyContract:
    """What every residency does, seen from a tree with room for everything."""

    def make(self) -> LRUResidency:
        raise NotImplementedError

    @pytest.fixture
    def residency(self) -> LRUResidency:
        return self.make()

    def test_cancel_takes_back_what_only_this_request_would_have_computed(self, residency: LRUResidency) -> None:
        serve(residency, "ab")
        used = residency.pool.used_blocks
        residency.cancel(start(residency, "abcd"))
        assert sorted(paths(residency.tree)) == ["", "a", "ab"]
        assert residency.pool.used_blocks == used == recomputed_blocks(residency)

    def test_cancel_keeps_what_another_request_served_meanwhile(self, residency: LRUResidency) -> None:
        one, other = start(residency, "abc"), start(residency, "abc")
        residency.release(other)
        residency.cancel(one)
        assert start(residency, "abc").cached_documents == 3

    def test_a_forgotten_lease_counts_as_served_in_the_end(self, residency: LRUResidency) -> None:
        forgotten = start(residency, "abc")
        for number in range(1_100):
            residency.release(start(residency, "xyz"[number % 3]))
        assert not forgotten.open
        assert all(node.leases == 0 for node in residency.tree.walk())
        assert start(residency, "abc").cached_documents == 3

    def test_requests_in_flight_are_remembered_in_bounded_memory(self, residency: LRUResidency) -> None:
        leases = [start(residency, "abc") for _ in range(3_000)]
        assert len(residency.pool.in_flight) <= 1_024
        assert sum(lease.open for lease in leases) <= 1_024
        for lease in leases:
            residency.release(lease)
        check_invariants(residency, [])

    def test_the_log_is_bounded(self, residency: LRUResidency) -> None:
        for number in range(20_000):
            serve(residency, "abcde"[number % 5 :] + "fgh"[number % 3])
        assert len(residency.pool.log) <= 4_096


class BoundedContract(ResidencyContract):
    """What a residency with a capacity of `blocks` does besides."""

    blocks = 2_000

    def make(self, blocks: int | None = None) -> LRUResidency:
        raise NotImplementedError

    def test_an_answer_takes_the_room_that_it_is_reported_with(self) -> None:
        residency = self.make(2 * prompt_blocks(30))
        serve(residency, "a")
        held = residency.pool.used_blocks
        lease = start(residency, "b", suffix_tokens=SUFFIX - 32)
        assert residency.pool.used_blocks == held + prompt_blocks(30, SUFFIX - 32) - PREFIX // BLOCK
        residency.release(lease, total_tokens=PREFIX + 30 + SUFFIX - 32 + 1)
        assert residency.pool.evicted_blocks == 0, "the last token of an answer takes no room"
        residency.release(start(residency, "b", suffix_tokens=SUFFIX - 32), total_tokens=PREFIX + 30 + 200)
        assert residency.pool.evicted_blocks > 0
        assert residency.pool.used_blocks == recomputed_blocks(residency) <= residency.pool.capacity_blocks

    def test_the_oldest_request_in_flight_ends_when_its_room_is_needed_and_takes_none_for_its_answer(self) -> None:
        residency = self.make(2 * prompt_blocks(60, SUFFIX - 32))
        oldest = start(residency, "ab", suffix_tokens=SUFFIX - 32)
        newest = start(residency, "wxyz", suffix_tokens=SUFFIX - 32)
        assert (oldest.open, newest.open) == (False, True)
        assert residency.pool.used_blocks == recomputed_blocks(residency) <= residency.pool.capacity_blocks
        before = residency.pool.used_blocks
        residency.release(oldest, total_tokens=10_000)
        residency.cancel(oldest)
        assert residency.pool.used_blocks == before
        check_invariants(residency, [(newest, newest.path)])

    def test_of_a_request_whose_answer_exceeds_the_cache_the_head_stays(self) -> None:
        residency = self.make(20)
        residency.release(start(residency, "abc"), total_tokens=10_000)
        assert residency.pool.used_blocks == 20
        check_invariants(residency, [])
        assert start(residency, "abc").cached_documents == 3


class TestLRU(BoundedContract):
    """vLLM 0.32: blocks that were not filled are reused before all others."""

    def make(self, blocks: int | None = None) -> LRUResidency:
        blocks = self.blocks if blocks is None else blocks
        return LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(blocks * BLOCK, BLOCK))

    def test_a_block_that_was_not_filled_is_free_at_once(self) -> None:
        residency = self.make()
        assert (PREFIX + 30 + SUFFIX) % BLOCK
        lease = start(residency, "a")
        assert residency.pool.used_blocks == prompt_blocks(30)
        residency.release(lease)
        assert residency.pool.used_blocks == prompt_blocks(30) - 1


class TestLRUWithPartialBlocksInLine(BoundedContract):
    """Earlier engines: blocks that were not filled wait their turn."""

    def make(self, blocks: int | None = None) -> LRUResidency:
        blocks = self.blocks if blocks is None else blocks
        return LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(blocks * BLOCK, BLOCK, partial_blocks_first=False))

    def test_a_block_that_was_not_filled_waits_its_turn(self) -> None:
        residency = self.make()
        serve(residency, "a")
        assert residency.pool.used_blocks == prompt_blocks(30)


class TestLRUWithoutCapacity(ResidencyContract):
    def make(self) -> LRUResidency:
        return LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(None, BLOCK))


class Invariants(RuleBasedStateMachine):
    """Requests that start, are served, fail, are ended twice, and push each other out of the cache."""

    @initialize(
        block_size=st.sampled_from([1, 7, 16]),
        prefix_tokens=st.integers(0, 40),
        blocks=st.none() | st.integers(0, 60),
        max_nodes=st.sampled_from([3, 8, 100_000]),
        partial_blocks_first=st.booleans(),
        lengths=st.fixed_dictionaries({key: st.integers(0, 50) for key in "abcdef"}),
    )
    def begin(
        self,
        block_size: int,
        prefix_tokens: int,
        blocks: int | None,
        max_nodes: int,
        partial_blocks_first: bool,
        lengths: dict[str, int],
    ) -> None:
        self.tree = KnowledgeTree(block_size, prefix_tokens)
        pool = Pool(blocks and blocks * block_size, block_size, max_nodes, partial_blocks_first)
        self.residency = LRUResidency(self.tree, pool)
        self.search = BestPathSearch()
        self.lengths = lengths
        self.open: list[tuple[Lease, list[Node]]] = []
        self.ended: list[Lease] = []

    def _sort_out(self) -> None:
        """What a request that needed room has ended."""
        self.ended += [lease for lease, _ in self.open if not lease.open]
        self.open = [(lease, path) for lease, path in self.open if lease.open]

    @rule(
        documents=st.permutations("abcdef").flatmap(lambda keys: st.integers(0, 6).map(lambda n: keys[:n])),
        suffix_tokens=st.sampled_from([4, 12, 13]),
    )
    def order(self, documents: list[str], suffix_tokens: int) -> None:
        lengths = [self.lengths[key] for key in documents]
        node = self.search.find(self.tree, {key: rank for rank, key in enumerate(documents)})
        predicted = self.tree.cached_tokens(node)
        prefix = ranks_on_path(node, {key: rank for rank, key in enumerate(documents)})
        order = prefix + [rank for rank in range(len(documents)) if rank not in prefix]
        path = self.tree.insert(documents, lengths, order)
        lease = self.residency.lease(path, suffix_tokens)
        assert lease.cached_tokens == predicted
        assert lease.cached_documents <= len(documents)
        self.open.append((lease, list(path)))
        self._sort_out()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), lost=st.none() | st.integers(0, 10), total=st.none() | st.integers(0, 600))
    def confirm(self, data: st.DataObject, lost: int | None, total: int | None) -> None:
        lease, _ = data.draw(st.sampled_from(self.open), "lease")
        cached = None if lost is None else max(0, lease.cached_tokens - lost * self.tree.block_size)
        self.residency.release(lease, cached, total)
        self._sort_out()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        lease, _ = data.draw(st.sampled_from(self.open), "lease")
        self.residency.cancel(lease)
        self._sort_out()

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), served=st.booleans())
    def end_again(self, data: st.DataObject, served: bool) -> None:
        lease = data.draw(st.sampled_from(self.ended), "lease")
        if served:
            self.residency.release(lease, 0)
        else:
            self.residency.cancel(lease)

    @rule(prefix_tokens=st.integers(0, 80), ratio=st.sampled_from([0.3, 0.9, 1.0, 1.1, 2.0]))
    def resize(self, prefix_tokens: int, ratio: float) -> None:
        """Lengths turn out to be others, while requests are in flight."""

        def nodes() -> list[tuple[int, int, int]]:
            return [(node.end, node.blocks, node.missing) for node in self.tree.walk()]

        before, used_blocks = nodes(), self.residency.pool.used_blocks
        self.residency.resize(self.tree.root.end, 1.0)
        assert (nodes(), self.residency.pool.used_blocks) == (before, used_blocks)
        self.residency.resize(prefix_tokens, ratio)
        assert self.tree.root.end == prefix_tokens
        self._sort_out()

    @rule(blocks=st.integers(0, 60))
    def keep(self, blocks: int) -> None:
        """A report of the other order's requests says how much room is left."""
        used_blocks = self.residency.pool.used_blocks
        self.residency.pool.shrink_to(blocks, self.residency)
        if not self.residency.pool.unlimited:
            assert self.residency.pool.used_blocks == used_blocks
        self._sort_out()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "residency"):
            check_invariants(self.residency, self.open)

    def teardown(self) -> None:
        if hasattr(self, "residency"):
            for lease, _ in self.open:
                self.residency.release(lease)
            check_invariants(self.residency, [])


class TestResize:
    """Lengths turn out to be others than was told."""

    @pytest.mark.parametrize(("prefix_tokens", "ratio"), [(100, 1.0), (7, 1.0), (PREFIX, 2.0), (200, 0.5)])
    def test_what_was_held_is_where_it_really_is(self, prefix_tokens: int, ratio: float) -> None:
        residency = LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(10_000, BLOCK))
        serve(residency, "abc")
        serve(residency, "ade")
        residency.resize(prefix_tokens, ratio)
        for documents, shared in (("abf", 2), ("ade", 3), ("xyz", 0)):
            lease = start(residency, documents, round(30 * ratio))
            assert lease.cached_tokens == (prefix_tokens + shared * round(30 * ratio)) // BLOCK * BLOCK
            residency.cancel(lease)
        check_invariants(residency, [])

    def test_a_request_in_flight_expects_what_it_would_have(self) -> None:
        residency = LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(10_000, BLOCK))
        serve(residency, "abc")
        lease = start(residency, "abd")
        residency.resize(100, 1.0)
        assert lease.cached_tokens == (100 + 60) // BLOCK * BLOCK
        residency.release(lease, total_tokens=100 + 90 + 50)
        check_invariants(residency, [])

    def test_a_cache_that_is_smaller_than_thought_gives_up_what_is_oldest(self) -> None:
        residency = LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(30 * BLOCK, BLOCK))
        for documents in ("abc", "def", "ghi"):
            serve(residency, documents)
        residency.resize(PREFIX, 2.0)
        check_invariants(residency, [])
        assert start(residency, "ghi", 60).cached_tokens == (PREFIX + 180) // BLOCK * BLOCK
        assert start(residency, "abc", 60).cached_tokens < (PREFIX + 180) // BLOCK * BLOCK

    def test_keep_gives_up_what_is_oldest_and_counts_the_room_as_taken(self) -> None:
        residency = LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(100 * BLOCK, BLOCK))
        serve(residency, "abc")
        serve(residency, "def")
        used_blocks = residency.pool.used_blocks
        residency.pool.shrink_to(prompt_blocks(90), residency)
        assert residency.pool.used_blocks == used_blocks
        assert start(residency, "def").cached_tokens == (PREFIX + 90) // BLOCK * BLOCK
        assert start(residency, "abc").cached_tokens < (PREFIX + 90) // BLOCK * BLOCK

    def test_a_prefix_that_turns_out_shorter_is_no_loss(self) -> None:
        """Every request uses it: a report of less says that it is shorter, not that all that is older is gone."""
        tree = KnowledgeTree(BLOCK, 20 * BLOCK)
        residency = FeedbackResidency(LRUResidency(tree, Pool(100 * BLOCK, BLOCK)))
        for documents in ("abc", "def"):
            path = tree.insert(documents, [30] * 3, range(3))
            residency.release(residency.lease(path, SUFFIX), BLOCK)
        assert set(paths(tree)) == {"", "a", "ab", "abc", "d", "de", "def"}


TestInvariants = Invariants.TestCase
TestInvariants.settings = settings(max_examples=examples(180), stateful_step_count=40, deadline=None)


class Mirrored:
    """A simulated engine and the residency that follows it, `in_flight` requests at a time."""

    question_tokens = 20
    output_tokens = 32

    def __init__(
        self, lengths: Sequence[int], capacity_tokens: int | None, in_flight: int = 1, feedback: bool = True
    ) -> None:
        self.lengths = lengths
        self.in_flight = in_flight
        self.feedback = feedback
        self.engine = SimEngine(capacity_tokens=capacity_tokens, in_flight=in_flight, output_tokens=self.output_tokens)
        self.tree = KnowledgeTree(BLOCK, PREFIX)
        self.residency = LRUResidency(self.tree, Pool(capacity_tokens, BLOCK, partial_blocks_first=False))
        self.corrected = FeedbackResidency(self.residency)
        self.search = BestPathSearch()
        self._running: deque[tuple[Lease, int]] = deque()
        self._questions = 0

    def prompt(self, documents: Sequence[int]) -> array[int]:
        ids = array("q", range(-PREFIX, 0))
        for document in documents:
            ids.extend(range(document * 100_000, document * 100_000 + self.lengths[document]))
        return ids

    def serve(self, documents: Sequence[int]) -> tuple[int, int]:
        """Predicted and true cached tokens of a request."""
        while len(self._running) >= self.in_flight:
            lease, cached_tokens = self._running.popleft()
            self.corrected.release(lease, cached_tokens if self.feedback else None)
        ranks = {document: rank for rank, document in enumerate(documents)}
        prefix = ranks_on_path(self.search.find(self.tree, ranks), ranks)
        order = prefix + [rank for rank in range(len(documents)) if rank not in prefix]
        path = self.tree.insert(documents, [self.lengths[document] for document in documents], order)
        lease = self.residency.lease(path, self.question_tokens + self.output_tokens)
        completion = self.engine.generate(self._question(self.prompt([documents[rank] for rank in order])))
        self._running.append((lease, completion.cached_tokens))
        return lease.cached_tokens, completion.cached_tokens

    def serve_foreign(self, tokens: int) -> None:
        """A request that the residency does not know."""
        self.engine.generate(self._question(array("q", range(-9_000_000, -9_000_000 + tokens))))

    def _question(self, prompt: array[int]) -> array[int]:
        self._questions += 1
        first = -10_000_000_000 - self._questions * 1_000
        prompt.extend(range(first, first + self.question_tokens))
        return prompt

    def known_paths(self) -> Iterator[tuple[list[int], Node]]:
        documents: dict[Node, list[Any]] = {self.tree.root: []}
        for node in self.tree.walk():
            if node.parent is not None:
                documents[node] = [*documents[node.parent], node.key]
            yield documents[node], node


STREAMS = st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=5, unique=True), max_size=40)
BLOCK_COUNTS = st.none() | st.integers(1, 80)


class TestAgreementWithTheEngine:
    """Nothing is approximated: what the residency predicts is what the engine reports, to the token.

    Only a document without tokens is a difference that the engine cannot see; here each has at least one.
    """

    @settings(max_examples=examples(200), deadline=None)
    @given(STREAMS, st.lists(st.integers(1, 60), min_size=8, max_size=8), BLOCK_COUNTS, st.sampled_from([1, 2, 8]))
    def test_every_request_is_predicted_to_the_token_and_every_path_is_held_as_far_as_the_tree_says(
        self, stream: list[list[int]], lengths: list[int], blocks: int | None, in_flight: int
    ) -> None:
        mirrored = Mirrored(lengths, None if blocks is None else blocks * BLOCK, in_flight)
        for predicted, true in map(mirrored.serve, stream):
            assert predicted == true
        for documents, node in mirrored.known_paths():
            assert mirrored.engine.cached_tokens(mirrored.prompt(documents)) == mirrored.tree.cached_tokens(node)


class TestFeedback:
    """Other users of the engine push our documents out, and the residency does not hear of it."""

    @staticmethod
    @cache
    def errors(feedback: bool, foreign_tokens: int) -> list[int]:
        """How far the first predictions after foreign traffic are off, in tokens."""
        workload = make_workload("zipf10", seed=1, requests=400, top_k=5)
        lengths = [document.token_count for document in workload.documents]
        mirrored = Mirrored(lengths, 40_000, feedback=feedback)
        for ranking in workload.rankings[:200]:
            predicted, true = mirrored.serve(ranking)
            assert predicted == true
        mirrored.serve_foreign(foreign_tokens)
        return [abs(predicted - true) for predicted, true in map(mirrored.serve, workload.rankings[200:])]

    @pytest.mark.parametrize("foreign_tokens", grid([30_000, 39_000], 1))
    def test_predictions_are_right_again_sooner_than_without(self, foreign_tokens: int) -> None:
        without, corrected = self.errors(False, foreign_tokens), self.errors(True, foreign_tokens)
        assert sum(without) > 0
        assert sum(corrected) < 0.7 * sum(without)
        assert sum(error > BLOCK for error in corrected) < 0.7 * sum(error > BLOCK for error in without)

    def test_a_little_foreign_traffic_makes_no_prediction_worse(self) -> None:
        assert sum(self.errors(True, 20_000)) <= sum(self.errors(False, 20_000))

    @pytest.mark.parametrize("feedback", [False, True])
    def test_one_lost_path_tells_of_all_that_was_used_before_it(self, feedback: bool) -> None:
        mirrored = Mirrored([200] * 8, 20_000, feedback=feedback)
        for documents in ([0, 1], [2, 3], [4, 5], [6, 7]):
            mirrored.serve(documents)
        mirrored.serve_foreign(19_900)
        mirrored.serve_foreign(19_900)
        predicted, true = mirrored.serve([6, 7])
        assert (predicted, true) == ((PREFIX + 400) // BLOCK * BLOCK, 0)
        right = [predicted == true for predicted, true in map(mirrored.serve, ([4, 5], [2, 3], [0, 1]))]
        assert right == [feedback] * 3

    @pytest.mark.parametrize("reported", [None, 0, 10**9])
    def test_what_was_predicted_and_more_changes_nothing(self, reported: int | None) -> None:
        residency = FeedbackResidency(LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(None, BLOCK)))
        serve(residency, "ab")
        lease = start(residency, "cd")
        exact = lease.cached_tokens if reported == 0 else reported
        residency.release(lease, exact)
        assert sorted(paths(residency.tree)) == ["", "a", "ab", "c", "cd"]

    def test_less_than_a_block_too_few_is_a_matter_of_tokenization(self) -> None:
        residency = FeedbackResidency(LRUResidency(KnowledgeTree(BLOCK, PREFIX), Pool(None, BLOCK)))
        serve(residency, "ab")
        serve(residency, "cd")
        lease = start(residency, "cd")
        residency.release(lease, lease.cached_tokens - BLOCK + 1)
        assert start(residency, "ab").cached_documents == 2
