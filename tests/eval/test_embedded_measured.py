"""What is measured of the embedded engine: prefills, queues and caches, on small shapes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.commands import run_command
from support.results import result_lines

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("scipy")

from ragorder import Document
from ragorder.benchmarks.kernels.embedded.cells import EmbeddedCell
from ragorder.benchmarks.kernels.embedded.experiment import Embedded, judge, make_part, median
from ragorder.benchmarks.kernels.embedded.models import SHAPES, Layout, RandomPrompts, ask_again, draw_prompt
from ragorder.benchmarks.kernels.embedded.prefill import plain_transformers
from ragorder.benchmarks.ragcache.reordering import Discipline, EmbeddedQueues
from ragorder.cli import main as ragorder
from ragorder.eval.data.trace import TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite
from ragorder.trie.profile import LINEAR, PrefillProfile

pytestmark = pytest.mark.merge


@pytest.fixture(scope="module")
def tiny() -> TorchModel:
    return SHAPES["tiny"].make()


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
        ids = draw_prompt(Layout(documents=2, document_tokens=100), 512, random.Random(0))
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


def test_a_table_needs_only_one_arm() -> None:
    """As there is where a run was interrupted."""
    part = make_part(Suite.unlisted("mine"), Results(Path(), records=list(lines("2", 100))))
    (table,) = part.tables
    assert [each.text for each in table.rows[0][:2]] == ["and 2 of 5 documents", "0"]
    assert "–" in [each.text for each in table.rows[0]]
