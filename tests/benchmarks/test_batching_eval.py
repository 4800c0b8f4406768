"""RAGDoll's platforms on the virtual clock: layers, sizes, workers, systems, suites and their report."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder.benchmarks.doll.batching.experiment import SYSTEMS
from ragorder.benchmarks.doll.batching.generation import (
    ANSWER_TOKENS,
    QUESTION_TOKENS,
    BacklogSizes,
    FixedSizes,
    Line,
    Passes,
    Prompts,
    RateSizes,
    Served,
)
from ragorder.benchmarks.doll.batching.serving import rates, serve
from ragorder.benchmarks.doll.batching.settings import (
    FAR_AHEAD,
    PARTITIONS,
    SETTINGS,
    BatchingCell,
    Generator,
    stalls,
    step_seconds,
)
from ragorder.document import Document
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.data.corpora import Corpus, CorpusQuestion
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.virtual.loop import run_virtual

times = st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 5)), min_size=1, max_size=40)


class TestLayers:
    def test_read_when_needed_take_the_sum(self) -> None:
        assert step_seconds([1, 2, 3], [4, 5, 6], 0) == 21

    def test_read_one_ahead_take_the_longer_of_each_pair(self) -> None:
        # 1, then 4 beside 2, 5 beside 3, and 6.
        assert step_seconds([1, 2, 3], [4, 5, 6], 1) == 16
        assert step_seconds([3, 3, 3], [1, 1, 1], 1) == 10

    def test_read_far_ahead_let_a_short_layer_make_up_for_a_long_one(self) -> None:
        transfers, computes = [1, 1, 1, 9], [3, 3, 3, 1]
        assert step_seconds(transfers, computes, 1) == 1 + 3 + 3 + 9 + 1
        assert step_seconds(transfers, computes, 3) == 1 + 1 + 1 + 9 + 1

    @given(times)
    def test_never_take_longer_with_more_ahead_nor_less_than_either_part(self, pairs: Any) -> None:
        transfers, computes = map(list, zip(*pairs, strict=True))
        found = [step_seconds(transfers, computes, depth) for depth in (0, 1, 2, 40)]
        assert found == sorted(found, reverse=True)
        assert found[0] == pytest.approx(sum(transfers) + sum(computes))
        assert found[-1] >= max(sum(transfers), sum(computes)) - 1e-9

    def test_lose_nothing_without_jitter_and_most_where_both_take_as_long(self) -> None:
        assert stalls(80, 0.5, 1, 0.0) == pytest.approx(1, abs=1e-3)
        equal, bound = stalls(32, 1.0, 1, 1.0), stalls(32, 0.2, 1, 1.0)
        assert 1 < bound < equal < stalls(32, 1.0, 0, 1.0) < 2.1
        assert stalls(32, 1.0, FAR_AHEAD, 1.0) == 1


class TestSizes:
    def test_fixed_ones_wait_until_they_are_full_or_no_other_comes(self) -> None:
        sizes = FixedSizes(4)
        assert [sizes.next(waiting, 0, last=False) for waiting in (1, 3, 4, 9)] == [0, 0, 4, 4]
        assert sizes.next(3, 0, last=True) == 3

    def test_by_rate_are_four_minutes_at_most_so_many(self) -> None:
        rate = rates(Arrivals.parse("steps:4@20m,16@20m").steps)
        assert [rate(at) for at in (0, 1199, 1200, 9999)] == [4, 4, 16, 16]
        sizes = RateSizes(rate, 56)
        assert [sizes.next(100, at, last=False) for at in (0, 1200)] == [16, 56]
        assert sizes.next(15, 0, last=False) == 0

    def test_by_backlog_take_all_where_batches_cost_little_and_one_by_one_where_they_cost_all(self) -> None:
        assert BacklogSizes(lambda size: 100 + size, 64).next(50, 0, last=False) == 50
        assert BacklogSizes(lambda size: 10.0 * size, 64).next(50, 0, last=False) == 8
        assert BacklogSizes(lambda size: 100 + size, 22).next(50, 0, last=False) == 22

    def test_by_backlog_follow_the_times_that_are_learnt(self) -> None:
        sizes = BacklogSizes(lambda size: 100 + size, 64)
        for _ in range(200):
            for size in (8, 16, 32, 64):
                sizes.learn(size, 10.0 * size**1.2)
        assert sizes.next(50, 0, last=False) == 8


class TestCosts:
    def test_are_those_that_were_fitted(self) -> None:
        for setting in SETTINGS.values():
            for engine in setting.generators.values():
                assert engine.base_s > 0 and engine.request_s > 0
        generator = Generator.doubling(66, 50, 64)
        assert generator.seconds(50) == pytest.approx(66)
        assert generator.seconds(64) == pytest.approx(2 * generator.seconds(8))
        assert Generator.streaming(262, 44, 0.87, 48).seconds(44) == pytest.approx(262)

    def test_grow_with_the_documents_in_a_prompt(self) -> None:
        generator = SETTINGS["high-70b"].generator("prefetch", top_k=10)
        assert generator.most == 24
        assert generator.seconds(24, top_k=10) == SETTINGS["high-70b"].generator("prefetch").seconds(48)
        assert SETTINGS["high-8b"].generator("vllm", top_k=10).most == 56

    def test_leave_memory_for_partitions_as_in_figure_9(self) -> None:
        setting = SETTINGS["high-70b"]
        assert [setting.resident(batch) for batch in (16, 32, 48)] == [3, 3, 2]
        assert [round(setting.device_kv_share(batch), 2) for batch in (16, 48)] == [0.42, 0.14]
        assert setting.resident(10_000) == 0


def passes(requests_s: list[float], *, joined: bool, resident: int = 0) -> list[tuple[float, float]]:
    """(begin, end) of each request's search, with partitions of a second."""
    requests = [Served(number, at_s) for number, at_s in enumerate(requests_s)]

    async def main() -> None:
        import asyncio

        line, found = Line(), Line()
        worker = Passes(1.0, lambda: resident, lambda: 1.0)
        task = asyncio.ensure_future((worker.run_joined if joined else worker.run)(line, found))
        for request in requests:
            await asyncio.sleep(request.at_s - asyncio.get_running_loop().time())
            line.put(request)
        line.close()
        await task
        assert len(found) == len(requests)
        assert found.closed

    run_virtual(main())
    return [(request.search_s, request.found_s) for request in requests]


class TestPasses:
    def test_of_a_batch_begin_when_the_last_has_ended(self) -> None:
        assert passes([0, 10, 20], joined=False) == [(0, 32), (32, 64), (32, 64)]

    def test_are_shorter_by_the_partitions_in_memory(self) -> None:
        assert passes([0], joined=False, resident=8) == [(0, 24)]

    def test_are_joined_at_the_next_partition_and_see_each_one_once(self) -> None:
        assert passes([0, 9.5, 20.5], joined=True) == [(0, 32), (10, 42), (21, 53)]
        # Eight of the partitions take no time: every request waits for the other 24.
        assert [end - begin for begin, end in passes([0, 9.5, 19.5], joined=True, resident=8)] == [24, 24, 24]
        assert passes([0, 100], joined=True)[1] == (100, 100 + PARTITIONS)


def corpus(shared: bool) -> Corpus:
    """Each question has a document of its own, and two that all have, or none has."""
    common = [Document(f"common {number}", tokens=100) for number in range(2)]
    own = [Document(f"own {number}", tokens=100) for number in range(300)]
    rankings = [
        [2 + number, 0, 1] if shared else [2 + number, 2 + (number + 100) % 300, 2 + (number + 200) % 300]
        for number in range(100)
    ]
    questions = [CorpusQuestion(str(number), f"question {number}") for number in range(100)]
    return Corpus("small", [*common, *own], questions, rankings)


STEPS = "steps:4@5m,16@5m"


def served(policy: str, setting: str = "high-70b", *, shared: bool = True, steps: str = STEPS, **fields: Any) -> Any:
    cell = BatchingCell(setting=setting, steps=steps, **fields)
    arrivals = cell.arrivals
    count = arrivals.count or 0
    at_s = [each.at_s for each in arrivals.draw(count, 0)]
    prompts = Prompts.of(corpus(shared), count, top_k=cell.top_k, seed=0)
    return run_virtual(serve(SYSTEMS[policy], cell, at_s, arrivals.steps, prompts))


def latency(found: Any) -> float:
    return fmean(found["rows"]["latency_s"])


class TestPrompts:
    def test_have_the_tokens_of_their_documents_wherever_these_stand(self) -> None:
        prompts = Prompts.of(corpus(True), 100, top_k=3, seed=0)
        first, second, third = prompts.documents[0]
        ids = prompts.token_ids(0, [first, second, third])
        assert len(ids) == 300 + QUESTION_TOKENS
        assert prompts.token_ids(0, [third, first, second])[100:200] == ids[:100]
        assert prompts.mean_tokens == 300 + QUESTION_TOKENS + ANSWER_TOKENS
        assert set(prompts.token_ids(1, [])) & set(ids) == set()


class TestSystems:
    @pytest.mark.parametrize("policy", SYSTEMS)
    @pytest.mark.parametrize("setting", ["low-8b", "high-70b"])
    def test_answer_every_request_after_its_parts(self, policy: str, setting: str) -> None:
        found = served(policy, setting)
        rows = found["rows"]
        assert len(rows["latency_s"]) == 100
        parts = zip(*(rows[name] for name in ("waiting_s", "retrieval_s", "generation_s", "latency_s")), strict=True)
        for waiting, retrieval, generation, whole in parts:
            assert min(retrieval, generation) > 0
            assert waiting >= 0
            assert waiting + retrieval + generation == pytest.approx(whole, abs=0.3)
        facts = found["facts"]
        assert facts["generating_s"] <= facts["total_s"]
        batches = [moment[1] for moment in facts["trace"]]
        if not SYSTEMS[policy].joined:
            assert sum(batches) == 100

    def test_take_the_same_times_in_every_run(self) -> None:
        assert served("ours") == served("ours")

    def test_are_faster_pipelined_with_backlog_prefetch_and_placement(self) -> None:
        load = "steps:8@10m,16@20m"
        seconds = {policy: latency(served(policy, steps=load)) for policy in SYSTEMS}
        assert seconds["ragdoll"] < seconds["vllmrag"] < seconds["accrag"]
        for part in ("serial", "fixed", "depth1", "unplaced"):
            assert seconds["ragdoll"] < seconds[f"ragdoll-{part}"]
        assert seconds["ragdoll-depth1"] < seconds["ragdoll-depth0"]
        assert seconds["ours+passes"] < seconds["ours"] < seconds["joined"] < seconds["ragdoll"]

    @pytest.mark.parametrize("setting", ["low-8b", "high-70b"])
    def test_are_as_fast_on_the_products_own_server(self, setting: str) -> None:
        load = "steps:8@10m,16@20m"
        seconds = {
            policy: latency(served(policy, setting, steps=load))
            for policy in ("ragdoll", "server", "ours", "ours-server", "ours+passes", "ours-server+passes")
        }
        assert seconds["server"] == pytest.approx(seconds["ragdoll"], rel=0.05)
        assert seconds["ours-server"] == pytest.approx(seconds["ours"], rel=0.1)
        assert seconds["ours-server+passes"] == pytest.approx(seconds["ours+passes"], rel=0.1)

    def test_keep_no_prefix_where_nothing_is_shared(self) -> None:
        facts = served("ours", shared=False)["facts"]
        assert facts["computed_tokens"] == facts["prompt_tokens"]
        facts = served("ours")["facts"]
        assert facts["computed_tokens"] < 0.7 * facts["prompt_tokens"]

    def test_batches_rise_with_the_backlog_and_fall_within_one_after_it(self) -> None:
        found = served("ragdoll", steps="steps:4@20m,16@20m,1@40m")
        moments = found["facts"]["trace"]
        most = max(moment[1] for moment in moments)
        assert most == 48
        assert moments[0][1] < most
        # Each batch is all that waits, or full: there is no batch between the end of a backlog and a smaller one.
        assert all(size == min(most, size + waiting) for _, size, waiting, *_ in moments)
        assert max(waiting for _, _, waiting, *_ in moments) > most
        assert moments[-1][1] < most

    def test_are_dissected_by_what_is_set(self) -> None:
        def parts(**fields: Any) -> tuple[float, float]:
            rows = served("ragdoll-serial", batch=8, **fields)["rows"]
            return fmean(rows["retrieval_s"]), fmean(rows["generation_s"])

        none, half = parts(resident=0), parts(resident=16)
        assert half[0] == pytest.approx(none[0] / 2)
        assert half[1] == none[1]
        more = parts(resident=0, weights=0.5)
        assert more[0] == none[0]
        assert more[1] < none[1]


class TestThePaper:
    """Means of one seed; the suites run three."""

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_has_ratios_that_the_model_reproduces_within_15_percent(self, setting: str) -> None:
        steps = BatchingCell().steps
        paper = SETTINGS[setting].paper
        found = latency(served("vllmrag", setting, steps=steps)) / latency(served("ragdoll", setting, steps=steps))
        assert found == pytest.approx(paper["vllmrag"].latency / paper["ragdoll"].latency, rel=0.15)


class TestSuites:
    def test_name_known_settings(self) -> None:
        with pytest.raises(SuiteError, match="high-70b"):
            BatchingCell.read({"setting": "high-70"}, "mine")
        with pytest.raises(SuiteError, match="steps"):
            BatchingCell.read({"steps": "poisson:2"}, "mine")
        with pytest.raises(SuiteError, match="choose another setting"):
            BatchingCell.read({"setting": "high-8b", "weights": 0.5}, "mine")
