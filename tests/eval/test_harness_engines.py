"""Suites on real vLLM: in this process, and on servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.harness import SUITE, invoke, run
from support.results import result_lines
from support.rings import grid

from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.models import built_prompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.session import Outcome
from ragorder.eval.running.specs import Bench
from ragorder.eval.running.suite import read_suite


@pytest.mark.slow
@pytest.mark.vllm
class TestOnARealEngine:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory, vllm_model: Path, python: Any) -> Path:
        """Jobs in the order in which their engines can be kept: two seeds with one size, and all with another.

        In a process of its own: engines that this one closes would leave the session's without their groups.
        """
        folder = tmp_path_factory.mktemp("vllm")
        sizes = grid([4_000, 3_000], 1)
        text = SUITE.replace('["paper-shuf", "geo"]', f'["paper-shuf"]\ncapacity_tokens = {sizes}')
        text = text.replace("capacity_tokens = 20_000", "top_k = 2").replace("requests = 30", "requests = 12")
        text = text.replace('"retrieval", "free"]', '"none", "retrieval", "free", "oracle"]')
        (folder / "mine.toml").write_text(text, "utf-8")
        command = ["-c", "from ragorder.cli import main; main()", "eval", "run", folder / "mine.toml"]
        options = ["-o", folder, "--seeds", "0,1", "--engine", "vllm", "--model", vllm_model]
        done = python(*command, *options, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"{6 * len(sizes)} runs served" in done.stdout
        return folder

    def test_the_same_suite_has_times_as_well(self, folder: Path, vllm_model: Path) -> None:
        found = result_lines(folder, "run")
        for line in found:
            assert all(ms > 0 for ms in line["rows"]["ttft_ms"])
            assert all(us > 0 for us in line["rows"]["build_us"])
            assert line["throughput"]["requests_per_s"] > 0
            assert line["engine"]["model"] == str(vllm_model)
        for none, retrieval, auto in zip(found[::3], found[1::3], found[2::3], strict=True):
            assert sum(none["rows"]["cached_tokens"]) == 0
            assert sum(auto["rows"]["cached_tokens"]) >= sum(retrieval["rows"]["cached_tokens"]) > 0

    def test_an_engine_that_was_kept_has_forgotten_what_it_served(self, folder: Path, vllm_model: Path) -> None:
        """It finds what a simulated one finds that is new for every job."""
        prompts = built_prompts(vllm_model)
        for line in result_lines(folder, "run"):
            if line["policy"] == "retrieval":
                requests = trace_of_workload(
                    make_workload("paper-shuf", line["seed"], top_k=2, requests=12), 12
                ).requests
                size = line["engine"]["block_size"], line["engine"]["capacity_tokens"]
                fresh = SimEngine(block_size=size[0], capacity_tokens=size[1], output_tokens=0, like="vllm-0.32")
                asked = [prompts.token_ids(number, each, each.documents) for number, each in enumerate(requests)]
                assert line["rows"]["cached_tokens"] == [fresh.generate(each).cached_tokens for each in asked]


LIVE = """
title = "On a server"
source = "tests"
says = "Something."
policies = ["none", "retrieval", "free"]
requests = 12

[cell]
workload = "paper-shuf"
top_k = 2
capacity_tokens = 4_096

[sweep]
concurrency = [1, 4]

[[extra]]
residency = ["events"]

[report]
chart = "strategies"
"""


@pytest.mark.slow
@pytest.mark.vllm
class TestOnARealServer:
    @pytest.fixture(scope="class")
    def command(self, tmp_path_factory: pytest.TempPathFactory, vllm_server: Any, vllm_model: Path) -> list[Any]:
        folder = tmp_path_factory.mktemp("live")
        (folder / "live.toml").write_text(LIVE, "utf-8")
        events = ["--events-endpoint", vllm_server.events_endpoint, "--replay-endpoint", vllm_server.replay_endpoint]
        server = ["--engine", "openai", "--base-url", vllm_server.base_url, "--model", vllm_model, *events]
        return ["run", folder / "live.toml", "-o", folder, "--seeds", "0,1", *server]

    @pytest.fixture(scope="class")
    def found(self, command: list[Any]) -> list[dict[str, Any]]:
        done = invoke(*command)
        assert done.exit_code == 0, done.output
        assert "12 runs served, 3 unavailable" in done.output
        return result_lines(command[3], "run")

    def test_every_cell_has_all_its_requests_answered(self, found: list[dict[str, Any]], vllm_server: Any) -> None:
        keys = [(line["cell"].get("concurrency", "events"), line["seed"], line["policy"]) for line in found]
        assert keys == [(c, s, p) for c in (1, 4, "events") for s in (0, 1) for p in ("retrieval", "free")]
        for line in found:
            engine = line["engine"]
            assert (engine["name"], engine["block_size"], engine["capacity_tokens"]) == ("openai", 32, 4_096)
            assert (line["failures"], line["fallbacks"]) == (0, 0)
            assert line["throughput"]["requests_per_s"] > 0
            rows = line["rows"]
            assert all(ms > 0 for ms in rows["ttft_ms"])
            for cached, prompt in zip(rows["cached_tokens"], rows["prompt_tokens"], strict=True):
                assert cached % 32 == 0
                assert 0 <= cached < prompt

    def test_policies_have_the_same_prompts_and_a_cache_of_their_own(self, found: list[dict[str, Any]]) -> None:
        for retrieval, auto in zip(found[::2], found[1::2], strict=True):
            assert retrieval["rows"]["prompt_tokens"] == auto["rows"]["prompt_tokens"]
            # Of several at once, any may be the first to be computed.
            assert 0 in retrieval["rows"]["cached_tokens"]
            assert 0 in auto["rows"]["cached_tokens"]
            assert sum(retrieval["rows"]["moved_share"]) == 0 < sum(auto["rows"]["moved_share"])
            assert sum(auto["rows"]["cached_tokens"]) > 0

    def test_what_a_server_cannot_do_is_recorded(self, found: list[dict[str, Any]], command: list[Any]) -> None:
        missing = result_lines(command[3], "unavailable")
        assert {line["policy"] for line in missing} == {"none"}
        assert "measure it with --engine vllm" in missing[0]["reason"]

    def test_servers_of_ones_own_stay_until_another_size_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_server: Any, vllm_model: Path
    ) -> None:
        """The session's stands in for them, so that none has to be started."""
        happened: list[Any] = []

        @contextmanager
        def start_server(bench: Bench) -> Iterator[Any]:
            happened.append(bench.capacity)
            yield vllm_server
            happened.append("stopped")

        monkeypatch.setattr("ragorder.eval.running.live.start_server", start_server)
        text = LIVE.replace("capacity_tokens = 4_096\n", "").replace("[1, 4]", "[1]\ncapacity_tokens = [4_096, 2_048]")
        text = text.replace('\n[[extra]]\nresidency = ["events"]\n', "").replace("top_k = 2", 'residency = "events"')
        asked = read_suite("own", text, "own.toml")
        outcome = run(tmp_path, asked, seeds=(0, 1), engine="openai", model=vllm_model, limit=2)
        assert outcome == Outcome(runs=8, unavailable=2)
        assert happened == [Capacity(tokens=4_096), "stopped", Capacity(tokens=2_048), "stopped"]
        assert all(line["failures"] == 0 for line in result_lines(tmp_path, "run"))
