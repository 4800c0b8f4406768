"""Pipelines of `ragorder bench`: searches as they are played, the server, and the record of both modes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_command
from support.results import result_lines
from support.retrieved import requests, shown

pytest.importorskip("numpy")

from ragorder.eval.cli.bench import bench as bench_command
from ragorder.eval.engines.base import EngineError
from ragorder.eval.running.specs import Bench, BenchError
from ragorder.eval.suites.pipelining.bench import pipeline_lines
from ragorder.eval.suites.pipelining.search import played
from ragorder.eval.suites.pipelining.server import find_server

JSON = dict[str, Any]


class TestAPlayedSearch:
    @given(stages=st.integers(1, 6), top_k=st.integers(0, 6), seed=st.integers(0, 9), number=st.integers(0, 5))
    def test_ends_with_the_documents_of_the_trace(self, stages: int, top_k: int, seed: int, number: int) -> None:
        rankings = [request.documents for request in requests(6, top_k)]
        found = asyncio.run(shown(played(rankings, 0.0, stages=stages, seed=seed), number))
        assert [stage.final for stage in found] == [False] * (stages - 1) + [True]
        final = rankings[number]
        assert list(found[-1].documents) == final
        wrong = [sum(document not in final for document in stage.documents) for stage in found]
        for stage, missing in zip(found, wrong, strict=True):
            assert len({document.key for document in stage.documents}) == len(stage.documents) == top_k
            assert list(stage.documents)[: top_k - missing] == final[: top_k - missing]
        assert wrong == sorted(wrong, reverse=True)
        again = asyncio.run(shown(played(rankings, 0.0, stages=stages, seed=seed), number))
        assert [list(stage.documents) for stage in again] == [list(stage.documents) for stage in found]

    def test_is_final_after_each_stage_alike(self) -> None:
        rankings = [request.documents for request in requests(24)] * 20
        retrieval = played(rankings, 0.0, stages=4)

        async def settled() -> list[int]:
            every = [await shown(retrieval, number) for number in range(len(rankings))]
            return [sum(list(stage.documents) != list(found[-1].documents) for stage in found) for found in every]

        stages = asyncio.run(settled())
        assert all(0.15 < stages.count(stage) / len(stages) < 0.35 for stage in range(4))


@pytest.fixture(scope="module")
def facts(vllm_server: Any, vllm_model: Path) -> Any:
    return find_server(vllm_server.base_url, model=vllm_model)


@pytest.mark.vllm
class TestAServer:
    def test_that_is_not_there_is_reported(self, vllm_model: Path) -> None:
        with pytest.raises(EngineError, match="cannot be reached"):
            find_server("http://127.0.0.1:9", model=vllm_model)

    def test_whose_sizes_are_given_is_not_asked_for_them(self, facts: Any, vllm_model: Path) -> None:
        given = find_server(facts.base_url, model=vllm_model, block_size=64, capacity_tokens=640)
        assert (given.block_size, given.capacity_tokens) == (64, 640)


@pytest.mark.slow
class TestTheBenchmark:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({}, "the simulated engine has no clock"),
            ({"engine": "vllm"}, "use --engine openai, which starts a vLLM server"),
            ({"engine": "openai", "batch": True}, "one request at a time, or with --concurrency"),
            ({"engine": "openai", "policies": ("retrieval", "sorted")}, "policy 'sorted' cannot preview"),
            ({"engine": "openai", "base_urls": ("http://a", "http://b")}, "give one --base-url"),
        ],
    )
    def test_says_what_a_pipeline_cannot_do(self, options: JSON, said: str) -> None:
        with pytest.raises(BenchError, match=said):
            next(pipeline_lines(Bench(workloads=("paper-shuf",), **options), "speculative", 50.0, "s"))

    def test_a_delay_needs_a_pipeline(self) -> None:
        done = run_command(bench_command, "--retrieval-delay", 20)
        assert done.exit_code == 2 and "--retrieval-delay needs --pipeline" in done.output

    @pytest.mark.vllm
    @pytest.mark.parametrize("load", [(), ("--concurrency", 3)], ids=["in turn", "at once"])
    def test_has_a_row_with_and_one_without(
        self, vllm_server: Any, vllm_model: Path, tmp_path: Path, load: tuple[Any, ...]
    ) -> None:
        server = ("--engine", "openai", "--base-url", vllm_server.base_url, "--model", vllm_model)
        trace = ("--workload", "paper-shuf", "--policy", "free", "--top-k", 2, "--limit", 5, "-o", tmp_path)
        pipeline = ("--pipeline", "speculative", "--retrieval-delay", 60)
        done = run_command(bench_command, *server, *trace, *pipeline, *load)
        assert done.exit_code == 0, done.output
        assert "speculative" in done.output and "TTFT p50" in done.output
        assert "60" in done.output.split(), "the delay"
        (record,) = result_lines(tmp_path, "pipelines")
        plain, ours = record["rows"]["none"], record["rows"]["speculative"]
        assert (record["cell"]["order"], record["cell"]["retrieval_ms"]) == ("free", 60)
        for rows in (plain, ours):
            assert {len(values) for values in rows.values()} == {5}
            assert min(rows["ttft_ms"]) > 0
        assert sorted(plain["ttft_ms"])[2] >= 60
        assert plain["prompt_tokens"] == ours["prompt_tokens"]
        assert not any(sum(plain[name]) for name in ("speculations", "warmed_up", "wasted_prompt_tokens"))
        assert min(plain["exposed_ms"]) >= 60
        assert set(plain["tbt_ms"]) == {None}, "answers have one token"
        assert 0 <= sum(ours["right"]) <= min(5, sum(ours["speculations"]))
