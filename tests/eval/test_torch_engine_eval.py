"""The embedded engine in the evaluation: what it reports as an engine of the benchmarks, and what is measured of it."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.benched import runs_of
from support.commands import run_command
from support.results import result_lines

from ragorder import Lengths

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("scipy")

from ragorder import Document, Orderer, PromptBuilder
from ragorder.benchmarks.kernels.embedded.cells import BLOCKING, FUSED, HALF, EmbeddedCell
from ragorder.benchmarks.kernels.embedded.experiment import Embedded, judge, make_part, median
from ragorder.benchmarks.kernels.embedded.models import SHAPES, Layout, RandomPrompts, ask_again, draw_prompt
from ragorder.benchmarks.kernels.embedded.prefill import plain_transformers
from ragorder.benchmarks.kernels.embedded.serving import draw_trace
from ragorder.benchmarks.ragcache.reordering import Discipline, EmbeddedQueues
from ragorder.cli import main as ragorder
from ragorder.eval.data.trace import TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineError, RequestError, settings_of
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import AsyncTorchEngine, TorchEngine, TorchModel
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite
from ragorder.trie.profile import LINEAR, PrefillProfile

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

    def test_the_least_recently_used_document_goes_first(self, tiny: TorchModel) -> None:
        """Room for two prompts of one document: the third takes the place of the first."""
        engine = TorchEngine(tiny, capacity_tokens=352)
        asked = [prompt(name, question=name) for name in "abcb"]
        assert cached(engine, *asked) == [0, 50, 50, 150]
        assert cached(engine, prompt("a")) == [50]
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


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "kib_per_token"), [("qwen2.5-7b", 56), ("mistral-7b", 128), ("llama2-7b", 512), ("tiny", 1)]
    )
    def test_have_the_kv_of_the_real_models(self, name: str, kib_per_token: int) -> None:
        """RAGCache Table 1: 0.125 MiB a token for Mistral-7B, 0.5 for Llama2-7B."""
        shape = SHAPES[name]
        value_bytes = 2 if shape.large else 4
        head_dim = shape.hidden_size // shape.heads
        assert 2 * shape.layers * shape.kv_heads * head_dim * value_bytes == kib_per_token << 10

    def test_are_made_the_same_each_time(self, tiny: TorchModel) -> None:
        import torch

        again = SHAPES["tiny"].make().model.state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in tiny.model.state_dict().items())
        assert tiny.bytes_per_token == 1024

    @pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.large])
    def test_a_large_one_needs_a_gpu(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(EngineError, match=f"{name} needs a GPU, and there is none here: take shape tiny"):
            SHAPES[name].make()

    def test_plain_transformers_has_the_same_weights_and_goes_its_own_way(self, tiny: TorchModel) -> None:
        import torch

        plain = plain_transformers(tiny.model)
        engine = TorchEngine(tiny, capacity_tokens=640)
        ids = prompt("a", "b")
        engine.generate(ids)
        with torch.inference_mode():
            token = int(plain(input_ids=torch.tensor([list(ids)]), logits_to_keep=1).logits[0, -1].argmax())
        assert engine.served[-1].token_ids == (token,)
        shared = zip(plain.parameters(), tiny.model.parameters(), strict=True)
        assert all(ours is theirs for ours, theirs in shared)
        engine.close()


class TestPrompts:
    layout = Layout(documents=3, document_tokens=20, system_tokens=10, question_tokens=5)

    @pytest.mark.parametrize("documents", [0, 1, 3])
    def test_another_question_shares_just_the_documents(self, documents: int) -> None:
        rng = random.Random(0)
        ids = draw_prompt(self.layout, 512, rng)
        assert (len(ids), ids.document_ends) == (75, (10, 30, 50, 70))
        again = ask_again(ids, self.layout, documents, 512, rng)
        end = 10 + 20 * documents
        assert again[:end] == ids[:end]
        assert again[end] != ids[end]
        assert again.document_ends == ids.document_ends[: documents + 1]

    def test_of_a_trace_are_the_same_for_the_same_documents(self) -> None:
        a, b = Document("a", tokens=30), Document("b", tokens=40)
        first, second = (RandomPrompts(512).token_ids(number, TraceRequest("", []), [a, b]) for number in (1, 2))
        assert first.document_ends == (64, 94, 134)
        assert first[:134] == second[:134]
        assert first[134:] != second[134:]
        assert RandomPrompts(512).token_ids(1, TraceRequest("", []), [b])[64:104] == first[94:134]


ENGINE = {"name": "torch", "model": "tiny", "hardware": "a GPU", "block_size": 16}


def lines(arm: str, ms: float, *, measure: str = "cached") -> list[Any]:
    rng = random.Random(0)
    found = []
    for seed in range(3):
        rows = {name: [0.0] * 20 for name in ("cpu_ms", "device", "host", "disk")}
        rows["wall_ms"] = [ms * (1 + 0.02 * (rng.random() - 0.5)) for _ in range(20)]
        cell = {"measure": measure}
        found.append(Embedded.record(suite="mine", cell=cell, seed=seed, policy=arm, engine=ENGINE, rows=rows))
    return found


class TestVerdicts:
    @pytest.mark.parametrize(
        ("arm", "ms", "met"),
        [("2", 60, "met"), ("2", 70, "not met"), ("4", 25, "met"), ("4", 30, "not met"), ("1", 90, "")],
    )
    def test_of_cached_documents(self, arm: str, ms: float, met: str) -> None:
        verdict = judge(lines("0", 100), lines(arm, ms))
        assert verdict.met == met
        assert verdict.low <= verdict.ratio <= verdict.high
        assert verdict.ratio == pytest.approx(100 / ms, rel=0.05)

    @pytest.mark.parametrize(("ms", "met"), [(105, "met"), (115, "not met")])
    def test_of_the_engine_with_nothing_cached(self, ms: float, met: str) -> None:
        plain = lines("transformers", 100, measure="overhead")
        assert judge(plain, lines("nothing", ms, measure="overhead")).met == met

    def test_a_median_has_its_interval(self) -> None:
        middle, low, high = median([1, 2, 3, 4, 100])
        assert (middle, low, high) == (3, pytest.approx(1, abs=1), pytest.approx(100, abs=97))
        assert low < middle < high
        assert median([7, 7]) == (7, 7, 7)


def measured(folder: Path) -> list[dict[str, Any]]:
    return result_lines(folder, "embedded")


def run(suite: str, folder: Path, *options: str, seeds: str = "0") -> Result:
    """The suite with these parameters, such as "repeats=2"."""
    changes = [word for each in options for word in ("--set", each)]
    return run_command(ragorder, "eval", "run", suite, "-o", folder, "--seeds", seeds, *changes)


class TestPrefill:
    small = ("shape=tiny", "documents=3", "document_tokens=20", "repeats=2")
    system = 50

    def test_what_is_cached_is_what_was_meant_in_every_arm(self, tmp_path: Path) -> None:
        done = run("embedded-prefill", tmp_path, *self.small)
        assert done.exit_code == 0, done.output
        whole = self.system + 60
        expected = {
            ("cached", "nothing"): (0, 0, 0),
            **{("cached", str(number)): (self.system + 20 * number, 0, 0) for number in range(4)},
            ("overhead", "transformers"): (0, 0, 0),
            ("overhead", "nothing"): (0, 0, 0),
            ("tiers", "nothing"): (0, 0, 0),
            ("tiers", "device"): (whole, 0, 0),
            ("tiers", "host"): (0, whole, 0),
            ("tiers", "disk"): (0, 0, whole),
        }
        found = {(line["cell"]["measure"], line["policy"]): line["rows"] for line in measured(tmp_path)}
        assert set(found) == set(expected)
        for (measure, arm), rows in found.items():
            for tier, tokens in zip(("device", "host", "disk"), expected[measure, arm], strict=True):
                assert rows[tier] == [tokens, tokens]
            assert min(rows["wall_ms"]) > 0

    @pytest.mark.slow
    def test_fused_requests_reuse_all_documents(self, tmp_path: Path) -> None:
        done = run("embedded-fused", tmp_path, *self.small, "batch=1")
        assert done.exit_code == 0, done.output
        whole = self.system + 60
        shares = ("0%", "5%", "15%", "30%", "100%")
        arms = ["exact prefix", "exact prefix, exact request", *(f"fused, {share} recomputed" for share in shares)]
        arms += [f"fused, {share} recomputed{HALF}" for share in shares[:-1]]
        for tier in ("device", "host", "disk"):
            lines = [line for line in measured(tmp_path) if line["cell"]["stored"] == tier]
            found = {line["policy"]: line["rows"][tier] for line in lines}
            assert found.pop("nothing") is not None
            assert found == {arm: [whole, whole] for arm in arms}

    @pytest.mark.slow
    def test_a_batch_of_fused_requests_loads_its_documents_with_and_without_waiting(self, tmp_path: Path) -> None:
        small = (*self.small, "batch=3", "repeats=2")
        done = run("embedded-fused", tmp_path, *small, "stored=host")
        assert done.exit_code == 0, done.output
        lines = measured(tmp_path)
        blocked = {"exact prefix", *FUSED} - {"fused, 30% recomputed"}
        arms = {"nothing", "exact prefix", *FUSED, *(f"{arm}{BLOCKING}" for arm in blocked)}
        assert {line["policy"] for line in lines} == arms
        least = 3 * 60 + self.system
        for line in lines:
            if line["policy"] != "nothing":
                tokens = [line["rows"][tier] for tier in ("device", "host", "disk")]
                assert [sum(row) for row in zip(*tokens, strict=True)] == [3 * (60 + self.system)] * 2
                assert min(tokens[1]) >= least
        done = run_command(ragorder, "report", tmp_path, "--html", tmp_path / "report.html")
        assert done.exit_code == 0, done.output
        page = (tmp_path / "report.html").read_text("utf-8")
        for part in ("stored in host memory, 3 prompts at once", "Blocking loads", "Beside the same without it"):
            assert part in page

    def test_its_report_says_what_it_found(self, tmp_path: Path) -> None:
        assert run("embedded-prefill", tmp_path, *self.small, "measure=overhead", seeds="0,1").exit_code == 0
        said = run_command(ragorder, "report", tmp_path, "--markdown", "-").stdout
        for part in ("| transformers |", "| the engine |", "wall ms", "CPU ms", "times shorter", "Measured on: "):
            assert part in said

    @pytest.mark.slow
    def test_leaves_the_number_of_threads_as_it_was(self, tmp_path: Path) -> None:
        import torch

        before = torch.get_num_threads()
        done = run("embedded-prefill", tmp_path, *self.small, "measure=overhead", "threads=2")
        assert done.exit_code == 0, done.output
        assert torch.get_num_threads() == before
        assert {line["engine"]["hardware"] for line in measured(tmp_path)} <= {"CPU, 2 threads"}

    def test_measures_nothing_where_something_else_was_cached(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TorchEngine, "reset", lambda self: None)
        done = run("embedded-prefill", tmp_path, *self.small, "measure=cached")
        assert done.exit_code == 1
        assert "cached tokens on device, host and disk should be" in done.stderr
        assert measured(tmp_path) == []


class TestQueues:
    """The embedded engine's own queue, on a virtual clock."""

    @pytest.mark.slow
    def test_serves_all_in_the_order_of_arrival_or_the_most_cached_first(self, tiny: TorchModel) -> None:
        trace = trace_of_workload(make_workload("geo", 0, top_k=2, requests=16), 16)
        queues = EmbeddedQueues(2_000, max_in_flight=1, model=tiny)
        served = {}
        for name, window in (("fcfs", 0), ("reordered", 32), ("again", 32), ("reordered by 2", 2)):
            served[name] = queues.serve(trace, [0.0] * 16, Discipline(window, 0))
        assert [served[name].largest_overtaking for name in ("fcfs", "reordered by 2")] == [0, 2]
        assert served["reordered"].largest_overtaking > 2
        assert served["reordered"].ttft_s == served["again"].ttft_s
        for outcome in served.values():
            assert sorted(outcome.prompt_tokens) == sorted(served["fcfs"].prompt_tokens)
            assert min(outcome.ttft_s) > 0
        assert sum(served["reordered"].ttft_s) < sum(served["fcfs"].ttft_s)

    def test_a_step_takes_the_time_of_its_tokens(self, tiny: TorchModel) -> None:
        trace = trace_of_workload(make_workload("geo", 0, top_k=1, requests=2), 2)
        queues = EmbeddedQueues(None, max_in_flight=1, times=ServiceTimes(1_000.0), model=tiny)
        outcome = queues.serve(trace, [0.0, 100.0], Discipline(0, 0))
        tokens = zip(outcome.prompt_tokens, outcome.cached_tokens, strict=True)
        assert outcome.ttft_s == pytest.approx([(prompt - cached) / 1_000 for prompt, cached in tokens])


class TestServe:
    small = ("shape=tiny", "requests=16", "warmup=4", "top_k=2")

    @pytest.mark.slow
    def test_compares_caches_of_several_sizes(self, tmp_path: Path) -> None:
        caches = ("device=10%", "host=100%", "order=retrieval,free", "replacement=lru")
        done = run("embedded-serving", tmp_path, *self.small, "workload=zipf10-1.6", *caches)
        assert done.exit_code == 0, done.output
        runs = {line["policy"]: line["rows"] for line in measured(tmp_path)}
        alone, with_host = "device, lru", "device and 100%, lru"
        assert set(runs) == {"no cache", alone, with_host, f"{alone}, free order", f"{with_host}, free order"}
        for name, rows in runs.items():
            assert len(rows["wall_ms"]) == len(rows["prompt_tokens"]) == 16
            assert (sum(rows["host"]) > 0) == ("100%" in name)
            assert (sum(rows["device"]) > 0) == (name != "no cache")
            assert sum(rows["retrieved"]) == 16 * 2
        hits = {name: sum(rows["hits"]) for name, rows in runs.items()}
        assert 0 == hits["no cache"] < hits[alone] < hits[with_host] < hits[f"{with_host}, free order"]
        shown = run_command(ragorder, "report", tmp_path, "--markdown", "-").output
        for part in ("| no cache |", f"| {with_host} |", "times shorter than no cache", "first 4 left out"):
            assert part in shown

    @pytest.mark.slow
    def test_pgdsf_has_measured_prefill_times_and_the_record_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.kernels.profile_cache.cache_folder", lambda: tmp_path / "cache")
        arms = ("device, lru", "device and 50%, pgdsf")
        caches = ("device=10%", "host=50%", "requests=12", "warmup=1")
        shape = ("shape=tiny", "top_k=2", "workload=zipf10-1.6")
        done = run("embedded-serving", tmp_path, *shape, *caches)
        assert done.exit_code == 0, done.output
        facts = {line["policy"]: line["facts"] for line in measured(tmp_path)}
        profile = PrefillProfile.from_json(facts[arms[1]]["profile"])
        assert profile != LINEAR
        assert profile.facts["engine"].startswith("ragorder ")
        assert facts[arms[0]] == {}
        shown = run_command(ragorder, "report", tmp_path, "--markdown", "-").output
        assert "PGDSF by measured prefill times" in shown

    @pytest.mark.slow
    def test_replicas_outlive_the_device(self, tmp_path: Path) -> None:
        middle = ("requests=40", "warmup=20", "fails_after=20")
        caches = ("device=100%", "host=100%", "replacement=lru", "replicas=0,32")
        done = run("embedded-recovery", tmp_path, "shape=tiny", "top_k=2", *middle, *caches)
        assert done.exit_code == 0, done.output
        runs = {line["policy"]: line["rows"] for line in measured(tmp_path)}
        without, replicated = runs["device and 100%, lru"], runs["device and 100%, lru, 32 replicas"]
        assert without["device"][:20] == replicated["device"][:20]
        assert sum(without["device"][:20]) > 0
        assert without["device"][20] == replicated["device"][20] == 0
        assert sum(without["host"]) == sum(without["copied"]) == 0
        assert sum(replicated["host"][20:]) > 0 < sum(replicated["copied"][:20])

    def test_streams_like_those_of_ragcache_are_traces(self) -> None:
        drawn = draw_trace("mmlu-like", 0, 400, None)
        assert [len(request.documents) for request in drawn.requests] == [2] * 400
        lengths = [document.token_count for request in drawn.requests for document in request.documents]
        assert 3_000 < sum(lengths) / len(lengths) < 4_500
        assert drawn.requests == draw_trace("mmlu-like", 0, 400, 2).requests
        assert drawn.requests != draw_trace("nq-like", 0, 400, None).requests

    def test_every_setup_has_a_name_of_its_own(self) -> None:
        caches = {"host": ("8GiB", "16GiB"), "replacement": ("lru", "pgdsf"), "order": ("retrieval", "free")}
        cell = EmbeddedCell(measure="serving", **caches)
        assert len(cell.arms) == 1 + 2 + 8
        assert replace(cell.setups["no cache"], order="free").name == "no cache"

    @pytest.mark.parametrize(
        ("parameter", "said"),
        [
            ("warmup=20", "a warmup of 20 leaves less than 10"),
            ("host=much", "'much' is no size of a tier"),
            ("device=0", "'0' is no size of a tier"),
            ("shape=huge", "unknown shape 'huge': choose from tiny, narrow, small"),
            ("replacement=lur", "unknown replacement policy 'lur': did you mean 'lru'?"),
            ("documents=3", 'documents does not go with measure = "serving"'),
        ],
    )
    def test_says_what_is_wrong(self, tmp_path: Path, parameter: str, said: str) -> None:
        done = run("embedded-serving", tmp_path, *self.small, parameter)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())

    @pytest.mark.parametrize(
        ("parameter", "said"),
        [
            ("workload=nothing", "unknown workload 'nothing'"),
            (
                "shape=qwen2.5-7b",
                "the shape qwen2.5-7b needs a GPU, and there is none here: take shape tiny or narrow or small",
            ),
        ],
    )
    def test_keeps_the_reason_why_nothing_was_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameter: str, said: str
    ) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        done = run("embedded-serving", tmp_path, *self.small, parameter)
        assert done.exit_code == 0 and "2 unavailable" in done.output
        assert said in run_command(ragorder, "report", tmp_path, "--markdown", "-").output


def test_a_table_needs_only_one_arm() -> None:
    """As there is where a run was interrupted."""
    part = make_part(Suite.unlisted("mine"), Results(Path(), records=list(lines("2", 100))))
    (table,) = part.tables
    assert [each.text for each in table.rows[0][:2]] == ["and 2 of 5 documents", "0"]
    assert "–" in [each.text for each in table.rows[0]]
