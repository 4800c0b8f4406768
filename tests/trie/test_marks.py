"""Caches that resume at marks: what lives and for how long, which path a request takes, and which marks it sets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples, grid

from ragorder.clouds.marks import MarkChoice, MarkRates, WriteBudget, best_marks, cell_of
from ragorder.clouds.residency import CacheReport, JunctionsResidency, MarkedFeedback, MarksResidency
from ragorder.clouds.rules import CacheRules
from ragorder.clouds.tree import MarkedPathSearch, MarkedTree
from ragorder.trie.residency import Lease, Pool
from ragorder.trie.search import ranks_on_path

SYSTEM = 100
TOKENS = 500
SUFFIX = 40
RULES = CacheRules("test", minimum_tokens=200, marks=4, ttl_s=300, write=1.25, read=0.1)
INTERVAL = CacheRules("test", minimum_tokens=1024, resume="interval", interval_tokens=128, marks=0, write=1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Marks(MarkChoice):
    """Sets the marks that a test says, and that of what is resumed."""

    def __init__(self, rules: CacheRules, *marks: int) -> None:
        super().__init__(rules, MarkRates(rules.ttl_s), WriteBudget())
        self.marks = marks

    def choose(self, keys: Sequence[object], ends: Sequence[int], held: int, *_: object) -> tuple[int, ...]:
        chosen = {mark for mark in self.marks if mark < len(ends) and ends[mark] >= self.rules.minimum_tokens}
        return tuple(sorted(chosen | ({held} if held >= 0 else set())))


def make(rules: CacheRules = RULES, *marks: int, max_nodes: int = 1000) -> tuple[MarksResidency, Clock]:
    clock = Clock()
    choice = Marks(rules, *marks) if marks else MarkChoice(rules, MarkRates(rules.ttl_s), WriteBudget())
    resides = JunctionsResidency if rules.resume == "junctions" else MarksResidency
    return resides(MarkedTree(SYSTEM, rules), Pool(None, 1, max_nodes), choice, clock), clock


def start(residency: MarksResidency, documents: str) -> Lease:
    residency.refresh()
    path = residency.tree.insert(documents, [TOKENS] * len(documents), range(len(documents)))
    return residency.lease(path, SUFFIX)


def serve(residency: MarksResidency, documents: str) -> Lease:
    lease = start(residency, documents)
    residency.release(lease)
    return lease


def paths(tree: MarkedTree) -> set[str]:
    found = {tree.root: ""}
    for node in tree.walk():
        if node.parent is not None:
            found[node] = found[node.parent] + str(node.key)
    return set(found.values())


def check(residency: MarksResidency) -> None:
    tree = residency.tree
    nodes = set(tree.walk())
    assert set(tree.marks) <= nodes
    assert tree.size == len(nodes) - 1 == residency.pool.nodes
    for node in nodes:
        assert node.children or node.leases or node in tree.marks or node is tree.root, "it leads to no mark"
        assert node.leases or node not in tree.pending
    in_flight = sum(each.suffix_blocks + each.partial_blocks for _, each in residency.pool.in_flight if each.open)
    assert residency.used_blocks == sum(node.blocks - node.missing for node in nodes) + in_flight


class TestResidency:
    def test_resumes_at_the_deepest_mark_that_both_share(self) -> None:
        residency, _ = make(RULES, 1, 3)
        serve(residency, "abcd")
        for documents, cached in (("abcd", 3), ("abcx", 3), ("abx", 1), ("ax", 1)):
            lease = start(residency, documents)
            assert (lease.cached_documents, lease.cached_tokens) == (cached, SYSTEM + cached * TOKENS)
            residency.cancel(lease)
        assert start(residency, "ba").cached_tokens == 0
        check(residency)

    def test_a_clock_that_goes_back_makes_nothing_younger_or_older(self) -> None:
        residency, clock = make(RULES, 2)
        serve(residency, "ab")
        clock.now += 200
        residency.refresh()
        for reading in (float("nan"), float("inf"), 1200.0, -2800.0):
            clock.now = reading
            assert start(residency, "ab").cached_tokens
        clock.now += 99
        assert start(residency, "ab").cached_tokens
        clock.now += 2
        assert start(residency, "ab").cached_tokens == 0

    def test_a_request_that_fails_after_its_first_token_has_written(self) -> None:
        residency, _ = make(RULES, 2)
        lease = start(residency, "ab")
        residency.publish(lease)
        residency.cancel(lease)
        assert start(residency, "ab").cached_documents == 2
        check(residency)

    @pytest.mark.parametrize("ends", [("release", "cancel"), ("cancel", "release"), ("release", "release")])
    def test_ending_a_lease_again_does_nothing(self, ends: tuple[str, str]) -> None:
        residency, _ = make(RULES, 2)
        lease = start(residency, "ab")
        getattr(residency, ends[0])(lease)
        before = paths(residency.tree), dict(residency.tree.marks), residency.choice.budget.balance
        getattr(residency, ends[1])(lease)
        residency.publish(lease)
        assert (paths(residency.tree), dict(residency.tree.marks), residency.choice.budget.balance) == before

    def test_a_forgotten_request_counts_as_served_in_the_end(self) -> None:
        residency, _ = make(RULES, 2)
        start(residency, "ab")
        for _ in range(1100):
            residency.release(start(residency, "xy"))
        assert start(residency, "ab").cached_documents == 2
        assert len(residency.plans) == 1

    def test_the_tree_is_bounded(self) -> None:
        residency, _ = make(RULES, 1, 2, max_nodes=50)
        rng = random.Random(0)
        for _ in range(500):
            serve(residency, "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 3)))
        assert residency.tree.size <= 50
        check(residency)

    def test_a_copy_is_independent_and_its_time_stands_still(self) -> None:
        residency, clock = make(RULES, 2)
        serve(residency, "ab")
        copy = residency.copy()
        clock.now += 1000
        assert start(copy, "ab").cached_documents == 2
        serve(copy, "xy")
        assert start(residency, "ab").cached_tokens == start(residency, "xy").cached_tokens == 0

    def test_the_tree_always_leads_to_marks(self) -> None:
        rng = random.Random(1)
        residency, clock = make(RULES)
        leases: list[Lease] = []
        for _ in range(3000):
            clock.now += rng.expovariate(1 / 5)
            leases.append(start(residency, "".join(rng.sample("abcdefgh", rng.randrange(6)))))
            for _ in range(2):
                lease = rng.choice(leases)
                rng.choice([residency.publish, residency.release, residency.cancel])(lease)
            leases = [lease for lease in leases if lease.open]
            check(residency)

    def test_cached_tokens_are_predicted_before_as_they_are_found(self) -> None:
        rng = random.Random(2)
        residency, clock = make(RULES)
        for _ in range(500):
            clock.now += rng.expovariate(1 / 20)
            documents = "".join(rng.sample("abcdefgh", 4))
            residency.refresh()
            node = residency.tree.root
            for document in documents:
                node = (node.children or {}).get(document, node)
            path, found = "", node
            while found.parent is not None:
                path, found = f"{found.key}{path}", found.parent
            if documents.startswith(path):
                predicted = residency.tree.cached_tokens(node)
                assert serve(residency, documents).cached_tokens == predicted


class TestIntervals:
    def test_resume_at_whole_ones_and_not_below_the_minimum(self) -> None:
        residency, _ = make(INTERVAL)
        serve(residency, "abc")
        found = [start(residency, documents).cached_tokens for documents in ("ax", "abx", "abc")]
        assert found == [0, (SYSTEM + 2 * TOKENS) // 128 * 128, (SYSTEM + 3 * TOKENS) // 128 * 128]

    def test_need_no_marks(self) -> None:
        residency, _ = make(INTERVAL)
        lease = start(residency, "abc")
        plan = residency.plans[lease]
        assert (plan.breakpoints, plan.written_tokens) == ((), 0)
        plan.report = CacheReport(0, 0, 1640)
        residency.release(lease)
        assert start(residency, "abc").cached_tokens, "a provider that takes nothing for writing reports no writes"


class TestJunctions:
    """Of hybrid models: measured on vLLM by tests/adapters/test_vllm_hybrid.py."""

    RULES = CacheRules(
        "test", resume="junctions", interval_tokens=256, marks=0, ttl_s=float("inf"), write=1.0, readable="start"
    )

    def test_resume_where_an_earlier_prompt_ended(self) -> None:
        residency, _ = make(self.RULES)
        serve(residency, "abc")
        assert serve(residency, "abc").cached_tokens == (SYSTEM + 3 * TOKENS + SUFFIX - 1) // 256 * 256 == 1536
        assert start(residency, "abcd").cached_tokens == 1536
        check(residency)

    def test_where_two_have_parted_the_third_resumes(self) -> None:
        residency, _ = make(self.RULES)
        serve(residency, "abc")
        found = [serve(residency, documents).cached_tokens for documents in ("abx", "aby", "abz")]
        assert found == [0, 1024, 1024], "the multiple of 256 below 1,100"
        check(residency)

    def test_what_is_shared_below_an_interval_is_never_kept(self) -> None:
        residency, _ = make(replace(self.RULES, interval_tokens=640))
        assert [serve(residency, documents).cached_tokens for documents in ("ab", "ac", "ad")] == [0, 0, 0]

    def test_a_request_joins_what_others_have_computed(self) -> None:
        """So that there is a junction."""
        residency, _ = make(self.RULES)
        serve(residency, "abc")
        node = MarkedPathSearch().find(residency.tree, {"x": 0, "b": 1, "a": 2})
        assert (node.key, residency.tree.resumable(node)) == ("b", 0)

    def test_what_is_evicted_is_forgotten_with_its_states(self) -> None:
        residency, _ = make(self.RULES, max_nodes=40)
        rng = random.Random(0)
        for _ in range(300):
            serve(residency, "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 3)))
            assert set(residency.tree.states) <= set(residency.tree.walk())
        assert residency.tree.size <= 40

    def test_a_copy_has_its_own(self) -> None:
        residency, _ = make(self.RULES)
        serve(residency, "abc")
        copy = residency.copy()
        assert start(copy, "abc").cached_tokens == 1536
        serve(copy, "xyz")
        assert start(residency, "xyz").cached_tokens == 0

    def test_a_state_that_is_not_found_is_gone(self) -> None:
        residency, _ = make(self.RULES)
        feedback = MarkedFeedback(residency)
        for documents in ("abc", "abd"):
            serve(residency, documents)
        feedback.release(start(residency, "abc"), 0)
        assert start(residency, "abc").cached_tokens == 1536, "it has computed it again"
        assert start(residency, "abx").cached_tokens == 0


BARELY_LESS = SYSTEM + 3 * TOKENS - 50


class TestReports:
    def make(self, *marks: int) -> tuple[MarksResidency, MarkedFeedback]:
        residency, _ = make(RULES, *marks)
        return residency, MarkedFeedback(residency)

    @pytest.mark.parametrize(
        ("marks", "set_again", "reported", "asked", "found"),
        [((1, 2, 3), (), SYSTEM + TOKENS, "abx", 1), ((1, 3), (1, 3), 0, "abc", 3), ((3,), (), BARELY_LESS, "abc", 3)],
        ids=["those before stay", "what was written again is there", "small differences are the provider's tokens"],
    )
    def test_entries_that_are_not_found_are_gone(
        self, marks: tuple[int, ...], set_again: tuple[int, ...], reported: int, asked: str, found: int
    ) -> None:
        residency, feedback = self.make(*marks)
        serve(residency, "abc")
        residency.choice.marks = set_again  # type: ignore[attr-defined]
        feedback.release(start(residency, "abc"), reported)
        assert start(residency, asked).cached_documents == found

    def test_a_prompt_that_is_counted_without_what_was_found_costs_what_was_found(self) -> None:
        residency, feedback = self.make(3)
        serve(residency, "abc")
        lease = start(residency, "abc")
        plan = residency.plans[lease]
        plan.report = CacheReport(1600, 0, 40)
        assert plan.tokens == (1600, 1600, 0)
        feedback.release(lease, 1600)

    def test_a_request_that_has_fewer_marks_than_planned_leaves_no_others(self) -> None:
        residency, _ = make(RULES, 1, 3)
        lease = start(residency, "abc")
        balance = residency.choice.budget.balance
        residency.keep_marks(lease, [1])
        assert residency.choice.budget.balance > balance
        assert residency.plans[lease].written_tokens == SYSTEM + TOKENS
        residency.release(lease)
        assert start(residency, "abc").cached_documents == 1
        check(residency)

    @pytest.mark.parametrize("when", ["it can be read", "it has ended", "it resumes at intervals"])
    def test_a_request_that_has_fewer_marks_too_late_or_needs_none_stays_as_it_is(self, when: str) -> None:
        residency, _ = make(*((INTERVAL,) if when == "it resumes at intervals" else (RULES, 1, 3)))
        lease = start(residency, "abc")
        if when == "it can be read":
            residency.publish(lease)
        elif when == "it has ended":
            residency.release(lease)
        balance = residency.choice.budget.balance
        residency.keep_marks(lease, [1])
        assert residency.choice.budget.balance == balance
        residency.release(lease)
        assert start(residency, "abc").cached_documents == 3
        check(residency)

    def test_a_request_without_marks_does_not_resume(self) -> None:
        residency, _ = make(RULES, 3)
        serve(residency, "abc")
        lease = start(residency, "abc")
        residency.keep_marks(lease, [])
        assert (lease.cached_tokens, residency.plans[lease].depths) == (0, [])
        residency.release(lease)
        assert start(residency, "abc").cached_documents == 3, "what lives goes on living"

    def test_unexpected_costs_are_not_spent_again(self) -> None:
        residency, feedback = self.make(3)
        serve(residency, "abc")
        balance = residency.choice.budget.balance
        lease = start(residency, "abc")
        gained = residency.choice.budget.balance - balance
        residency.plans[lease].report = CacheReport(0, 1600, 1640)
        feedback.release(lease, 0)
        assert residency.choice.budget.balance - balance < 0 < gained


class TestSearch:
    def find(self, residency: MarksResidency, documents: str, **options: object) -> str:
        ranks = {document: rank for rank, document in enumerate(documents)}
        node = MarkedPathSearch().find(residency.tree, ranks, **options)  # type: ignore[arg-type]
        return "".join(documents[rank] for rank in ranks_on_path(node, ranks))

    def test_takes_the_path_that_resumes_latest_and_ends_at_its_mark(self) -> None:
        residency, _ = make(RULES, 1, 3)
        serve(residency, "abcd")
        serve(residency, "xy")
        assert self.find(residency, "dcbax") == "abc"
        assert self.find(residency, "bax") == "x", "used last, and as long: b after a has no mark"
        assert self.find(residency, "by") == ""

    def test_joins_a_request_in_flight_that_writes_more(self) -> None:
        residency, _ = make(RULES, 1, 2)
        serve(residency, "ab")
        start(residency, "acb")
        assert self.find(residency, "cab") == "ab", "what can be read comes first"
        assert self.find(residency, "ca") == "ac"

    def test_looks_at_so_many_nodes(self) -> None:
        residency, _ = make(RULES, 1)
        for document in "abcdef":
            serve(residency, document)
        assert MarkedPathSearch(0).find(residency.tree, {"a": 0}) is residency.tree.root

    def test_keeps_within_what_is_permitted(self) -> None:
        residency, _ = make(RULES, 2)
        serve(residency, "ab")
        assert self.find(residency, "ab", permits=lambda ranks: ranks[0] != 0) == ""


class TestChoice:
    def choice(self, rules: CacheRules = RULES) -> MarkChoice:
        return MarkChoice(rules, MarkRates(rules.ttl_s), WriteBudget())

    def ends(self, documents: int) -> list[int]:
        return [SYSTEM + place * TOKENS for place in range(documents + 1)]

    def choose(self, choice: MarkChoice, documents: str, held: int = -1, now: float = 0.0) -> tuple[int, ...]:
        ends = self.ends(len(documents))
        return choice.choose(documents, ends, held, (), ends[-1] + SUFFIX, now)

    def test_marks_where_later_requests_part(self) -> None:
        choice = self.choice()
        for now in range(60):
            self.choose(choice, "ab" + "cdefghij"[now % 8], 2 if now else -1, float(now))
        assert 2 in self.choose(choice, "abx", -1, 60.0)

    def test_no_mark_is_spared_for_partings_before_the_first_document(self) -> None:
        choice = self.choice(replace(RULES, minimum_tokens=SYSTEM, write=1.0))
        for now in range(60):
            self.choose(choice, "abcd"[: 1 + now % 4] + chr(1000 + now), 0, float(now))
        assert len(self.choose(choice, "abcde", 0, 60.0)) == 4

    def test_stops_writing_what_nothing_reads(self) -> None:
        choice = self.choice(replace(RULES, minimum_tokens=SYSTEM + 1))
        unlike = ["".join(map(chr, range(1000 + 3 * number, 1003 + 3 * number))) for number in range(200)]
        written = [bool(self.choose(choice, each, -1, 2.0 * now)) for now, each in enumerate(unlike)]
        assert written[0] and not any(written[60:])

    def test_writes_what_has_come_before_where_what_is_new_seldom_comes_again(self) -> None:
        choice = self.choice(replace(RULES, minimum_tokens=SYSTEM + 1))
        for number in range(240):
            # One of 20 comes three times.
            for again in range(1 if number % 20 else 3):
                self.choose(choice, chr(1000 + number), -1, 2.0 * number + again / 2)
        assert [bool(self.choose(choice, "a", -1, 480.0 + again)) for again in range(2)] == [False, True]

    def test_of_a_dear_life_writes_only_what_has_been_asked_for(self) -> None:
        choice = self.choice(replace(RULES, ttl_s=3600, write=2.0))
        assert self.choose(choice, "abc") == ()
        for now in range(1, 8):
            marks = self.choose(choice, "abc", -1, float(now))
        assert marks and marks[-1] == 3

    def test_what_costs_nothing_to_write_is_written(self) -> None:
        choice = self.choice(replace(RULES, write=1.0))
        assert self.choose(choice, "abc")[-1] == 3

    @pytest.mark.parametrize(("read", "written"), [(0.8, False), (0.1, True)])
    def test_what_saves_less_than_its_writing_costs_is_not_written(self, read: float, written: bool) -> None:
        choice = self.choice(replace(RULES, read=read))
        for number in range(9):
            self.choose(choice, "abc", 3 if number else -1, 290.0 * number)
        assert (4 in self.choose(choice, "abcd", 3, 9 * 290.0)) == written

    def test_ten_thousand_documents(self) -> None:
        choice = self.choice()
        keys, ends = range(10_000), list(range(100, 10_101))
        assert len(choice.choose(keys, ends, -1, (), 10_140, 0.0)) <= 4
        marks = choice.choose(keys, ends, 10_000, (5, 9), 10_140, 1.0)
        assert marks[-1] == 10_000 and len(marks) <= 4

    def test_of_one_mark_that_is_found_by_looking_back_a_deeper_one_is_written(self) -> None:
        choice = self.choice(replace(RULES, marks=1, lookback_parts=20, minimum_tokens=SYSTEM))
        self.choose(choice, "abc")
        assert self.choose(choice, "abc", 0, 1.0) == (3,)

    def test_the_only_mark_moves_on_where_that_saves_more_than_reading_now(self) -> None:
        rules = replace(RULES, marks=1, minimum_tokens=SYSTEM)
        choice = self.choice(rules)
        for now in range(8):
            marks = self.choose(choice, "abc", 0, float(now))
        assert marks == (3,)
        choice = self.choice(rules)
        moved = [self.choose(choice, "abc", 2, float(now)) for now in range(8)]
        assert moved[0] == (2,), "it has more to lose than to gain"
        assert moved[-1] == (3,)

    @pytest.mark.parametrize(("marks", "lookback_parts"), grid(list(product([1, 2, 3, 4], [1, 2, 3, 20])), 6))
    def test_what_is_written_can_be_found_again(self, marks: int, lookback_parts: int) -> None:
        rules = replace(RULES, marks=marks, lookback_parts=lookback_parts)
        rng = random.Random(0)
        residency, clock = make(rules)
        read = 0
        for _ in range(400):
            clock.now += rng.expovariate(1 / 5)
            lease = start(residency, "".join(rng.sample("abcdef", rng.randrange(1, 6))))
            plan = residency.plans[lease]
            assert len(plan.breakpoints) <= marks
            if lease.cached_tokens:
                assert any(plan.resumed <= mark < plan.resumed + lookback_parts for mark in plan.breakpoints)
                assert lease.cached_tokens == lease.path[plan.resumed].end
                read += lease.cached_tokens > SYSTEM + TOKENS
            residency.release(lease)
            check(residency)
        assert read > 20, "deeper entries are written"

    def test_marks_that_live_are_renewed_where_there_is_room(self) -> None:
        choice = self.choice()
        ends = self.ends(4)
        assert choice.choose("abcd", ends, 4, (1, 3, 4), ends[-1] + SUFFIX, 0.0) == (1, 3, 4)

    def test_a_copy_learns_for_itself(self) -> None:
        choice = self.choice()
        for now in range(20):
            self.choose(choice.copy(), "abc", -1, float(now))
        other = self.choice()
        assert [self.choose(choice, "abc", -1, 30.0)] == [self.choose(other, "abc", -1, 30.0)]

    @settings(max_examples=examples(200))
    @given(
        st.lists(st.integers(0, 900), min_size=1, max_size=7),
        st.lists(st.floats(-0.3, 2.0), min_size=8, max_size=8),
        st.integers(0, 4),
    )
    def test_the_best_marks_are_those_of_all_subsets(self, lengths: list[int], rates: list[float], slots: int) -> None:
        ends = [100]
        for length in lengths:
            ends.append(ends[-1] + length)
        gains = {place: rates[place] for place in range(1, len(ends))}

        def gain(marks: Sequence[int]) -> float:
            before, found = ends[0], 0.0
            for mark in marks:
                found += (ends[mark] - before) * gains[mark]
                before = ends[mark]
            return found

        most = max(gain(marks) for size in range(slots + 1) for marks in combinations(gains, size))
        found = best_marks(ends, gains, ends[0], slots)
        assert len(found) <= slots
        assert gain(found) == pytest.approx(most, abs=1e-6)


class TestRates:
    def test_reads_that_do_not_come_lower_them(self) -> None:
        rates, cell = MarkRates(300), cell_of(0, 1)
        before = rates.expected(cell, 0.0)
        for number in range(10):
            rates.begin([cell], float(number))
        assert rates.expected(cell, 10.0) < before
        young = rates.expected(cell, 10.0)
        assert rates.expected(cell, 200.0) < young, "the older a sample, the more it says"

    def test_reads_raise_them(self) -> None:
        rates, cell = MarkRates(300), cell_of(0, 1)
        for number in range(20):
            rates.begin([cell], float(number))
            rates.passed(cell)
            rates.passed(cell)
        for number in range(20):
            rates.end([cell], float(number), 300.0 + number)
        assert rates.expected(cell, 400.0) == pytest.approx((0.5 + 40) / 21)

    def test_cells_differ_by_requests_and_by_documents_ahead(self) -> None:
        rates = MarkRates(300)
        assert rates.expected(cell_of(4, 1), 0) > rates.expected(cell_of(1, 1), 0) > rates.expected(cell_of(0, 1), 0)
        assert rates.expected(cell_of(0, 1), 0) > rates.expected(cell_of(0, 3), 0)
        assert cell_of(10**6, 10**6) == cell_of(8, 10)

    def test_old_samples_fade(self) -> None:
        rates, cell = MarkRates(300), cell_of(0, 1)
        for number in range(500):
            rates.begin([cell], float(number))
            rates.passed(cell)
            rates.end([cell], float(number), number + 300.0)
        for number in range(500, 1000):
            rates.begin([cell], float(number))
            rates.end([cell], float(number), number + 300.0)
        assert rates.expected(cell, 2000.0) < 0.05


class TestBudget:
    def test_stops_losses_however_much_was_saved_before(self) -> None:
        budget = WriteBudget()
        for _ in range(10_000):
            budget.add(1000.0, 500.0)
        lost = 0.0
        for _ in range(1000):
            surcharge = 250.0 if budget.allows(250.0, 1000.0) else 0.0
            budget.add(1000.0, 1000.0 + surcharge)
            lost += surcharge
        assert lost <= 0.015 * 1e6 + 8 * 1000 + 250

    def test_savings_pay_for_writes(self) -> None:
        budget, refused = WriteBudget(), 0
        for number in range(1000):
            cost = 600.0 if number % 2 else 1250.0
            refused += not budget.allows(max(0.0, cost - 1000), 1000.0)
            budget.add(1000.0, cost)
        assert refused == 0


class TestRules:
    def test_cost(self) -> None:
        assert RULES.cost(1000) == 1000
        assert RULES.cost(1000, cached_tokens=400, written_tokens=200) == pytest.approx(40 + 250 + 400)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("resume", "anywhere"), ("readable", "never"), ("minimum_tokens", -1), ("marks", -1), ("marks", 0)),
            *(("interval_tokens", 0), ("lookback_parts", 0), ("ttl_s", 0), ("ttl_s", float("nan")), ("write", -1.0)),
            ("read", float("inf")),
        ],
    )
    def test_impossible_figures_are_refused(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=field):
            replace(RULES, **{field: value})  # type: ignore[arg-type]
