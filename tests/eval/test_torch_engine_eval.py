"""The embedded engine in the evaluation: what it reports as an engine of the benchmarks, and what is measured of it."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.benched import runs_of
from support.commands import run_command
from support.results import result_lines

from ragorder import Lengths

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("scipy")

from ragorder import Document, Orderer, PromptBuilder
from ragorder.benchmarks.kernels.embedded.models import SHAPES, RandomPrompts
from ragorder.cli import main as ragorder
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineError, RequestError, settings_of
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import AsyncTorchEngine, TorchEngine, TorchModel

pytestmark = pytest.mark.merge

SYSTEM = 50


@pytest.fixture(scope="module")
def tiny() -> TorchModel:
    return SHAPES["tiny"].make()


@pytest.fixture(scope="module")
def opened(tiny: TorchModel) -> Iterator[TorchEngine]:
    engine = TorchEngine(tiny, capacity_tokens=1600)
    yield engine
    engine.close()


@pytest.fixture
def engine(opened: TorchEngine) -> TorchEngine:
    opened.reset()
    return opened


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder, with a tokenizer for the words of the synthetic workloads."""
    from ragorder.kernels.random_model import make_model

    texts = [document.text for document in make_workload("paper-shuf", 0, requests=1).documents[:40]]
    folder = tmp_path_factory.mktemp("models") / "served"
    return make_model(folder, texts=texts, layers=2, hidden_size=64, vocab_size=2048, max_position_embeddings=16384)


def prompt(*documents: str, question: str = "?", tokens: int = 100) -> PromptIds:
    """A system prompt of 50 tokens, a document of `tokens` for each name, a question of 20."""
    parts = [("system", SYSTEM), *((name, tokens) for name in documents)]
    drawn = [random.Random(name).choices(range(512), k=length) for name, length in [*parts, (question, 20)]]
    return PromptIds([id for part in drawn for id in part], accumulate(map(len, drawn[:-1])))


def cached(engine: TorchEngine, *prompts: Sequence[int]) -> list[int]:
    return [engine.generate(each).cached_tokens for each in prompts]


class TestPromptIds:
    def test_an_empty_document_has_no_end_of_its_own(self) -> None:
        assert PromptIds(range(9), [0, 3, 3, 8]).document_ends == (3, 8)

    def test_of_a_built_prompt_are_its_spans(self, tokenizers: dict[str, Any]) -> None:
        builder = PromptBuilder("Be careful.", tokenizer=tokenizers["chatml"])
        built = builder.build("why?", [Document("a", "one two"), Document("b", "three")])
        ids = PromptIds.of(built)
        assert ids == built.token_ids
        assert ids.document_ends == (builder.prefix_tokens, *(span.end for span in built.spans))
        assert PromptIds.of(builder.build("why?", [])).document_ends == ()


class TestTorchEngine:
    @pytest.mark.parametrize("block_size", [1, 64])
    def test_finds_whole_documents_whatever_the_blocks(self, tiny: TorchModel, block_size: int) -> None:
        engine = TorchEngine(tiny, block_size=block_size, capacity_tokens=3200 + block_size - 1)
        assert (engine.name, engine.block_size, engine.capacity_tokens) == ("torch", block_size, 3200)
        assert (engine.kept_output_tokens, engine.partial_blocks_first) == (0, True)
        asked = [prompt("a", "b"), prompt("a", "b", question="!"), prompt("a", "c"), prompt("b", "a"), prompt("a")]
        assert cached(engine, *asked) == [0, 250, 150, 50, 150]
        engine.close()

    def test_counts_the_prompt_and_measures_time(self, engine: TorchEngine) -> None:
        one = engine.generate(prompt("a", "b"))
        assert (one.prompt_tokens, one.tbt_s) == (270, None)
        assert one.ttft_s is not None and one.total_s is not None and 0 < one.ttft_s <= one.total_s
        with engine.answering(4):
            several = engine.generate(prompt("a"))
        assert len(engine.served[-1].token_ids) == 4
        assert several.ttft_s is not None and several.total_s is not None and several.tbt_s is not None
        assert 0 < 3 * several.tbt_s <= several.total_s - several.ttft_s
        assert engine.generate(prompt("a")).tbt_s is None

    def test_a_prompt_that_says_nothing_of_documents_is_cut_into_chunks_and_reset_forgets_them(
        self, engine: TorchEngine
    ) -> None:
        ids = list(prompt("a", "b", "c", "d", "e", "f"))
        assert cached(engine, ids, ids) == [0, 512]
        engine.reset()
        assert engine.served == []
        assert cached(engine, ids) == [0]

    def test_without_prefix_caching_nothing_is_reused(self, tiny: TorchModel) -> None:
        engine = TorchEngine(tiny, capacity_tokens=640, prefix_caching=False)
        assert cached(engine, *[prompt("a", "b")] * 6) == [0] * 6
        engine.close()

    def test_documents_that_left_the_device_come_from_the_host_with_the_same_answer(self, tiny: TorchModel) -> None:
        engine = TorchEngine(tiny, capacity_tokens=288, host_tokens=3200, output_tokens=8)
        assert engine.capacity_tokens == 3200
        asked = prompt("a", "b")
        assert cached(engine, asked, asked, prompt("c", "d"), asked) == [0, 250, 50, 250]
        assert (engine.served[-1].cached.host, engine.served[-1].cached.device) == (200, 50)
        answers = [served.token_ids for served in engine.served]
        assert [len(answer) for answer in answers] == [8] * 4
        assert answers[0] == answers[1] == answers[3]
        engine.close()

    def test_documents_that_left_the_host_come_from_the_disk(self, tiny: TorchModel, tmp_path: Path) -> None:
        sizes = {"capacity_tokens": 288, "host_tokens": 400, "disk_bytes": 1 << 24}
        engine = TorchEngine(tiny, **sizes, disk_path=tmp_path / "disk")
        cached(engine, prompt("a", "b"), prompt("c", "d"), prompt("e", "f"), prompt("g", "h"))
        assert cached(engine, prompt("a", "b", question="!")) == [250]
        assert engine.served[-1].cached.disk >= 200
        engine.close()

    def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_goes_on(self, engine: TorchEngine) -> None:
        for length in (0, 1601):
            with pytest.raises(ValueError, match="prompt"):
                engine.generate([7] * length)
        assert cached(engine, prompt("a")) == [0]

    def test_is_closed_once_and_for_all_and_another_on_its_model_goes_on(self, tiny: TorchModel) -> None:
        engine, other = (TorchEngine(tiny, capacity_tokens=640) for _ in range(2))
        assert [cached(each, prompt("a")) for each in (engine, other, engine)] == [[0], [0], [150]]
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.generate(prompt("a"))
        assert cached(other, prompt("a")) == [150]
        other.close()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"capacity_tokens": 15}, "a pool of 15 tokens has no block of 16 tokens: raise the capacity"),
            ({"block_size": 0}, "block of 0 tokens"),
            ({"output_tokens": 0}, "output_tokens is 0"),
            ({"policy": "mru"}, "mru"),
        ],
    )
    def test_refuses_impossible_sizes_and_policies(self, tiny: TorchModel, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            TorchEngine(tiny, **options)

    @pytest.mark.parametrize("blocked", [pytest.param("torch", marks=pytest.mark.slow), "transformers"])
    def test_without_torch_it_names_the_extra(self, python: Any, served_model: Path, blocked: str) -> None:
        arguments = ["bench", "--engine", "torch", "--model", str(served_model), "--limit", "2"]
        done = python("-c", "from ragorder.cli import main; main()", *arguments, blocked=(blocked,))
        assert done.returncode == 1, done.stderr
        assert f"the torch engine needs {blocked}: in a clone of ragorder, pip install '.[torch]'" in done.stderr
        assert "Traceback" not in done.stderr


class TestUnderLoad:
    def test_requests_that_come_together_are_answered_as_one_by_one_and_as_long_as_asked_for(
        self, engine: TorchEngine
    ) -> None:
        asked = [prompt(*names, question=str(number)) for number, names in enumerate(["ab", "ac", "ab", "de", "d"])]
        lengths = (4, 1, 2, 7, 4)
        with engine.answering(7):
            cached(engine, *asked)
        expected = [served.token_ids[:wanted] for served, wanted in zip(engine.served, lengths, strict=True)]
        engine.reset()

        async def together() -> list[Any]:
            loaded = AsyncTorchEngine(engine)
            return await asyncio.gather(*map(loaded.complete, asked, lengths))

        completions = asyncio.run(together())
        answers = {served.request_id: served.token_ids for served in engine.served}
        assert [answers[number] for number in sorted(answers)] == expected
        assert [completion.prompt_tokens for completion in completions] == [len(each) for each in asked]
        assert all(0 < completion.ttft_s <= completion.total_s for completion in completions)

    def test_one_that_is_refused_fails_alone(self, engine: TorchEngine) -> None:
        async def together() -> list[Any]:
            loaded = AsyncTorchEngine(engine)
            asked = [prompt("a"), [7] * 5000, prompt("b")]
            return await asyncio.gather(*(loaded.complete(each) for each in asked), return_exceptions=True)

        first, refused, last = asyncio.run(together())
        assert (first.prompt_tokens, last.prompt_tokens) == (170, 170)
        assert isinstance(refused, RequestError)

    def test_a_step_that_fails_ends_the_run(self, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> None:
            raise OSError("gone")

        monkeypatch.setattr(engine.engine, "step", broken)
        with pytest.raises(EngineError, match="gone"):
            asyncio.run(AsyncTorchEngine(engine).complete(prompt("a")))


class TestOrderer:
    def test_predicts_whole_blocks_of_what_is_found(self, tiny: TorchModel) -> None:
        """With room for everything: the engine finds documents to their ends, the orderer counts whole blocks."""
        workload = make_workload("paper-shuf", 0, requests=1)
        prompts = RandomPrompts(tiny.vocabulary)
        engine = TorchEngine(tiny, unlimited_tokens=20 * 1_300)
        orderer = Orderer(
            settings_of(engine, prefix_tokens=prompts.prefix_tokens, strict=True), tokens=prompts.document_tokens
        )
        found = 0
        for number, ranking in enumerate(workload.rankings[:20]):
            documents = [workload.documents[each] for each in ranking]
            ordering = orderer.order(documents, lengths=Lengths(suffix=prompts.question_tokens))
            ids = prompts.token_ids(number, TraceRequest("", []), ordering.documents)
            completion = engine.generate(ids)
            assert 0 <= completion.cached_tokens - ordering.cached_tokens < engine.block_size
            assert completion.cached_tokens in (0, *ids.document_ends)
            found += completion.cached_tokens
            ordering.confirm()
        assert found > 20 * 300
        engine.close()


class TestCommands:
    """--engine torch, wherever an engine is chosen."""

    def bench(self, model: Path, folder: Path, *options: str) -> dict[str, dict[str, Any]]:
        arguments = ["bench", "--engine", "torch", "--model", str(model), "--top-k", "3", "--limit", "8"]
        done = run_command(ragorder, *arguments, "-o", folder, *options)
        assert done.exit_code == 0, done.output
        assert "TTFT" in done.stdout
        assert "paper-shuf" in done.stdout
        text = (folder / "results.jsonl").read_text("utf-8")
        return {run["policy"]: run for run in runs_of(text)}

    def test_bench_serves_a_workload_on_it(self, served_model: Path, tmp_path: Path) -> None:
        policies = [option for policy in ("none", "retrieval", "free") for option in ("--policy", policy)]
        runs = self.bench(served_model, tmp_path, "--capacity-tokens", "6144", "--block-size", "16", *policies)
        assert set(runs) == {"none", "retrieval", "free"}
        for run in runs.values():
            assert (run["engine"], run["requests"], run["failures"]) == ("torch", 8, 0)
            assert run["capacity_tokens"] == 6144
            assert min(run["ttft_ms"].values()) > 0
        assert runs["none"]["cached_tokens"] == 0
        assert 0 < runs["retrieval"]["cached_tokens"] < runs["free"]["cached_tokens"]
        assert len({run["prompt_tokens"] for run in runs.values()}) == 1

    @pytest.mark.slow
    def test_bench_with_host_memory_holds_what_the_host_does(self, served_model: Path, tmp_path: Path) -> None:
        options = ["--capacity-tokens", "2048", "--policy", "retrieval", "--limit", "3", "--output-tokens", "3"]
        run = self.bench(served_model, tmp_path, *options, "--host-tokens", "40000")["retrieval"]
        assert run["capacity_tokens"] == 40000
        assert min(run["ttft_ms"].values()) > 0

    @pytest.mark.slow
    def test_bench_under_load(self, served_model: Path, tmp_path: Path) -> None:
        options = ["--concurrency", "3", "--output-tokens", "3", "--policy", "retrieval", "--policy", "free"]
        runs = self.bench(served_model, tmp_path, "--capacity-tokens", "8192", *options)
        for run in runs.values():
            assert (run["requests"], run["failures"], run["concurrency"]) == (8, 0, 3)
        assert runs["free"]["cached_tokens"] >= runs["retrieval"]["cached_tokens"] > 0

    def test_bench_says_how_large_the_cache_must_be(self, served_model: Path) -> None:
        arguments = ["--engine", "torch", "--model", served_model, "--limit", "2", "--capacity-tokens", "64"]
        done = run_command(ragorder, "bench", *arguments)
        assert done.exit_code == 1
        assert "raise --capacity-tokens" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--engine", "sim", "--host-tokens", "9"), "--host-tokens require --engine torch"),
            (("--engine", "torch", "--policy", "oracle"), "use it with --engine sim"),
            (("--engine", "torch", "--policy", "events"), "use it with --engine openai"),
            (("--engine", "torch", "--base-url", "http://x"), "require --engine openai"),
            (("--engine", "torch", "--pipeline", "none"), "use --engine openai"),
            (("--engine", "torch", "--model", "/nowhere"), "/nowhere"),
            (("--engine", "torch", "--model", "EMPTY"), "Error: "),
        ],
    )
    def test_bench_refuses_what_does_not_go_with_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "EMPTY").mkdir()
        done = run_command(ragorder, "bench", "--limit", "2", *arguments)
        assert done.exit_code in (1, 2)
        assert said in " ".join(done.stderr.split())

    @pytest.fixture
    def demo(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., list[str]]:
        """The lines of a demonstration, without its times."""

        def show(model: Path, limit: int) -> list[str]:
            pytest.importorskip("bm25s")
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
            monkeypatch.setenv("COLUMNS", "300")
            done = run_command(ragorder, "demo", "--model", model, "--limit", limit)
            assert done.exit_code == 0, done.output
            assert ("first token after" in done.stdout) != ("The times of this run were disturbed" in done.stdout)
            return [" ".join(re.sub(r", [\d,]+ ms", "", line).split()) for line in done.stdout.splitlines()]

        return show

    def test_the_demonstration_takes_another_model(self, demo: Callable[..., list[str]], served_model: Path) -> None:
        said = " ".join(demo(served_model, 2))
        assert f"The engine is ragorder's embedded engine, with {served_model.name}." in said
        assert "the model and its answers (at most 24 tokens, greedy), the times of this machine" in said

    @pytest.mark.slow
    def test_the_demonstration_answers(self, demo: Callable[..., list[str]], smollm2_folder: Path) -> None:
        said = demo(smollm2_folder, 6)
        saved = re.match(r"(\d+) % fewer tokens computed; .*([0-6]) of 6 answers the same\.$", said[0])
        assert saved is not None and int(saved[1]) > 0
        assert "The engine is ragorder's embedded engine, with SmolLM2-135M-Instruct." in " ".join(said)
        row = r"│ {} │ ([\d,.]+)\D* │ ([\d,.]+)\D* │"
        (cached,) = filter(None, (re.match(row.format("found in the cache"), line) for line in said))
        assert float(cached[2]) > float(cached[1])
        # A question, then both answers, then what each cost.
        asked = [place for place, line in enumerate(said) if re.fullmatch(r"[1-6] \S.*\? \[.+\]", line)]
        assert len(asked) == 6
        costs = [place for place, line in enumerate(said) if re.fullmatch(r"([\d,]+ of [\d,]+ cached ?){2}", line)]
        # Answers may take several lines.
        assert all(question + 1 < cost for question, cost in zip(asked, costs, strict=True))
        assert all(cost < question for cost, question in zip(costs, asked[1:], strict=False))
        (right,) = filter(None, (re.match(r"│ right answers │ (\d) of 6 │ (\d) of 6 │", line) for line in said))
        answers = [line for place, cost in zip(asked, costs, strict=True) for line in said[place + 1 : cost]]
        assert sum(line.count("✓") for line in answers) == int(right[1]) + int(right[2])

    @pytest.mark.slow
    def test_suites_are_run_on_it(self, served_model: Path, tmp_path: Path) -> None:
        options = ["--engine", "torch", "--model", served_model, "--reduced", "--limit", "2", "--seeds", "0"]
        options += ["--policy", "none", "--policy", "retrieval"]
        done = run_command(ragorder, "eval", "run", "table-1", "-o", tmp_path, *options)
        assert done.exit_code == 0, done.output
        runs = result_lines(tmp_path, "run")
        assert {run["policy"] for run in runs} == {"none", "retrieval"}
        for run in runs:
            assert (run["engine"]["name"], run["engine"]["block_size"]) == ("torch", 16)
            assert all(run["rows"]["ttft_ms"])
            assert (sum(run["rows"]["cached_tokens"]) == 0) == (run["policy"] == "none")
