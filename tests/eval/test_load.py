"""Load: arrivals, clients, what an engine under load holds, and servers that are measured from outside."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from support.benched import result_of, run_bench, runs_of
from support.commands import run_command
from support.http_server import Handler, LocalServer
from support.rings import grid

from ragorder import Document
from ragorder.cli import main
from ragorder.eval.data.arrivals import Arrival, Arrivals, ArrivalsError, load_arrivals, poisson_arrivals, replicate
from ragorder.eval.data.trace import Trace, trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.base import EngineCompletion, EngineError, RequestError
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.openai import OpenAIEngine, find_model
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

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2221670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 27, "input_length": 7322}
{"timestamp": 3000, "input_length": 100, "output_length": 7}
"""


invoke = partial(run_command, main, "bench", env={"COLUMNS": "200", "OPENAI_API_KEY": ""})


def bench(*arguments: str | Path) -> list[dict[str, Any]]:
    """The runs of a benchmark."""
    done = invoke("-o", "-", *arguments)
    assert done.exit_code == 0, done.output
    return runs_of(done.stdout)


def refusal(*arguments: str | Path) -> str:
    """What is said of a benchmark that cannot be run."""
    done = invoke(*arguments)
    assert done.exit_code != 0, done.output
    assert "Traceback" not in done.output
    return " ".join(done.stderr.split())


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def times(arrivals: Sequence[Arrival]) -> list[float]:
    return [arrival.at_s for arrival in arrivals]


class TestPoissonArrivals:
    @pytest.mark.parametrize("rate", [0.5, 300.0])
    def test_begin_at_zero_and_come_at_their_rate(self, rate: float) -> None:
        drawn = times(poisson_arrivals(rate, 20_001, seed=2))
        gaps = [after - before for before, after in pairwise(drawn)]
        assert drawn[0] == 0 and min(gaps) > 0
        assert 20_000 / drawn[-1] == pytest.approx(rate, rel=0.03)
        # As many gaps are longer than the mean as an exponential distribution has: 1 / e.
        assert sum(gap * rate > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)

    def test_are_those_of_their_seed_however_many_are_drawn(self) -> None:
        assert poisson_arrivals(2.0, 50, seed=4) == poisson_arrivals(2.0, 50, seed=4)
        assert poisson_arrivals(2.0, 50, seed=4) != poisson_arrivals(2.0, 50, seed=5)
        assert poisson_arrivals(2.0, 50, seed=4)[:20] == poisson_arrivals(2.0, 20, seed=4)


class TestTraces:
    @pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
    def test_azures_have_times_and_lengths(self, tmp_path: Path, name: str) -> None:
        arrivals = load_arrivals(written(tmp_path, AZURE, name))
        assert times(arrivals) == pytest.approx([0, 4.314579, 4.541577])
        assert [arrival.output_tokens for arrival in arrivals] == [44, 109, 55]

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
    def test_mooncakes_are_in_milliseconds(self, tmp_path: Path, name: str) -> None:
        arrivals = load_arrivals(written(tmp_path, MOONCAKE, name))
        assert arrivals == [Arrival(0, 500), Arrival(0.027, None), Arrival(3, 7)]

    def test_unsorted_or_empty_lines_windows_line_ends_and_a_byte_order_mark_change_nothing(
        self, tmp_path: Path
    ) -> None:
        header, *lines = AZURE.splitlines()
        for text in ("\n".join([header, *lines[1:], lines[0]]), "\ufeff" + AZURE.replace("\n", "\r\n\r\n")):
            assert load_arrivals(written(tmp_path, text, "odd.csv")) == load_arrivals(written(tmp_path, AZURE))

    @pytest.mark.parametrize(
        ("name", "text", "place"),
        [
            ("azure.csv", "2023-11-16 18:15:50,396", ":5: expected a line such as 2023-11-16 18:15:46.68,374,44"),
            ("azure.csv", "2023-11-16 18:15:50,396,1,2", ":5: expected a line such as"),
            ("azure.csv", "yesterday,396,109", ":5: expected a line such as"),
            ("azure.csv", "2023-11-16 18:15:50+00:00,396,109", ":5: expected a line such as"),
            ("azure.csv", "2023-11-16 18:15:50,396,many", ":5: expected a line such as"),
            ("azure.csv", "2023-11-16 18:15:50,396,-1", ":5: expected a line such as"),
            ("mooncake.jsonl", "{", ":4: "),
            ("mooncake.jsonl", "[]", ":4: "),
            ("mooncake.jsonl", '{"output_length": 5}', ":4: "),
            ("mooncake.jsonl", '{"timestamp": "x"}', ":4: "),
            ("mooncake.jsonl", '{"timestamp": NaN}', ":4: "),
            ("mooncake.jsonl", '{"timestamp": 1e999}', ":4: "),
            ("mooncake.jsonl", '{"timestamp": 5, "output_length": -5}', ":4: "),
            ("mooncake.jsonl", '{"timestamp": 5, "output_length": []}', ":4: "),
            ("mooncake.jsonl", "[" * 100_000, ":4: "),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, name: str, text: str, place: str) -> None:
        path = written(tmp_path, f"{AZURE if name == 'azure.csv' else MOONCAKE}{text}\n", name)
        with pytest.raises(ArrivalsError) as error:
            load_arrivals(path)
        assert str(error.value).startswith(f"{path}{place}")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"\xff\xfe\x00", ""),
            (b"no gzip", ""),
            (gzip.compress(AZURE.encode(), mtime=0)[:40], ""),
            (gzip.compress(b"\n\n"), ""),
            (gzip.compress(AZURE.splitlines()[0].encode()), ""),
            (gzip.compress(b"time,length\n1,2\n"), ":1: expected the columns TIMESTAMP,ContextTokens,GeneratedTokens"),
        ],
        ids=["text", "none", "torn", "empty", "head", "columns"],
    )
    def test_a_file_without_arrivals_is_refused_by_name(self, tmp_path: Path, content: bytes, said: str) -> None:
        path = tmp_path / "trace.csv.gz"
        path.write_bytes(content)
        with pytest.raises(ArrivalsError) as error:
            load_arrivals(path)
        assert f"{path}{said}" in str(error.value)

    @pytest.mark.parametrize(
        ("name", "count", "seconds"),
        [
            ("azure_llm_2023_conv.csv.gz", 19_366, 3_501.7),
            ("azure_llm_2023_code.csv.gz", 8_819, 3_435.9),
            ("mooncake_conversation.jsonl.gz", 12_031, 3_537.0),
        ],
    )
    def test_the_published_ones_are_read_whole(self, name: str, count: int, seconds: float) -> None:
        if not (TRACES / name).exists():
            pytest.skip("needs the traces of ../shared")
        arrivals = load_arrivals(TRACES / name)
        assert (len(arrivals), arrivals[0].at_s) == (count, 0)
        assert arrivals[-1].at_s == pytest.approx(seconds, abs=0.1)
        assert min(arrival.output_tokens or 0 for arrival in arrivals) >= 1


class TestPlayingATrace:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        return written(tmp_path, AZURE)

    def test_time_scale_divides_the_times_and_nothing_else(self, trace: Path) -> None:
        plain, fast = (Arrivals.parse(str(trace), time_scale=scale, replicas=3).draw(9, 0) for scale in (1.0, 8.0))
        assert times(fast) == pytest.approx([at_s / 8 for at_s in times(plain)])
        assert [each.output_tokens for each in fast] == [each.output_tokens for each in plain]
        assert Arrivals.parse(str(trace)).draw(2, 0) == load_arrivals(trace)[:2]

    @given(
        st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 3), st.integers(1, 60)
    )
    def test_replicas_stay_between_their_arrival_and_the_next(
        self, drawn: list[int], replicas: int, seed: int, limit: int
    ) -> None:
        trace = [Arrival(float(at_s), number) for number, at_s in enumerate(sorted(drawn))]
        spread = replicate(trace, replicas, seed)
        assert times(spread) == sorted(times(spread))
        for number, arrival in enumerate(trace):
            own = [each.at_s for each in spread if each.output_tokens == number]
            assert len(own) == replicas
            assert min(own) == arrival.at_s
            if number + 1 < len(trace):
                assert max(own) <= trace[number + 1].at_s
        count = min(limit, len(spread))
        first = Arrivals("made", trace=trace, replicas=replicas).draw(count, seed)
        if count <= (len(trace) - 1) * replicas:
            assert first == spread[:count]

    def test_replicas_are_those_of_their_seed(self, trace: Path) -> None:
        arrivals = Arrivals.parse(str(trace), replicas=4)
        assert arrivals.draw(12, 1) == arrivals.draw(12, 1) != arrivals.draw(12, 2)


class TestSteps:
    TEXT = "steps:4@20m,8@20m,12@20m,16@20m"

    def test_each_has_its_rates_requests_within_its_time(self) -> None:
        """RAGDoll's Figure 7."""
        arrivals = Arrivals.parse(self.TEXT)
        assert (arrivals.name, arrivals.count, arrivals.output_tokens_mean) == (self.TEXT, 800, None)
        at_s = times(arrivals.draw(800, seed=1))
        assert at_s == sorted(at_s)
        in_step = [sum(1200 * step <= each < 1200 * (step + 1) for each in at_s) for step in range(4)]
        assert in_step == [80, 160, 240, 320]

    def test_come_at_random_within_a_step(self) -> None:
        """Gaps of a Poisson process: they scatter as much as they are wide."""
        at_s = times(Arrivals.parse("steps:600@30m").draw(18_000, seed=2))
        gaps = [after - before for before, after in pairwise(at_s)]
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.01)
        assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.05)

    def test_are_those_of_their_seed_and_fewer_are_the_first_of_them(self) -> None:
        arrivals = Arrivals.parse(self.TEXT)
        assert arrivals.draw(800, 1) == arrivals.draw(800, 1) != arrivals.draw(800, 2)
        assert arrivals.draw(100, 1) == arrivals.draw(800, 1)[:100]
        with pytest.raises(ArrivalsError, match=r"has 800 arrivals: lower --limit \(801\)"):
            arrivals.draw(801, 1)

    def test_may_pause_and_last_seconds_or_hours(self) -> None:
        at_s = times(Arrivals.parse("steps: 30@90s, 0@1h, 2.5@2m").draw(50, 0))
        assert [each < 90 for each in at_s] == [True] * 45 + [False] * 5
        assert all(3690 <= each < 3810 for each in at_s[45:])

    @pytest.mark.parametrize(
        "step", ["", "4", "4@", "4@20", "4@m", "@20m", "x@20m", "-1@20m", "nan@1m", "4@0m", "4@-1m"]
    )
    def test_that_are_malformed_are_refused(self, step: str) -> None:
        with pytest.raises(ArrivalsError, match=r"is no step: give requests a minute.*such as steps:4@20m,8@20m"):
            Arrivals.parse(f"steps:4@20m,{step}")

    def test_without_a_request_are_refused_and_so_are_replicas(self) -> None:
        with pytest.raises(ArrivalsError, match="has no requests"):
            Arrivals.parse("steps:0@20m,1@10s")
        with pytest.raises(ArrivalsError, match="with steps choose other rates"):
            Arrivals.parse("steps:4@20m", replicas=2)


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


class TestCorporaUnderArrivals:
    def test_start_again_from_the_first_question(self) -> None:
        from ragorder.eval.data.corpora import Corpus
        from ragorder.eval.data.corpora.base import CorpusQuestion

        documents = [Document(f"d{n}", "x" * 400) for n in range(4)]
        questions = [CorpusQuestion(f"q{n}", f"{n}?") for n in range(3)]
        corpus = Corpus("small", documents, questions, [[0, 1], [1, 2], [2, 3]])
        options: dict[str, Any] = {"top_k": 2, "order": "data", "seed": 0}
        repeated = trace_of_corpus(corpus, **options, limit=7, repeat=True)
        assert [request.question for request in repeated.requests] == ["0?", "1?", "2?", "0?", "1?", "2?", "0?"]
        assert len(trace_of_corpus(corpus, **options, limit=7).requests) == 3
        assert len(trace_of_corpus(corpus, **options, limit=2, repeat=True).requests) == 2


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


FAULTS = {
    "refused": (400, b'{"error": {}}'),
    "garbage": (200, b"data: {\n\n"),
    "error": (200, b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n'),
    "strange": (200, b'data: {"choices": [{}], "usage": [1]}\n\ndata: [DONE]\n\n'),
    "silent": (200, b"data: [DONE]\n\n"),
}


class FarServer(LocalServer):
    """An OpenAI-compatible server with a simulated cache, and the faults that servers have."""

    def __init__(
        self,
        *,
        root: str = "/nowhere",
        reports: str = "always",
        knows: Sequence[str] = ("ignore_eos", "cache_salt"),
        salts: bool = True,
        prefix_caching: bool = True,
        fault: Callable[[int], str | None] = lambda number: None,
    ) -> None:
        super().__init__(_Handler)
        self.base_url += "/v1"
        self.models = [{"id": "far", "root": root, "max_model_len": None}, {"id": "other"}]
        self.reports, self.knows, self.salts, self.fault = reports, knows, salts, fault
        self.engine = SimEngine(block_size=16, output_tokens=0, prefix_caching=prefix_caching)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    def cached_tokens(self, body: dict[str, Any]) -> int:
        with self.lock:
            salt = hash(body.get("cache_salt")) % 10**9 if self.salts else 0
            found = self.engine.generate([salt] * 16 + body["prompt"]).cached_tokens
        return max(0, found - 16)

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        cached_tokens = self.cached_tokens(body)
        if self.reports == "always" or (self.reports == "hits" and cached_tokens):
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage


class _Handler(Handler):
    server: FarServer

    def do_GET(self) -> None:
        models = json.dumps({"object": "list", "data": self.server.models})
        self.answer(*((200, models) if self.path == "/v1/models" else (404, "")))

    def do_POST(self) -> None:
        body = self.read_json()
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.headers.append(dict(self.headers))
        unknown = {"ignore_eos", "cache_salt"} & body.keys() - set(self.server.knows)
        fault = "refused" if unknown or self.path != "/v1/completions" else self.server.fault(number)
        if fault == "cut":
            self.close_connection = True
        elif fault is not None:
            self.answer(*FAULTS[fault])
        else:
            events = [{"choices": [{"text": word}]} for word in ("a", "", "\u2028b\x85")]
            usage = {"choices": [], "usage": self.server.usage(body)}
            lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in [*events, usage]]
            self.answer(200, (": ping\n\n" + "".join(lines) + "data: [DONE]\n\n").encode())


def engine_of(server: FarServer, **options: Any) -> OpenAIEngine:
    return OpenAIEngine(server.base_url, "far", **({"block_size": 16, "capacity_tokens": None} | options))


def with_engine(server: FarServer, use: Callable[[OpenAIEngine], Any], **options: Any) -> Any:
    """What a coroutine makes of an engine of a server."""

    async def session() -> Any:
        async with engine_of(server, **options) as engine:
            return await use(engine)

    return asyncio.run(session())


PROMPT = list(range(100))


@pytest.fixture
def far() -> Iterator[FarServer]:
    pytest.importorskip("httpx2")
    with FarServer() as server:
        yield server


class TestOpenAIEngine:
    def test_streams_a_completion_of_token_ids(self, far: FarServer) -> None:
        completion = with_engine(far, lambda engine: engine.complete(PROMPT), api_key="secret")
        assert (completion.cached_tokens, completion.prompt_tokens, completion.text) == (0, 100, "a\u2028b\x85")
        assert completion.ttft_s > 0
        (body,) = far.bodies
        assert body["prompt"] == PROMPT
        expected = {"model": "far", "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
        assert expected.items() <= body.items()
        assert body["stream_options"] == {"include_usage": True}
        assert far.headers[0]["Authorization"] == "Bearer secret"

    def test_the_time_between_tokens_is_that_from_the_first_chunk_to_the_last(
        self, far: FarServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ticks = count()
        monkeypatch.setattr(
            "ragorder.eval.engines.openai.time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
        )
        several, one = (
            with_engine(far, lambda engine, wanted=wanted: engine.complete(PROMPT, wanted)) for wanted in (5, 1)
        )
        # Three chunks a second apart, with five tokens in them.
        assert (several.ttft_s, several.total_s, several.tbt_s) == (1, 4, 2 / 4)
        assert one.tbt_s is None

    def test_a_reset_is_a_fresh_salt(self, far: FarServer) -> None:
        async def around(engine: OpenAIEngine) -> list[int]:
            before = [(await engine.complete(PROMPT)).cached_tokens for _ in range(2)]
            engine.reset()
            return before + [(await engine.complete(PROMPT)).cached_tokens for _ in range(2)]

        assert with_engine(far, around) == [0, 96, 0, 96]
        salts = [body["cache_salt"] for body in far.bodies]
        assert salts[0] == salts[1] != salts[2] == salts[3]
        assert engine_of(far).salt != engine_of(far).salt

    @pytest.mark.parametrize("wanted", [None, 1, 7])
    def test_an_answer_is_as_long_as_it_should_be(self, far: FarServer, wanted: int | None) -> None:
        with_engine(far, lambda engine: engine.complete(PROMPT, wanted), output_tokens=3)
        assert far.bodies[0]["max_tokens"] == (wanted or 3)
        assert engine_of(far, output_tokens=3).kept_output_tokens == 2

    @pytest.mark.parametrize("suffix", ["/v1/", "", "/"])
    def test_the_url_may_name_the_version(self, far: FarServer, suffix: str) -> None:
        far.base_url = far.base_url.removesuffix("/v1") + suffix
        with_engine(far, lambda engine: engine.complete(PROMPT))
        assert find_model(far.base_url).id == "far"

    def test_the_models_of_a_server_are_those_it_lists(self, far: FarServer) -> None:
        assert asdict(find_model(far.base_url)) == {"id": "far", "root": "/nowhere", "max_model_len": None}
        with pytest.raises(EngineError, match="no model 'nearer': give --served-model far or other"):
            find_model(far.base_url, "nearer")
        far.models = []
        with pytest.raises(EngineError, match="lists no models"):
            find_model(far.base_url)

    @pytest.mark.parametrize("fault", ["cut", *FAULTS])
    def test_a_request_that_fails_says_so_without_its_prompt(self, far: FarServer, fault: str) -> None:
        far.fault = lambda number: fault

        async def failing(engine: OpenAIEngine) -> str:
            with pytest.raises(RequestError) as error:
                await engine.complete(PROMPT)
            assert error.value.status == (400 if fault == "refused" else None)
            far.fault = lambda number: None
            assert (await engine.complete(PROMPT)).prompt_tokens == 100, "the engine goes on"
            return str(error.value)

        said = with_engine(far, failing)
        assert said and "98, 99" not in said

    def test_a_server_that_is_gone_is_a_failed_request(self, far: FarServer) -> None:
        async def gone(engine: OpenAIEngine) -> None:
            far.shutdown()
            far.server_close()
            with pytest.raises(RequestError, match="ConnectError"):
                await engine.complete(PROMPT)

        with_engine(far, gone)


class TestChecks:
    """What a server must be able to do is found out before a run."""

    @staticmethod
    def check(server: FarServer) -> None:
        async def checked(engine: OpenAIEngine) -> None:
            await engine.check(PROMPT)
            await engine.complete(PROMPT)

        with server:
            with_engine(server, checked)

    @pytest.mark.parametrize(
        ("options", "left_out"),
        [
            ({}, False),
            ({"reports": "hits"}, False),
            ({"knows": ["cache_salt"]}, True),
            # One failure is no reason.
            ({"fault": lambda number: "cut" if number == 0 else None}, False),
        ],
    )
    def test_leave_a_fresh_salt_and_ignore_eos_out_where_it_is_unknown(
        self, options: dict[str, Any], left_out: bool
    ) -> None:
        server = FarServer(**options)
        self.check(server)
        assert len({body["cache_salt"] for body in server.bodies}) >= 3
        assert ["ignore_eos" in body for body in server.bodies[1:]] == [not left_out] * (len(server.bodies) - 1)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"reports": "never"}, "--enable-prompt-tokens-details, SGLang with --enable-cache-report"),
            ({"prefix_caching": False}, "start it with prefix caching"),
            ({"salts": False}, "does not keep the caches of different cache_salt apart"),
            ({"knows": []}, r"does not serve a prompt of token ids with a cache_salt \(HTTP 400\)"),
            ({"fault": lambda number: "cut"}, "does not serve a prompt of token ids"),
        ],
    )
    def test_a_server_that_cannot_be_measured_is_refused_with_the_reason(
        self, options: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(EngineError, match=said):
            self.check(FarServer(**options))


LIMITED = ("--limit", "40", "--workload", "zipf10")


class TestOnTheCommandLine:
    def test_concurrency_is_a_closed_loop(self) -> None:
        closed = (*LIMITED, "--policy", "free", "--concurrency", "4")
        done = invoke(*closed, "--seeds", "0,1")
        assert done.exit_code == 0, done.output
        assert "4 in flight" in done.stdout
        tenths = done.stdout.partition("The run in tenths")[2]
        assert "tree" in tenths and tenths.count("│ ragorder (free)") == 1, "seeds are averaged"
        (run,) = bench(*closed)
        assert (run["concurrency"], run["ttft_ms"], run["failures"]) == (4, None, 0)
        assert {len(values) for values in run["tenths"].values()} == {10}
        assert "tenths" not in invoke(*closed[:-2]).stdout
        (run,) = bench(*closed[:-2])
        assert run["tenths"] is None and "concurrency" not in run

    def test_poisson_is_an_open_loop(self) -> None:
        slow, fast = (bench(*LIMITED, "--policy", "free", "--arrivals", f"poisson:{rate}")[0] for rate in ("0.1", "90"))
        assert [run["arrivals"] for run in (slow, fast)] == ["poisson:0.1", "poisson:90"]
        assert slow["tenths"]["in_flight"][-1] == 1
        assert fast["tenths"]["in_flight"][-1] > 5

    def test_steps_say_when_and_how_many(self) -> None:
        options = ("--workload", "zipf10", "--policy", "free", "--arrivals", "steps:60@10s,120@10s")
        (run,) = bench(*options, "--time-scale", "60")
        assert (run["requests"], run["arrivals"], run["time_scale"]) == (30, options[-1], 60)

    def test_a_trace_says_when_how_many_and_how_long(self, tmp_path: Path) -> None:
        made = written(tmp_path, MOONCAKE, "made.jsonl.gz")
        options = ("--workload", "zipf10", "--policy", "free", "--arrivals", made)
        assert bench(*options)[0]["requests"] == 3
        assert bench(*options, "--limit", "2")[0]["requests"] == 2
        (run,) = bench(*options, "--replicas", "8", "--time-scale", "2.5")
        assert run["requests"] == 24
        assert (run["arrivals"], run["time_scale"], run["replicas"]) == ("made.jsonl.gz", 2.5, 8)
        done = invoke(*options, "--replicas", "8", "--time-scale", "2.5", "--concurrency", "6")
        said = "6 in flight, arrivals made.jsonl.gz, time scale 2.5, replicas 8"
        assert said in " ".join(done.stdout.split())

    def test_the_modelled_rates_make_the_number_in_flight(self) -> None:
        def in_flight(*options: str) -> float:
            (run,) = bench(*LIMITED, "--policy", "free", "--arrivals", "poisson:5", *options)
            mean: float = run["tenths"]["in_flight"][-1]
            return mean

        usual = in_flight()
        assert in_flight("--decode-rate", "5") > 2 * usual
        assert in_flight("--prefill-rate", "5000") > 2 * usual
        assert in_flight("--output-tokens", "320") > 2 * usual

    def test_waiting_lets_the_tail_see_ahead_under_load_too(self) -> None:
        options = ["--limit", "200", "--policy", "free", "--concurrency", "4", "--waiting"]
        blind, seeing = (bench(*options, waiting)[0] for waiting in ("0", "8"))
        assert seeing["cached_tokens"] > blind["cached_tokens"]

    def test_a_batch_is_served_in_a_closed_loop(self) -> None:
        options = ["--workload", "zipf10", "--limit", "200", "--policy", "free", "--capacity-tokens", "20000"]
        alone, batch = (bench(*options, "--concurrency", "4", *extra)[0] for extra in ((), ("--batch",)))
        assert (batch["batch"], batch["requests"]) == (True, 200)
        assert batch["cached_tokens"] > alone["cached_tokens"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--engine", "vllm", "--concurrency", "2"), "--engine vllm serves one request at a time"),
            (("--batch", "--arrivals", "poisson:1"), "--batch plans all requests before the first is served"),
            (("--concurrency", "0"), "--concurrency"),
            (("--arrivals", "poisson:fast"), "requests per second, such as poisson:2.5"),
            (("--arrivals", "poisson:0"), "such as poisson:2.5"),
            (("--arrivals", "poisson:nan"), "such as poisson:2.5"),
            (("--arrivals", "poisson:inf"), "such as poisson:2.5"),
            (("--arrivals", "/nowhere/trace.csv"), "/nowhere/trace.csv: No such file"),
            (("--arrivals", "poisson:1", "--time-scale", "2"), "choose another rate"),
            (("--arrivals", "poisson:1", "--replicas", "2"), "choose another rate"),
            (("--arrivals", "TRACE", "--time-scale", "0"), "--time-scale"),
            (("--arrivals", "TRACE", "--time-scale", "nan"), "--time-scale"),
            (("--arrivals", "TRACE", "--time-scale", "inf"), "--time-scale"),
            (("--arrivals", "TRACE", "--replicas", "0"), "--replicas"),
            (("--arrivals", "TRACE", "--limit", "4"), "trace.csv has 3 arrivals: lower --limit (4)"),
            (("--time-scale", "2"), "give --arrivals FILE"),
            (("--replicas", "2"), "give --arrivals FILE"),
            (("--prefill-rate", "5"), "give --engine sim and --concurrency or --arrivals"),
            (("--decode-rate", "5"), "give --engine sim and --concurrency or --arrivals"),
            (("--concurrency", "2", "--decode-rate", "0"), "--decode-rate"),
            (("--concurrency", "2", "--prefill-rate", "nan"), "--prefill-rate"),
            (("--output-tokens", "0"), "--output-tokens"),
            (("--base-url", "http://x"), "--base-url and --served-model require --engine openai"),
            (("--served-model", "x"), "--base-url and --served-model require --engine openai"),
            (
                ("--engine", "openai", "--base-url", "x", "--base-url", "y"),
                "needs one --base-url, one for each --policy",
            ),
            (("--engine", "openai", "--capacity-tokens", "5%"), "give --capacity-tokens in tokens"),
            (("--policy", "events"), "use it with --engine openai"),
            (
                ("--engine", "openai", "--base-url", "x", "--policy", "events"),
                "policy 'events' needs --events-endpoint",
            ),
            (("--engine", "openai", "--events-endpoint", "ipc:///x"), "--events-endpoint requires --base-url"),
            (("--events-topic", "x"), "--replay-endpoint and --events-topic require --events-endpoint"),
            (("--engine", "openai", "--base-url", "x", "--policy", "none"), "policy 'none' is the server's to decide"),
            (("--engine", "openai", "--base-url", "x", "--policy", "oracle"), "--engine sim"),
            (("--engine", "openai", "--base-url", "http://127.0.0.1:9"), "cannot be reached"),
        ],
    )
    def test_what_cannot_be_run_is_refused(self, arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
        trace = str(written(tmp_path, AZURE))
        assert said in refusal(*(trace if argument == "TRACE" else argument for argument in arguments))


class TestBenchOnAServer:
    """The benchmark on a server whose cache is simulated."""

    @pytest.fixture
    def far(self, model_folder: Path) -> Iterator[FarServer]:
        pytest.importorskip("httpx2")
        with FarServer(root=str(model_folder)) as server:
            yield server

    @staticmethod
    def options(*servers: FarServer, policies: Sequence[str] = ("retrieval", "free")) -> list[str]:
        urls = [part for server in servers for part in ("--base-url", server.base_url)]
        named = [part for policy in policies for part in ("--policy", policy)]
        sizes = ["--block-size", "16", "--capacity-tokens", "unlimited"]
        return ["--engine", "openai", *urls, *named, *sizes, "--limit", "20"]

    def test_compares_policies_one_after_another_each_with_a_salt_of_its_own(self, far: FarServer) -> None:
        retrieval, auto = bench(*self.options(far))
        assert (auto["engine"], auto["requests"], auto["failures"]) == ("openai", 20, 0)
        assert auto["cached_tokens"] > retrieval["cached_tokens"] > 0
        assert auto["prediction_within_block"] == 1
        assert min(auto["ttft_ms"].values()) > 0
        served = [body["cache_salt"] for body in far.bodies][-40:]
        assert len(set(served[:20])) == len(set(served[20:])) == 1
        assert len(set(served)) == 2

    def test_who_is_first_changes_with_the_seed(self, far: FarServer) -> None:
        runs = bench(*self.options(far, policies=["retrieval", "sorted"]), "--seeds", "0,1")
        assert [(run["seed"], run["policy"]) for run in runs] == [
            (seed, policy) for seed in (0, 1) for policy in ("retrieval", "sorted")
        ]
        first_prompts: dict[str, list[int]] = {}
        for body in far.bodies:
            first_prompts.setdefault(body["cache_salt"], body["prompt"])
        prompts = list(first_prompts.values())
        # For each seed two salts of the check, which is in retrieval order, then one for each policy.
        for of_seed, expected in ((prompts[:4], "rrrs"), (prompts[4:], "rrsr")):
            assert "".join("r" if prompt == of_seed[0] else "s" for prompt in of_seed) == expected

    def test_arrivals_are_played_on_the_real_clock(self, far: FarServer, tmp_path: Path) -> None:
        options = self.options(far, policies=["free"])[:-2]
        played = ("--arrivals", written(tmp_path, MOONCAKE, "m.jsonl"), "--replicas", "4", "--time-scale", "50")
        (run,) = bench(*options, *played)
        assert (run["requests"], run["failures"]) == (12, 0)
        lengths = [body["max_tokens"] for body in far.bodies][-12:]
        # The second arrival says nothing of its answer: it gets the mean of the others.
        assert sorted(lengths) == [7] * 4 + [254] * 4 + [500] * 4

    @pytest.mark.parametrize("load", [(), ("--concurrency", "3")])
    def test_each_policy_may_have_a_server(self, far: FarServer, model_folder: Path, load: tuple[str, ...]) -> None:
        with FarServer(root=str(model_folder)) as other:
            retrieval, auto = bench(*self.options(far, other), *load)
            assert not load or auto["tenths"]["in_flight"][-1] > 1
            assert auto["cached_tokens"] > retrieval["cached_tokens"]
            for server in (far, other):
                assert len({body["cache_salt"] for body in server.bodies[-20:]}) == 1
            assert far.bodies[-1]["cache_salt"] != other.bodies[-1]["cache_salt"]

    def test_failures_are_counted_and_shown_in_red(self, far: FarServer) -> None:
        far.fault = lambda number: "cut" if number in (10, 15) else None
        (run,) = bench(*self.options(far, policies=["free"]))
        assert (run["requests"], run["failures"]) == (20, 2)
        far.bodies.clear()
        arguments = ["bench", *self.options(far, policies=["free"])]
        done = CliRunner().invoke(main, arguments, env={"COLUMNS": "200", "FORCE_COLOR": "1"}, color=True)
        assert done.exit_code == 0 and "failures" in done.stdout and "\x1b[1;31m2" in done.stdout

    def test_the_key_is_sent_and_another_model_can_be_named(self, far: FarServer, model_folder: Path) -> None:
        named = ("--api-key", "secret", "--served-model", "other", "--model", str(model_folder))
        bench(*self.options(far, policies=["free"]), *named)
        assert {headers["Authorization"] for headers in far.headers} == {"Bearer secret"}
        assert {body["model"] for body in far.bodies} == {"other"}

    def test_a_tokenizer_that_is_not_there_is_asked_for(self, far: FarServer) -> None:
        far.models[0]["root"] = "/nowhere"
        said = refusal(*self.options(far))
        assert "no tokenizer can be loaded from '/nowhere': give --model" in said

    def test_a_cache_of_unknown_size_is_asked_for(self, far: FarServer) -> None:
        options = [option for option in self.options(far) if option not in ("--capacity-tokens", "unlimited")]
        said = refusal(*options)
        assert "/metrics" in said and "--capacity-tokens and --block-size" in said

    def test_a_request_that_does_not_fit_is_refused_before_the_run(self, far: FarServer) -> None:
        far.models[0]["max_model_len"] = 300
        said = refusal(*self.options(far))
        assert "the server takes 300: lower --top-k or --output-tokens" in said
        assert far.bodies == []

    def test_needs_the_extra(self, python: Any) -> None:
        script = "from ragorder.cli import main; main(prog_name='ragorder')"
        arguments = ["bench", "--engine", "openai", "--base-url", "http://127.0.0.1:9"]
        done = python("-c", script, *arguments, blocked=("httpx2",))
        assert done.returncode == 1
        assert "pip install '.[live]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.vllm
class TestBenchOnVLLM:
    """The benchmark on a real server."""

    @staticmethod
    def options(server: Any, *, servers: int = 1) -> list[str]:
        urls = ["--base-url", f"{server.base_url}/v1"] * servers
        policies = ["--policy", "retrieval", "--policy", "free"]
        return ["--engine", "openai", *urls, *policies, "--limit", "20", "--top-k", "3"]

    @pytest.mark.slow
    @pytest.mark.parametrize("servers", [1, 2])
    def test_under_load(self, vllm_server: Any, servers: int) -> None:
        """Named twice, the one server holds both policies' blocks at a time; salts keep them apart."""
        vllm_server.reset()
        retrieval, auto = bench(
            *self.options(vllm_server, servers=servers), "--concurrency", "4", "--output-tokens", "4"
        )
        assert auto["capacity_tokens"] == vllm_server.capacity_tokens
        for run in (retrieval, auto):
            assert (run["requests"], run["failures"]) == (20, 0)
            assert min(run["ttft_ms"].values()) > 0
            assert run["tenths"]["in_flight"][-1] > 1
        assert auto["cached_tokens"] > retrieval["cached_tokens"]
        assert auto["prompt_tokens"] == retrieval["prompt_tokens"]

    @pytest.mark.slow
    def test_one_at_a_time_the_mirror_predicts_it(self, vllm_server: Any) -> None:
        """The second run begins with what the first one left, under another salt, and must not notice."""
        vllm_server.reset()
        first, second = bench(*self.options(vllm_server), "--policy", "prefix")[1:]
        for run in (first, second):
            assert run["prediction_within_block"] >= 0.95
            assert abs(run["prediction_bias_blocks"]) < 0.5

    def test_events_predict_what_a_server_given_reports(self, vllm_server: Any) -> None:
        vllm_server.reset()
        heard = ["--events-endpoint", vllm_server.events_endpoint, "--replay-endpoint", vllm_server.replay_endpoint]
        heard += ["--events-topic", vllm_server.events_topic, "--policy", "events"]
        *_, events = bench(*self.options(vllm_server), *heard)
        assert events["policy"] == "events"
        assert events["prediction_within_block"] >= 0.95
        assert events["cached_tokens"] > 0

    @pytest.mark.slow
    def test_a_server_is_started_where_none_is_given(self, vllm_model: Path) -> None:
        options = ["--engine", "openai", "--model", str(vllm_model), "--capacity-tokens", "8192", "--limit", "12"]
        retrieval, events = bench(*options, "--policy", "retrieval", "--policy", "events", "--concurrency", "2")
        assert events["capacity_tokens"] == 8192
        assert events["cached_tokens"] > retrieval["cached_tokens"]
        assert (events["requests"], events["failures"]) == (12, 0)
