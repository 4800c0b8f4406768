"""What is measured of tiers on a real engine: sizes, the suite, what the figures say; and how they are broken."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.results import result_lines
from support.suites import write_corpus

pytest.importorskip("scipy")

from support.chaos import Answer
from support.fork_server import ForkServer

from ragorder import Document
from ragorder.benchmarks.common.served import Speedup
from ragorder.benchmarks.ragcache.tiering.experiment import ARMS, ROOMS, make_sizes, make_stream
from ragorder.benchmarks.ragcache.tiering.report import judge
from ragorder.eval.cli.eval import eval as eval_command
from ragorder.eval.data.trace import Trace, TraceRequest
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.report import make_report, read_results
from ragorder.eval.running.suite import load_suites
from ragorder.trie.profile import PrefillProfile

JSON = dict[str, Any]
BLOCK = 32

SUITE = """
title = "A suite"
source = "tests"
says = "Something."
kind = "tiering"
policies = ["apc", "tiers"]
baseline = "apc"
warmup = 16
requests = 24
[cell]
corpus = "small"
top_k = 3
segment = 4
[sweep]
tier = ["host"]
[report]
chart = "tiering"
"""


def trace(*rankings: str) -> Trace:
    documents = {name: Document(name, name, tokens=100) for name in "abcdef"}
    requests = [TraceRequest("?", [documents[name] for name in ranking]) for ranking in rankings]
    return Trace("letters", requests, 600)


def times(mean: float, seed: int, *, noise: float = 0.02, count: int = 50) -> list[float]:
    rng = random.Random(f"{seed} {mean}")
    return [mean * (1 + noise * (rng.random() - 0.5)) for _ in range(count)]


def judged(room: str, apc: float, tiers: float, *, noise: float = 0.02) -> Speedup:
    return judge(room, *([times(mean, seed, noise=noise) for seed in range(3)] for mean in (apc, tiers)))


def lines(room: str, apc: float, tiers: float, *, seeds: int = 3, **fields: Any) -> list[JSON]:
    """Results with these mean times, in ms, after a warm-up that took for ever, as the harness writes them."""
    return [
        {
            "type": "tiering",
            "session": "s",
            "suite": "ragcache-ttft-tiers",
            "cell": {"tier": room, "corpus": "pydocs", "top_k": 2},
            "seed": seed,
            "policy": arm,
            "engine": {"name": "openai", "model": "random-2x64", "block_size": BLOCK},
            "warmup": 5,
            "facts": {"blocks": 100, "host_bytes": 8_000_000, "disk_bytes": None, "working_set_tokens": 12_000},
            "sources": {"device": 10, "host": 20 * (arm == "tiers"), "disk": 0, "elsewhere": 0, "computed": 70},
            "rows": {"ttft_ms": [1e6] * 5 + times(mean, seed)}
            | {"cached_tokens": [32] * 55, "prompt_tokens": [320] * 55},
            **fields,
        }
        for seed in range(seeds)
        for arm, mean in zip(ARMS, (apc, tiers), strict=True)
    ]


class TestSizes:
    def test_a_prefix_counts_once_in_the_working_set_and_whole_blocks_only(self) -> None:
        # 64 of the system, 100 a document, 20 of a question that nobody shares: 184 and 284 tokens.
        once = make_stream(trace("a"), NumberedPrompts(), BLOCK).working_set_tokens
        assert once == 184 // BLOCK * BLOCK
        # The system prompt's two blocks and the three with the first document's 96 tokens are shared.
        both = make_stream(trace("a", "ab"), NumberedPrompts(), BLOCK).working_set_tokens
        assert both == once + (284 // BLOCK - 5) * BLOCK
        apart = make_stream(trace("a", "b"), NumberedPrompts(), BLOCK).working_set_tokens
        assert apart == 2 * once - 64

    def test_each_room_is_what_it_says(self) -> None:
        streams = [make_stream(trace("abc", "bcd", "cde", "def"), NumberedPrompts(), BLOCK)]
        (working_set,) = (stream.working_set_tokens for stream in streams)
        sizes = {room: make_sizes(room, streams, block_size=BLOCK, bytes_per_token=10) for room in ROOMS}
        assert sizes["device"].blocks * BLOCK > working_set
        for room in ("host", "beyond", "disk"):
            assert sizes[room].blocks * BLOCK < working_set
        assert sizes["host"].host_bytes > 10 * working_set
        assert sizes["beyond"].host_bytes < 10 * working_set
        assert sizes["beyond"].disk_bytes is None
        assert sizes["disk"].host_bytes == sizes["beyond"].host_bytes
        assert sizes["disk"].disk_bytes > 10 * working_set
        # For all seeds.
        disk = make_sizes("disk", 3 * streams, block_size=BLOCK, bytes_per_token=10)
        assert disk.disk_bytes > 3 * 10 * working_set

    def test_no_pool_is_too_small_for_a_prompt(self) -> None:
        streams = [make_stream(trace("abcdef"), NumberedPrompts(), BLOCK)]
        for room in ROOMS:
            sizes = make_sizes(room, streams, block_size=BLOCK, bytes_per_token=10)
            assert sizes.blocks * BLOCK > streams[0].longest_tokens


class TestVerdicts:
    @pytest.mark.parametrize(
        ("room", "apc", "tiers", "met"),
        [
            ("host", 300, 100, "met"),
            ("host", 140, 100, "not met"),
            ("device", 100, 100, "met"),
            ("device", 100, 90, "met"),
            ("device", 100, 110, "not met"),
            ("beyond", 100, 90, ""),
            ("disk", 100, 200, ""),
        ],
    )
    def test_what_is_required(self, room: str, apc: float, tiers: float, met: str) -> None:
        assert judged(room, apc, tiers).met == met

    def test_noise_decides_nothing(self) -> None:
        verdict = judged("host", 180, 100, noise=1.5)
        assert verdict.low < 1.5 < verdict.ratio
        assert verdict.met == "not decided"

    def test_the_interval_is_around_the_ratio(self) -> None:
        verdict = judged("host", 200, 100, noise=0.5)
        assert verdict.found.known
        assert verdict.low < verdict.ratio < verdict.high
        assert verdict.ratio == pytest.approx(2, rel=0.1)
        assert len(verdict.by_seed) == 3

    def test_of_one_request_there_is_no_interval(self) -> None:
        verdict = judge("host", [[300.0]], [[100.0]])
        assert not verdict.found.known
        assert verdict.ratio == pytest.approx(3)
        assert verdict.met == "not decided"


@pytest.mark.slow
@pytest.mark.vllm
class TestOnRealServers:
    @pytest.fixture(scope="class")
    def command(self, tmp_path_factory: pytest.TempPathFactory, vllm_model: Path) -> Iterator[list[Any]]:
        folder = tmp_path_factory.mktemp("tiering")
        (folder / "mine.toml").write_text(SUITE, "utf-8")
        make_corpus(folder / "corpora" / "small")
        with ForkServer() as fork_server, pytest.MonkeyPatch.context() as patch:
            launched = partial(VLLMServer, launch=fork_server.launch)
            patch.setattr("ragorder.benchmarks.ragcache.tiering.experiment.VLLMServer", launched)
            server = ["--engine", "openai", "--model", vllm_model, "--corpora", folder / "corpora"]
            yield ["run", folder / "mine.toml", "-o", folder, "--seeds", "1,2", *server]

    @pytest.fixture(scope="class")
    def found(self, command: list[Any]) -> list[JSON]:
        done = run_command(eval_command, *command)
        assert done.exit_code == 0, done.output
        assert "4 runs served" in done.output
        return result_lines(command[3], "tiering")

    def test_keeps_a_line_for_each_seed_and_arm(self, found: list[JSON]) -> None:
        assert [(line["seed"], line["policy"]) for line in found] == [(seed, arm) for seed in (1, 2) for arm in ARMS]
        for line in found:
            assert (line["suite"], line["cell"]["tier"], line["warmup"]) == ("mine", "host", 16)
            assert {len(column) for column in line["rows"].values()} == {24}
            prompts = sum(line["rows"]["prompt_tokens"][16:])
            assert sum(line["sources"].values()) == prompts
            assert sum(line["rows"]["cached_tokens"][16:]) == prompts - line["sources"]["computed"]

    def test_both_arms_serve_the_same_and_tiers_find_more_of_it(self, found: list[JSON]) -> None:
        for alone, tiers in zip(found[::2], found[1::2], strict=True):
            assert alone["rows"]["prompt_tokens"] == tiers["rows"]["prompt_tokens"]
            assert alone["sources"]["host"] == alone["sources"]["disk"] == 0
            assert tiers["sources"]["host"] > 0
            assert tiers["sources"]["computed"] < alone["sources"]["computed"]
            assert alone["facts"] == tiers["facts"]
            assert PrefillProfile.from_json(tiers["facts"]["profile"]).facts["model"] == "served"


def make_corpus(folder: Path) -> None:
    """24 questions about 12 documents of some 100 tokens each."""
    words = ["The cat sleeps on the warm windowsill.", "Rates were raised on Tuesday.", "A parser consumes tokens."]
    texts = [f"{words[each % 3]} Document number {each} says so. " * 6 for each in range(12)]
    questions = [{"question": f"What of number {number}?"} for number in range(24)]
    write_corpus(folder, texts, questions, [[(n * n + each) % 12 for each in range(3)] for n in range(24)])


def test_the_report_compares_only_seeds_that_both_arms_have(tmp_path: Path) -> None:
    found = lines("host", 300, 100)[:-1]
    (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in found), "utf-8")
    report = make_report(read_results(tmp_path), load_suites())
    assert "seeds 0, 1." in report.sections[0].tables[0].note


class TestChaos:
    def test_answers_are_compared_up_to_where_they_part(self) -> None:
        def answer(text: str, *logprobs: float, other: float = -2.0) -> Answer:
            likely = [{token: logprob, "~": other} for token, logprob in zip(text, logprobs, strict=True)]
            return Answer(tuple(text), tuple(likely), 10, 0)

        right = answer("abc", -1.0, -1.5, -1.0)
        assert right.agrees(answer("abc", -1.0005, -1.5, -1.0))
        assert right.agrees(answer("ab", -1.0, -1.5))
        assert not right.agrees(answer("abc", -1.0, -1.6, -1.0))
        # What is not chosen counts, too.
        assert not right.agrees(answer("abc", -1.0, -1.5, -1.0, other=-2.1))
        assert not right.agrees(answer("abx", -1.0, -1.5, -1.0))
        # Of two tokens that are equally likely either is right.
        tied = {"a": -1.0, "b": -1.0}
        one = Answer(("a", "c"), (tied, {"c": -1.0}), 10, 0)
        other = Answer(("b", "d"), (tied, {"d": -3.0}), 10, 0)
        assert one.agrees(other)
