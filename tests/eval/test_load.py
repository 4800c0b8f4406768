"""Load: clients, clocks, what an engine under load holds, and what is predicted of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.arrived import AZURE, TRACES, written
from support.benched import result_of, run_bench
from support.rings import grid

from ragorder import Document
from ragorder.eval.data.arrivals import Arrival, Arrivals, poisson_arrivals
from ragorder.eval.data.trace import Trace, trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.base import EngineCompletion, RequestError
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.load import (
    Load,
    ServiceTimes,
    interleave,
    serve_in_turn,
    serve_live,
    serve_live_in_turn,
    serve_virtual,
)
from ragorder.eval.running.policies import make_policy
from ragorder.eval.running.runner import Run
from ragorder.eval.running.specs import Bench

pytestmark = pytest.mark.merge


class Counting(SimEngine):
    """A simulated engine that knows how many requests hold blocks of it, and which prompts it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.open: set[int] = set()
        self.most = 0
        self.prompts: list[bytes] = []
        self.lengths: list[int | None] = []

    def admit(self, token_ids: Sequence[int], output_tokens: int | None = None) -> tuple[EngineCompletion, int]:
        assert not self.open or self.has_room(token_ids, output_tokens)
        completion, handle = super().admit(token_ids, output_tokens)
        self.open.add(handle)
        self.most = max(self.most, len(self.open))
        self.prompts.append(bytes(memoryview(token_ids)))  # type: ignore[arg-type]
        self.lengths.append(output_tokens)
        return completion, handle

    def finish(self, handle: int) -> None:
        self.open.remove(handle)
        super().finish(handle)


def trace_of(name: str = "paper-shuf", requests: int = 200) -> Trace:
    return trace_of_workload(make_workload(name, 0, requests=requests), requests)


def make_run(trace: Trace, engine: Any, policy: str = "prefix", **options: Any) -> Run:
    prompts = NumberedPrompts()
    return Run(trace, policy, make_policy(policy, engine=engine, prompts=prompts), engine, prompts, **options)


def drive(load: Load, *, policy: str = "prefix", trace: Trace | None = None, **options: Any) -> tuple[Any, Counting]:
    """A run on the virtual clock, served to the end."""
    trace = trace or trace_of()
    engine = Counting(**({"capacity_tokens": 100_000} | options))
    run = make_run(trace, engine, policy, load={"concurrency": load.concurrency, "arrivals": None})
    steps = sum(1 for _ in serve_virtual(run, engine, load, ServiceTimes()))
    assert steps == len(trace.requests)
    assert not engine.open
    assert run.in_flight == run.remaining == 0
    return result_of(run), engine


def every(seconds: float, requests: int = 200) -> list[Arrival]:
    return [Arrival(number * seconds) for number in range(requests)]


class TestOnTheVirtualClock:
    @pytest.mark.parametrize(
        "load", [*map(Load, (1, 3, 4, 16)), Load(arrivals=every(0.01)), Load(2, every(0.01)), Load(1000)]
    )
    def test_every_request_is_served_once_and_a_closed_loop_keeps_its_number_in_flight(self, load: Load) -> None:
        result, engine = drive(load)
        trace, prompts = trace_of(), NumberedPrompts()
        assert len(engine.prompts) == len(set(engine.prompts)) == result.requests == 200
        assert (result.failures, result.ttft_ms) == (0, None), "virtual times are not reported"
        assert result.prompt_tokens == sum(
            len(prompts.token_ids(number, request, request.documents)) for number, request in enumerate(trace.requests)
        )
        if load.concurrency in (1, 3, 4, 16):
            assert engine.most == load.concurrency
            assert result.tenths["in_flight"][1:] == [load.concurrency] * 9

    def test_an_open_loop_sends_whatever_is_in_flight_up_to_its_bound(self) -> None:
        """A request takes about 0.7 s here, and 100 arrive within 0.1 s."""
        for bound in (None, 7):
            load = Load(bound, every(0.001, 100))
            assert drive(load, trace=trace_of(requests=100), capacity_tokens=None)[1].most == (bound or 100)

    def test_the_number_in_flight_follows_from_the_load(self) -> None:
        few, many = (drive(Load(arrivals=every(gap)))[0].tenths["in_flight"] for gap in (2.0, 0.1))
        assert set(few) == {1.0}
        # An answer of 32 tokens takes 0.64 s at 50 tokens a second, prefill some hundredths: 6 to 7 and itself.
        assert all(6 < mean < 9 for mean in many[1:])

    def test_what_is_cached_makes_the_engine_faster(self) -> None:
        """At this load prefill is the bottleneck: requests pile up the less, the more is cached."""
        ordered, plain = (
            drive(Load(arrivals=every(0.05)), policy=policy)[0].tenths["in_flight"]
            for policy in ("prefix", "retrieval")
        )
        assert ordered[-1] < plain[-1]

    def test_answers_are_as_long_as_the_arrivals_say(self) -> None:
        arrivals = [Arrival(number * 0.1, number) for number in range(200)]
        assert drive(Load(arrivals=arrivals))[1].lengths == list(range(200))
        assert drive(Load(arrivals=arrivals, output_tokens=5))[1].lengths == [5] * 200
        assert drive(Load(2))[1].lengths == [None] * 200

    def test_a_request_without_room_waits_until_others_end(self) -> None:
        """Room for two prompts and a bit; `Counting.admit` checks that no request is evicted."""
        result, engine = drive(Load(8), policy="retrieval", trace=trace_of("ov0.0"), capacity_tokens=2_500)
        assert engine.most <= 3
        assert result.tenths["in_flight"][-1] == 8

    def test_a_prompt_larger_than_the_cache_is_served_alone(self) -> None:
        _, engine = drive(Load(8), capacity_tokens=500)
        assert engine.most == 1

    def test_runs_take_turns_and_the_first_one_changes(self) -> None:
        said: list[str] = []

        def driver(name: str) -> Iterator[None]:
            for _ in range(3):
                said.append(name)
                yield

        steps: list[None] = []
        interleave([driver(name) for name in "abc"], lambda: steps.append(None))
        assert "".join(said) == "abcbcacab"
        assert len(steps) == 9

    @pytest.mark.parametrize("in_flight", [1, 5])
    def test_in_turn_the_last_few_count_as_running(self, in_flight: int) -> None:
        engine = SimEngine(in_flight=in_flight)
        run = make_run(trace_of(), engine, load={})
        interleave([serve_in_turn(run, engine, in_flight)])
        result = result_of(run)
        assert (run.in_flight, result.prediction_within_block) == (0, 1)
        assert result.tenths["in_flight"][1:] == [in_flight] * 9


class TestAdmission:
    """Admit and finish are generate, taken apart."""

    def test_finishing_twice_is_finishing_once(self) -> None:
        engine = SimEngine(block_size=4, capacity_tokens=16, output_tokens=0)
        _, handle = engine.admit(range(8))
        engine.finish(handle)
        engine.finish(handle)
        assert engine.admit(range(9))[0].cached_tokens == 8

    @given(
        st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 9)), max_size=20),
        st.integers(1, 12),
        st.randoms(use_true_random=False),
    )
    @example([([0] * 4, 0), ([0] * 4 + [1], 1)], 4, Random(0))  # fits exactly beside what it shares
    def test_has_room_is_true_if_no_request_must_end(
        self, drawn: list[tuple[list[int], int]], blocks: int, rng: Any
    ) -> None:
        running: set[int] = set()

        class Ending(SimEngine):
            def finish(self, handle: int) -> None:
                running.discard(handle)
                super().finish(handle)

        engine = Ending(block_size=4, capacity_tokens=4 * blocks)
        for chunks, output_tokens in drawn:
            token_ids = [chunk for chunk in chunks for _ in range(3)]
            if running and rng.random() < 0.4:
                engine.finish(rng.choice(sorted(running)))
            room, before = engine.has_room(token_ids, output_tokens), set(running)
            handle = engine.admit(token_ids, output_tokens)[1]
            if before:
                assert (before <= running) == room
            running.add(handle)


class TestPredicting:
    @pytest.mark.parametrize(
        ("workload", "concurrency", "capacity"),
        grid(list(product(["paper-shuf", "mix8", "zipf10"], [1, 4, 16], [20_000, 100_000])), 7),
    )
    def test_the_mirror_is_exact_under_concurrency(self, workload: str, concurrency: int, capacity: int) -> None:
        result, _ = drive(Load(concurrency), trace=trace_of(workload, 400), capacity_tokens=capacity)
        assert result.prediction_within_block >= 0.99
        assert result.prediction_error_blocks_mean == pytest.approx(0, abs=0.05)
        assert result.prediction_bias_blocks == pytest.approx(0, abs=0.05)

    def test_is_exact_in_an_open_loop_with_answers_of_a_known_length(self) -> None:
        arrivals = poisson_arrivals(10.0, 400, seed=0)
        result, _ = drive(Load(arrivals=arrivals), trace=trace_of("zipf10", 400), capacity_tokens=50_000)
        assert result.prediction_within_block >= 0.99

    def test_answers_of_unknown_length_cost_little(self) -> None:
        """The policy is told the mean; the answers are anything from nothing to twice that, and end in any order."""
        arrivals = [
            replace(each, output_tokens=n * 37 % 401) for n, each in enumerate(poisson_arrivals(5.0, 600, seed=0))
        ]
        trace = trace_of("zipf10", 600)
        result, _ = drive(Load(arrivals=arrivals), trace=trace, capacity_tokens=100_000, output_tokens=200)
        assert result.prediction_within_block >= 0.95

    def test_errors_are_signed_and_absolute(self) -> None:
        """A tree that never forgets predicts too much, so that its bias is its error."""
        result, _ = drive(Load(4), policy="greedy", trace=trace_of("zipf10", 400), capacity_tokens=20_000)
        assert result.prediction_error_blocks_mean > 1
        assert result.prediction_bias_blocks == pytest.approx(result.prediction_error_blocks_mean, rel=0.2)

    def test_a_policy_that_predicts_nothing_has_no_error(self) -> None:
        result, _ = drive(Load(4), policy="retrieval")
        assert result.prediction_within_block is result.prediction_error_blocks_mean is None
        assert result.prediction_bias_blocks is None
        assert set(result.tenths["tree_nodes"]) == {None}


class TestNeverWorse:
    @pytest.mark.parametrize(
        ("workload", "percent", "concurrency"), grid(list(product(WORKLOADS, [2, 10, 100], [1, 4, 16])), 5)
    )
    def test_than_retrieval_order(self, workload: str, percent: int, concurrency: int) -> None:
        wanted = Bench(
            workloads=(workload,),
            policies=("retrieval", "prefix", "free"),
            capacity=Capacity(percent=percent),
            concurrency=concurrency,
            limit=300,
        )
        shares = {result.policy: 100 * result.cached_tokens / result.prompt_tokens for result in run_bench(wanted)}
        assert shares["prefix"] >= shares["retrieval"] + 3.5
        assert shares["free"] >= shares["retrieval"] + 4.0


class TestTenths:
    @pytest.mark.parametrize("requests", [1, 3, 10, 14, 200])
    def test_say_what_is_in_flight_and_what_memory_and_tree_are(self, requests: int) -> None:
        result, _ = drive(Load(4), trace=trace_of(requests=requests))
        assert {len(values) for values in result.tenths.values()} == {min(10, requests)}
        assert all(nodes and nodes > 0 for nodes in result.tenths["tree_nodes"])
        assert all(memory is None or memory > 10 for memory in result.tenths["rss_mb"])

    def test_of_a_failed_request_nothing_is_predicted_as_cached(self) -> None:
        trace, engine = trace_of(requests=2), SimEngine()
        run = make_run(trace, engine)
        run.fail(run.send())
        assert run.send().ordering.cached_tokens == 0
        assert run.in_flight == 1

    def test_the_same_seed_is_the_same_run(self) -> None:
        def figures() -> dict[str, Any]:
            arrivals = Arrivals.parse("poisson:9")
            wanted = Bench(
                workloads=("zipf10",), policies=("free",), arrivals=arrivals, concurrency=12, limit=150, seeds=(3,)
            )
            (result,) = run_bench(wanted)
            found = vars(result)
            del found["tenths"]["rss_mb"]
            return found

        assert figures() == figures()


@pytest.mark.slow
class TestAnHour:
    def test_of_a_services_traffic_is_served_in_steady_memory(self, tmp_path: Path) -> None:
        """The first thousands of requests of the trace, eight times as fast."""
        trace = TRACES / "azure_llm_2023_conv.csv.gz"
        if not trace.exists():
            lines = [f"2023-11-16 18:{n // 300:02}:{n // 5 % 60:02},500,{n * 31 % 400 + 10}" for n in range(6_000)]
            trace = written(tmp_path, "\n".join([AZURE.splitlines()[0], *lines]))
        arrivals = Arrivals.parse(str(trace), time_scale=8)
        wanted = Bench(
            workloads=("zipf10",),
            policies=("retrieval", "free"),
            arrivals=arrivals,
            capacity=Capacity(tokens=1_000_000),
            service_times=ServiceTimes(prefill_tokens_per_s=200_000, decode_tokens_per_s=200),
            limit=4_000,
        )
        retrieval, auto = run_bench(wanted)
        assert (auto.requests, auto.failures) == (4_000, 0)
        assert auto.cached_ratio > retrieval.cached_ratio
        assert auto.prediction_within_block > 0.95
        assert min(auto.tenths["in_flight"]) > 1
        # The cache is full by the middle; from there on neither the tree nor the process may grow.
        nodes = auto.tenths["tree_nodes"][5:]
        assert max(nodes) < 1.2 * min(nodes)
        memory = [each or 0 for each in auto.tenths["rss_mb"]]
        assert memory[-1] - memory[4] < 20


class Gate:
    """An engine far away whose answers come when the test says so. It notes what reaches it, and when."""

    name, block_size, capacity_tokens, kept_output_tokens, partial_blocks_first = "gate", 16, None, 0, True

    def __init__(
        self, *, after: int = 0, failing: Sequence[int] = (), log: list[str] | None = None, note: str = "sent"
    ) -> None:
        self.after, self.failing, self.note = after, set(failing), note
        self.log = [] if log is None else log
        self.in_flight = self.most = 0
        self.at_s: list[float] = []
        self.lengths: list[int | None] = []

    async def complete(self, token_ids: Sequence[int], output_tokens: int | None = None) -> EngineCompletion:
        number = len(self.lengths)
        self.log.append(self.note)
        self.at_s.append(asyncio.get_running_loop().time())
        self.lengths.append(output_tokens)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        # Answers come once so many requests are there, or else after a few turns of the event loop.
        for _ in range(number % 3 + 4):
            await asyncio.sleep(0)
        while len(self.lengths) < self.after:
            await asyncio.sleep(0.001)
        self.in_flight -= 1
        if number in self.failing:
            raise RequestError("failed")
        return EngineCompletion(0.001, 0, len(token_ids))


class Logged:
    """A policy that notes in an engine's log when it orders."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._policy = make_policy("retrieval", engine=SimEngine(), prompts=NumberedPrompts())

    def order(self, documents: list[Document], **options: Any) -> Any:
        self._log.append("ordered")
        return self._policy.order(documents, **options)


def live(gate: Gate, requests: int = 40) -> Run:
    return Run(trace_of(requests=requests), "logged", Logged(gate.log), gate, NumberedPrompts(), load={})


class TestOnTheRealClock:
    @pytest.mark.parametrize("concurrency", [1, 4, 16])
    def test_a_closed_loop_keeps_so_many_in_flight_and_never_more(self, concurrency: int) -> None:
        gate = Gate()
        run = live(gate)
        steps: list[None] = []
        asyncio.run(serve_live(run, gate, Load(concurrency), lambda: steps.append(None)))
        assert gate.most == concurrency
        assert len(steps) == len(gate.lengths) == result_of(run).requests == 40
        assert run.in_flight == run.remaining == 0

    @pytest.mark.parametrize("load", [Load(8), Load(arrivals=every(0.0, 40)), Load(3, every(0.0, 40))])
    def test_nothing_comes_between_ordering_and_sending(self, load: Load) -> None:
        gate = Gate()
        asyncio.run(serve_live(live(gate), gate, load))
        assert gate.log == ["ordered", "sent"] * 40

    @pytest.mark.parametrize("bound", [None, 5])
    def test_an_open_loop_sends_whatever_is_in_flight_up_to_its_bound(self, bound: int | None) -> None:
        gate = Gate(after=bound or 40)  # nobody is answered before all of these are there
        asyncio.run(serve_live(live(gate), gate, Load(bound, every(0.0, 40))))
        assert (gate.most, len(gate.lengths)) == (bound or 40, 40)

    def test_an_open_loop_sends_at_its_times_for_answers_as_long_as_the_arrivals_say(self) -> None:
        gate = Gate()
        arrivals = [Arrival(number**2 * 1e-4, number) for number in range(40)]

        async def serve() -> float:
            start_s = asyncio.get_running_loop().time()
            await serve_live(live(gate), gate, Load(arrivals=arrivals))
            return start_s

        start_s = asyncio.run(serve())
        # Never too early; how late, the first one included, is the machine's business.
        sent = [at_s - start_s for at_s in gate.at_s]
        assert all(at_s >= arrival.at_s - 1e-3 for at_s, arrival in zip(sent, arrivals, strict=True))
        assert gate.lengths == list(range(40))

    def test_runs_side_by_side_take_turns(self) -> None:
        log: list[str] = []
        gates = [Gate(log=log, note=name) for name in "ab"]
        asyncio.run(serve_live_in_turn([(live(gate), gate) for gate in gates], Load(), lambda: None))
        assert [note for note in log if note != "ordered"][:6] == list("abbaab")
        assert [gate.most for gate in gates] == [1, 1]

    @pytest.mark.parametrize("failing", [[0, 7, 8], range(40)], ids=["some", "all"])
    def test_failed_requests_are_counted_and_the_run_goes_on(self, failing: Sequence[int]) -> None:
        gate = Gate(failing=failing)
        run = live(gate)
        asyncio.run(serve_live(run, gate, Load(4)))
        result = result_of(run)
        assert (result.requests, result.failures, result.cached_tokens, run.in_flight) == (40, len(failing), 0, 0)
        assert (result.ttft_ms is None) == (len(failing) == 40)
