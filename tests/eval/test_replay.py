"""Replaying a log: an engine exact to the block, the figures of the benchmark, and what is made of them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benched import run_bench
from support.inside import replay_in_worker, set_bounds
from support.replayed import Steps, exported, line, rankings, read, written
from support.rings import examples, grid, length

from ragorder.eval.data.arrivals import Arrival, Arrivals, poisson_arrivals
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.replay import REPLAY_POLICIES, Log, LogBuilder, ReplayError, ReplayReport, replay, sweep
from ragorder.eval.replay.engine import PathPrompt, make_engine
from ragorder.eval.replay.overlap import Overlap, measure_overlap
from ragorder.eval.replay.report import CapacityInfo, LogInfo
from ragorder.eval.replay.runs import PolicyFigures, Setup
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.specs import Bench

pytestmark = pytest.mark.merge


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)


def random_log(seed: int, requests: int = 60, documents: int = 12, tenants: int = 1, k: int = 4) -> Log:
    rng = random.Random(seed)
    builder = LogBuilder()
    for number in range(requests):
        drawn = [rng.randrange(documents) for _ in range(rng.randint(0, k))]
        builder.add(
            float(number),
            drawn,
            [each * 37 % 90 for each in drawn],
            tenant=f"tenant {rng.randrange(tenants)}",
            prefix_tokens=40,
            suffix_tokens=rng.randint(1, 30),
            output_tokens=rng.randint(0, 20),
        )
    return builder.build("random")


def cached(report: ReplayReport) -> dict[tuple[str, int | None], int]:
    return {(figures.policy, figures.capacity_tokens): figures.cached_tokens for figures in report.figures}


def token_ids(prompt: PathPrompt, lengths: Sequence[int], prefixes: Sequence[int], number: int) -> array[int]:
    """The tokens of a prompt: those of its scope's documents, and at its end some that no other has."""
    ids = array("q", range(prompt.scope * 10**9, prompt.scope * 10**9 + prefixes[prompt.scope]))
    for document in prompt.documents:
        first = prompt.scope * 10**9 + (document + 1) * 10**6
        ids.extend(range(first, first + lengths[document]))
    ids.extend(range(10**12 + number * 1_000, 10**12 + number * 1_000 + prompt.suffix_tokens))
    return ids


class TestTheEngine:
    """What it finds cached is what the simulated engine finds that hashes every block."""

    @settings(max_examples=examples(200))
    @given(st.data())
    def test_equals_the_one_that_hashes_every_block(self, data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=10))
        prefixes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
        size = data.draw(st.sampled_from([1, 3, 16]))
        capacity = data.draw(st.none() | st.integers(1, 60) | st.integers(60, 1_500))
        hashing = SimEngine(block_size=size, capacity_tokens=capacity, output_tokens=7)
        engine = make_engine(lengths, prefixes, block_size=size, capacity_tokens=capacity, output_tokens=7)
        prompts = st.builds(
            PathPrompt,
            st.integers(0, len(prefixes) - 1),
            st.lists(st.integers(0, len(lengths) - 1), max_size=5),
            st.integers(1, 9),
        )
        running: list[tuple[int, int]] = []
        for number in range(data.draw(st.integers(1, 50))):
            if running and data.draw(st.booleans()):
                one, other = running.pop(data.draw(st.integers(0, len(running) - 1)))
                hashing.finish(one)
                engine.finish(other)
                continue
            prompt, answer = data.draw(prompts), data.draw(st.none() | st.integers(0, 40))
            ids = token_ids(prompt, lengths, prefixes, number)
            assert engine.has_room(prompt, answer) == hashing.has_room(ids, answer)
            (expected, one), (found, other) = hashing.admit(ids, answer), engine.admit(prompt, answer)
            assert found == expected
            running.append((one, other))

    @pytest.mark.parametrize("capacity", [None, 1_000])
    def test_passes_over_documents_without_tokens(self, capacity: int | None) -> None:
        engine = make_engine([0, 64, 32], [16], block_size=16, capacity_tokens=capacity, output_tokens=8)
        found = [
            engine.admit(PathPrompt(0, documents, 3))[0].cached_tokens for documents in ([0, 1], [1, 2], [1, 0, 2])
        ]
        assert found == [0, 80, 112]

    def test_does_not_grow_by_what_it_gave_up(self) -> None:
        engine = make_engine(range(1, 2_001), [16], block_size=16, capacity_tokens=4_096, output_tokens=8)

        def serve(rounds: range) -> int:
            for first in rounds:
                _, handle = engine.admit(PathPrompt(0, range(first, first + 5), 3))
                engine.finish(handle)
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            early, late = serve(range(1_000, 1_200)), serve(range(1_200, 1_990))
        finally:
            tracemalloc.stop()
        assert late < 1.5 * early


POLICIES = ("retrieval", "greedy", "prefix", "frequency", "popularity", "free")


class TestTheFiguresAreThoseOfTheBenchmark:
    """To the token: the same trace, policy and capacity."""

    @pytest.mark.parametrize(
        ("workload", "capacity", "block_size", "seed"),
        [
            *grid(list(product(["paper-shuf", "zipf10"], ["300", "4000", "20000", "unlimited"], [16], [0, 1])), 4),
            *product(["geo"], ["9000"], [1, 32], [0]),
        ],
    )
    def test_one_request_at_a_time(self, workload: str, capacity: str, block_size: int, seed: int) -> None:
        limit = length(300, 120)
        log = exported(make_workload(workload, seed), limit=limit)
        report = replay(log, policies=POLICIES, capacities=[capacity], sweep=(), block_size=block_size)
        sizes = {"capacity": Capacity.parse(capacity), "block_size": block_size, "limit": limit}
        bench = Bench(workloads=[workload], policies=POLICIES, seeds=[seed], **sizes)
        for figures, result in zip(report.figures, run_bench(bench), strict=True):
            for name in ("policy", "capacity_tokens", "prompt_tokens", "cached_tokens", "cached_ratio"):
                assert getattr(figures, name) == getattr(result, name)

    @pytest.mark.parametrize("capacity", grid(["6000", "40000", "unlimited"], 1))
    def test_under_load_at_the_recorded_times(self, capacity: str) -> None:
        arrivals = poisson_arrivals(4.0, 253, seed=0)
        log = exported(make_workload("zipf10", 0), arrivals, limit=253)
        rates = {"prefill_tokens_per_s": 9_000.0, "decode_tokens_per_s": 12.0}
        report = replay(log, policies=POLICIES, capacities=[capacity], sweep=(), **rates)
        timed = {"arrivals": Arrivals("poisson:4", rate=4.0), "service_times": ServiceTimes(**rates)}
        sizes = {"capacity": Capacity.parse(capacity), "limit": 253}
        bench = Bench(workloads=["zipf10"], policies=POLICIES, **sizes, **timed)
        results = run_bench(bench)
        assert [each.cached_tokens for each in report.figures] == [each.cached_tokens for each in results]
        assert all(figures.in_flight_mean > 3 for figures in report.figures)

    def test_with_answers_of_recorded_lengths(self) -> None:
        rng = random.Random(5)
        arrivals = [Arrival(number * 0.4, rng.randrange(1, 200)) for number in range(200)]
        log = exported(make_workload("paper-shuf", 0), arrivals, limit=200)
        report = replay(log, policies=POLICIES, capacities=[15_000], sweep=(), prefill_tokens_per_s=4_000)
        times = ServiceTimes(prefill_tokens_per_s=4_000)
        timed = {"arrivals": Arrivals("recorded", trace=arrivals), "service_times": times}
        bench = Bench(workloads=["paper-shuf"], policies=POLICIES, capacity=Capacity(15_000), **timed)
        assert [each.cached_tokens for each in report.figures] == [each.cached_tokens for each in run_bench(bench)]


class TestTenants:
    def test_share_nothing(self) -> None:
        lines = (line("abcde", number, tenant=name) for number, name in enumerate(("me", "you", "me")))
        report = replay(read(*lines), policies=POLICIES, capacities=["unlimited"], sweep=())
        # Only the third request finds anything: its own first one, up to the block in which the question begins.
        assert set(cached(report).values()) == {(64 + 5 * 256) // 16 * 16}

    def test_with_an_unlimited_cache_each_is_served_as_if_alone(self) -> None:
        workload = make_workload("paper-shuf", 0)
        rng = random.Random(1)
        lines = [
            line([f"d{d}" for d in ranking], number, tokens=[180 + d % 41 for d in ranking], tenant=rng.choice("xyz"))
            for number, ranking in enumerate(workload.rankings[:300])
        ]
        logs = (read(*(each for each in lines if each["tenant"] in tenants)) for tenants in ("xyz", "x", "y", "z"))
        together, *alone = (replay(log, policies=POLICIES, capacities=["unlimited"], sweep=()) for log in logs)
        assert together.log.tenants == 3
        for key, tokens in cached(together).items():
            assert tokens == sum(cached(report)[key] for report in alone)
        assert together.overlap.bound_tokens == sum(report.overlap.bound_tokens for report in alone)

    def test_share_the_room(self) -> None:
        """What one tenant does costs another one cached tokens where the cache is small."""
        mine = [line("ab", 2 * number, tenant="me", tokens=100) for number in range(20)]
        yours = [line([f"d{number}"], 2 * number + 1, tenant="you", tokens=300) for number in range(20)]
        alone = replay(read(*mine), capacities=[400], sweep=())
        both = replay(read(*mine, *yours), capacities=[400], sweep=())
        assert alone.at("retrieval", alone.capacities[0]).cached_tokens == 19 * ((64 + 200) // 16 * 16)
        assert both.at("retrieval", both.capacities[0]).cached_tokens < 19 * (64 + 200) // 2
        assert both.log.out_of_order == 1


class TestOverlap:
    @pytest.mark.parametrize("seed", grid(range(20), 6))
    def test_no_policy_reuses_more_than_the_bounds(self, seed: int) -> None:
        log = random_log(seed, tenants=1 + seed % 3)
        report = replay(log, policies=REPLAY_POLICIES, capacities=["unlimited"], block_size=1 + seed % 7)
        assert report.overlap.exact
        for figures in report.figures:
            assert figures.cached_ratio <= report.overlap.one_prompt_ratio <= report.overlap.bound_ratio
            assert figures.cached_tokens <= report.overlap.bound_tokens

    @pytest.mark.parametrize("seed", grid(range(10), 4))
    def test_is_that_of_comparing_all_with_all(self, seed: int) -> None:
        log = random_log(seed, tenants=2)
        seen, sharing, jaccard, one_prompt = 0, 0, 0.0, 0
        for row, ranking in enumerate(rankings(log)):
            earlier = [other for other in range(row) if log.scopes[other] == log.scopes[row]]
            sets = [set(log.ranking(other)) for other in earlier]
            before = set().union(*sets)
            prefix = 40 if earlier else 0
            seen += (prefix + sum(log.document_tokens[d] for d in ranking if d in before)) // 16 * 16
            common = [sum(log.document_tokens[d] for d in ranking if d in other) for other in sets]
            one_prompt += (prefix + max(common, default=0)) // 16 * 16
            sharing += any(len(other & set(ranking)) >= 2 for other in sets)
            jaccard += max(
                (len(other & set(ranking)) / len(other | set(ranking)) for other in sets if other | set(ranking)),
                default=0.0,
            )
        overlap = measure_overlap(log, 16)
        assert overlap.bound_tokens == seen
        assert overlap.one_prompt_ratio == pytest.approx(one_prompt / overlap.prompt_tokens, abs=1e-6)
        assert overlap.sharing_two_ratio == pytest.approx(sharing / len(log), abs=1e-6)
        assert overlap.jaccard_mean == pytest.approx(jaccard / len(log), abs=1e-6)

    def test_says_what_is_new_and_what_is_a_question(self) -> None:
        overlap = measure_overlap(read(line("ab", tokens=100), line("bc", 1, tokens=100)), 16)
        assert overlap.prompt_tokens == 2 * (64 + 200 + 20)
        assert overlap.suffix_ratio == pytest.approx(40 / 568, abs=1e-6)
        assert overlap.first_seen_ratio == pytest.approx((64 + 200 + 100) / 568, abs=1e-6)
        assert overlap.bound_tokens == (64 + 100) // 16 * 16

    def test_of_many_requests_is_estimated_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = exported(make_workload("paper-shuf", 0, requests=2_000), limit=2_000)
        whole = measure_overlap(log, 16)
        assert whole.exact
        assert whole.compared_requests == 2_000
        set_bounds(monkeypatch, compared_requests=300)
        steps = Steps()
        sampled = measure_overlap(log, 16, steps("", 0))
        assert not sampled.exact
        assert 200 < sampled.compared_requests <= 300
        assert steps.done[""] == sampled.compared_requests
        assert sampled.one_prompt_ratio == pytest.approx(whole.one_prompt_ratio, abs=0.05)
        assert sampled.jaccard_mean == pytest.approx(whole.jaccard_mean, abs=0.05)
        assert sampled.bound_ratio == whole.bound_ratio

    def test_of_documents_that_many_requests_had_is_with_the_latest_of_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, comparisons=1)
        first, others = line("abx", 0), [line("ab", number) for number in range(1, 30)]
        overlap = measure_overlap(read(first, *others, line("abx", 30)), 16)
        assert not overlap.exact
        # Seen from the last request, the first one lies too far back: two of three is the most that others have.
        assert overlap.jaccard_mean == pytest.approx((2 / 3 + 28 + 2 / 3) / 31, abs=1e-6)


class TestCapacities:
    def sizes(self, *capacities: Any, **options: Any) -> list[tuple[str, int | None, bool]]:
        log = exported(make_workload("paper-shuf", 0), limit=600)
        report = replay(log, policies=(), capacities=capacities, **options)
        return [(each.name, each.tokens, each.asked) for each in report.capacities]

    def test_are_shares_of_the_documents_and_unlimited(self) -> None:
        whole = exported(make_workload("paper-shuf", 0), limit=600).working_set_tokens
        shares = (5, 10, 25, 50, 100)
        expected = [(f"{share} %", whole * share // 100, False) for share in shares]
        assert self.sizes() == [*expected, ("unlimited", None, False)]

    def test_that_are_asked_for_join_the_sweep_in_order_of_size(self) -> None:
        names = [name for name, _, asked in self.sizes(30_000, "7.5%") if asked or name == "unlimited"]
        assert names == ["7.5 %", "30,000 tokens", "unlimited"]
        assert len(self.sizes(30_000, "7.5%")) == 8

    def test_of_one_size_are_one(self) -> None:
        assert [name for name, _, asked in self.sizes("5%", "unlimited") if asked] == ["5 %", "unlimited"]
        assert len(self.sizes("5%", "unlimited")) == 6

    def test_of_the_sweep_that_hold_no_prompt_are_left_out_and_noted(self) -> None:
        report = replay(read(line("abcd", tokens=100), line("efgh", 1, tokens=100)))
        assert [each.name for each in report.capacities] == ["100 %", "unlimited"]
        assert report.left_out == ["5 %", "10 %", "25 %", "50 %"]
        longest = "the longest prompt with its answer takes 516 tokens"
        assert report.notes == [f"caches of 5 %, 10 %, 25 %, 50 % were left out: {longest}"]

    def test_that_are_asked_for_and_hold_no_prompt_are_replayed_and_noted(self) -> None:
        report = replay(read(line("abcd", tokens=100)), capacities=[128], sweep=())
        assert report.notes == ["no engine has a cache of 128 tokens: the longest prompt with its answer takes 516"]


class TestPolicies:
    def test_retrieval_order_is_always_the_baseline(self) -> None:
        log = random_log(0)
        assert replay(log, policies=["free"]).policies == ["retrieval", "free"]
        assert replay(log, policies=["prefix", "retrieval", "prefix"]).policies == ["retrieval", "prefix"]
        assert replay(log).policies == ["retrieval", "greedy", "earned", "free"]

    def test_keep_to_the_settings_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = exported(make_workload("paper-shuf", 0), limit=200)
        monkeypatch.setenv("RAGORDER_KEEP_FIRST", "5")
        guarded = replay(log, capacities=["unlimited"], sweep=(), policies=["free"])
        plain, ordered = guarded.figures
        assert ordered.cached_tokens == plain.cached_tokens
        monkeypatch.setenv("RAGORDER_KEEP_FIRST", "1")
        less = replay(log, capacities=["unlimited"], sweep=(), policies=["free"])
        assert less.figures[1].cached_tokens > ordered.cached_tokens

    def test_a_log_has_no_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = exported(make_workload("paper-shuf", 0), limit=50)
        free = replay(log, policies=["free"]).figures
        monkeypatch.setenv("RAGORDER_KEEP_GROUPS", "1")
        assert replay(log, policies=["free"]).figures == free


ROUNDING = "no more than rounding to whole blocks explains"


def report_of(*gains: int, asked: int | None = None, rate: float | None = None) -> ReplayReport:
    """A report of 100 requests of 1,000 tokens. Retrieval order reuses a fifth, and auto so many more in all, at one
    capacity after the other."""
    capacities = [CapacityInfo(f"{1_000 * (n + 1):,} tokens", 1_000 * (n + 1), n == asked) for n in range(len(gains))]
    figures = [
        PolicyFigures(policy, capacity.tokens, 100_000, tokens, tokens / 100_000, [tokens / 100_000])
        for capacity, gain in zip(capacities, gains, strict=True)
        for policy, tokens in (("retrieval", 20_000), ("earned", 20_000 + gain))
    ]
    return ReplayReport(
        LogInfo("log", 100, 99.0, 1, 1, 50, 5.0, 10_000, 1_000.0, 1_000, 0),
        Overlap(100_000, 90_000, 0.9, 0.05, 0.05, 0.8, 0.5, 0.7, 100, True),
        capacities,
        figures,
        block_size=16,
        prefill_tokens_per_s=rate,
        seconds=2.0,
    )


class TestTheSaving:
    def test_is_what_auto_spares_of_retrieval_orders_prefill(self) -> None:
        (saving,) = report_of(16_000).savings
        assert (saving.policy, saving.saved_tokens, saving.share_of_prefill) == ("earned", 16_000, 16_000 / 80_000)
        assert (saving.tokens_per_1000_requests, saving.seconds_per_1000_requests) == (160_000, None)
        assert report_of(16_000, rate=8_000).savings[0].seconds_per_1000_requests == 20.0

    @pytest.mark.parametrize(
        ("gain", "verdict", "reason"),
        [
            (0, "not worth it", f"0.0 tokens a request: {ROUNDING}: not worth it"),
            (1_599, "not worth it", f"2.0 % of the prefill, 16.0 tokens a request: {ROUNDING}"),
            (-1_599, "not worth it", ROUNDING),
            (1_600, "helps a little", "little, yet more than rounding to whole blocks explains"),
            (3_999, "helps a little", "little, yet more than rounding to whole blocks explains"),
            (
                4_000,
                "helps",
                "at 1,000 tokens ragorder (earned) saves 5.0 % of the prefill, 40.0 tokens a request: worth it",
            ),
            (-1_600, "costs", "retrieval order reuses more; leave it as it is"),
        ],
    )
    def test_has_an_honest_verdict(self, gain: int, verdict: str, reason: str) -> None:
        (saving,) = report_of(gain).savings
        assert saving.verdict == verdict
        assert reason in saving.says

    @pytest.mark.parametrize(
        ("gains", "asked", "answer"),
        [
            ((0, 8_000, 16_000), None, "Yes: {} saves 10.0 to 20.0 % of the prefill tokens at 2 of the 3 capacities."),
            ((8_000, 16_000, 2_000), None, "Yes: {} saves 2.5 to 20.0 % of the prefill tokens at all capacities."),
            ((16_000,), None, "Yes: {} saves 20.0 % of the prefill tokens at all capacities."),
            ((0, 2_000), None, "A little: {} saves 2.5 % of the prefill tokens at 1 of the 2 capacities."),
            ((0, -9_000), None, "No: {} saves nothing worth having at any of these capacities."),
            ((16_000, 0), 1, "No: at 2,000 tokens {} saves 0.0 % of the prefill"),
            ((16_000, 0), 0, "Yes: at 1,000 tokens {} saves 20.0 %"),
        ],
    )
    def test_is_summed_up_or_that_of_the_capacity_asked_for(
        self, gains: tuple[int, ...], asked: int | None, answer: str
    ) -> None:
        assert report_of(*gains, asked=asked).answer.startswith(answer.format("ragorder (earned)"))

    def test_needs_something_to_compare_which_is_the_last_policy_where_auto_is_not_among_them(self) -> None:
        report = replay(random_log(0), policies=())
        assert report.savings == []
        assert report.answer == "Only retrieval order was replayed: there is nothing to compare it with."
        assert replay(random_log(0), policies=["prefix", "greedy"]).compared_policy == "greedy"
        assert replay(random_log(0), policies=["earned", "greedy"]).compared_policy == "earned"

    def test_figures_along_the_log_are_by_tenths(self) -> None:
        busy = [line("abcde", number, tokens=100) for number in range(50)]
        fresh = [line([f"{number} {rank}" for rank in range(5)], number, tokens=100) for number in range(50, 100)]
        report = replay(read(*busy, *fresh), capacities=["unlimited"], sweep=())
        tenths = report.at("free", report.capacities[0]).tenths
        assert len(tenths) == 10
        assert all(ratio > 0.9 for ratio in tenths[1:5])
        assert all(ratio < 0.12 for ratio in tenths[5:])


class TestProcesses:
    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_progress_is_that_of_all_of_them(self, tmp_path: Path, processes: int) -> None:
        path = written(tmp_path, *(line([f"d{n % 40}", f"d{n % 7}"], n) for n in range(400)))
        steps = Steps()
        report = replay(path, progress=steps, processes=processes, capacities=["50%"], sweep=())
        assert report.processes == processes
        replaying = f"replaying {len(report.figures)} times 400 requests"
        assert list(steps.announced) == ["reading log.jsonl", "comparing requests", replaying]
        assert steps.done == steps.announced

    def test_one_that_dies_ends_the_replay(self) -> None:
        def kill() -> None:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

        said = "a process of the replay died: if it ran out of memory, lower --processes"
        with pytest.raises(ReplayError, match=said):
            self.replay_and(kill)

    def test_workers_stop_at_the_next_step_once_their_results_are_not_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told, stop = array("q", [0]), SimpleNamespace(value=1)
        shared = random_log(0), Setup(), told, stop
        assert not replay_in_worker(monkeypatch, shared, sweep.ReplayJob("retrieval", None))
        assert list(told) == [1]

    def test_end_when_the_replay_is_interrupted(self) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.replay_and(interrupt)
        assert multiprocessing.active_children() == []

    def replay_and(self, disturb: Callable[[], None]) -> None:
        def progress(description: str, steps: int) -> Callable[[], None]:
            return disturb if description.startswith("replaying") else lambda: None

        replay(exported(make_workload("zipf10", 0)), progress=progress, processes=2)
