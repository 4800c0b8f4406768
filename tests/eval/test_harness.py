"""The evaluation harness: what is run of suites, and how results are kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.harness import QUALITY, SUITE, invoke, run, suite, write_corpus
from support.results import result_lines

from ragorder.eval.data.machine import describe_environment
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.peers import PeerError
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.options import HarnessError, Options
from ragorder.eval.running.session import Outcome, plan_run
from ragorder.eval.running.specs import Bench
from ragorder.eval.running.store import Store, StoreError
from ragorder.eval.running.suite import choose_suites, load_suites, read_suite


class TestAStore:
    @pytest.mark.parametrize("torn", ['{"type": "run", "sui', "[1, 2", '{"type": "check", "name": "b"}', "\udcff", "{"])
    def test_passes_over_a_torn_last_line_and_ends_it(self, tmp_path: Path, torn: str) -> None:
        path = tmp_path / "results.jsonl"
        whole = b'{"type":"check","name":"a"}\n'
        path.write_bytes(whole + torn.encode("utf-8", "surrogateescape"))
        with Store(tmp_path) as store:
            assert store.has("check", name="a")
            assert not store.has("check", name="b")
            store.append({"type": "check", "name": "c"})
        written = path.read_bytes()
        assert written.startswith(whole + torn.encode("utf-8", "surrogateescape") + b"\n")
        with Store(tmp_path) as store:
            assert store.has("check", name="c")
        assert path.read_bytes() == written

    def test_passes_over_lines_that_are_no_results(self, tmp_path: Path) -> None:
        deep = '{"type":"run","cell":' + "[" * 100_000 + "]" * 100_000 + "}"
        (tmp_path / "results.jsonl").write_text(f'nonsense\n{deep}\n{{"type":"check","name":"a"}}\n[1]\n\n')
        for opened in (Store(tmp_path), Store.reading(tmp_path)):
            with opened as store:
                assert store.has("check", name="a")

    def test_only_runs_that_name_a_measurement_stand_in_for_those_of_another_suite(self, tmp_path: Path) -> None:
        run = {"type": "run", "suite": "a", "session": "s", "policy": "free"}
        with Store(tmp_path) as store:
            store.append(run)
            store.append({"type": "check", "name": "n", "measurement": "m"})
            assert store.measured("m", ("free",)) is None
            store.append(run | {"measurement": "m"})
            assert store.measured("m", ("free",)) == [run | {"measurement": "m"}]

    def test_only_one_writes_at_a_time(self, tmp_path: Path) -> None:
        with Store(tmp_path):
            script = "import sys, ragorder.eval.running.store as s; s.Store(s.Path(sys.argv[1])).__enter__()"
            done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
        assert done.returncode != 0
        assert "another process is writing there" in done.stderr

    def test_the_environment_names_a_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert describe_environment()["gpu"] == "NVIDIA H200, NVIDIA H200"
        tool.write_text("#!/bin/sh\nexit 9\n")
        assert describe_environment()["gpu"] is None

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be written"), Store(tmp_path / "file"):
            pass


class TestARun:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("run")
        outcome = run(folder, suite(), seeds=(0, 1))
        assert outcome == Outcome(runs=8)
        return folder

    def test_results_begin_with_the_session_and_its_environment(self, folder: Path) -> None:
        session = result_lines(folder)[0]
        assert (session["type"], session["schema"]) == ("session", 1)
        assert session["arguments"]["seeds"] == [0, 1]
        assert {"load_average", "python", "packages", "cores"} <= set(session["environment"])
        assert {line["session"] for line in result_lines(folder)} == {session["session"]}

    def test_writes_every_request_of_every_cell_seed_and_policy(self, folder: Path) -> None:
        lines = result_lines(folder, "run")
        done = [(line["cell"]["workload"], line["seed"], line["policy"]) for line in lines]
        assert done == [(w, s, p) for w in ("paper-shuf", "geo") for s in (0, 1) for p in ("retrieval", "free")]
        engine = {"name": "sim", "model": None, "block_size": 16, "capacity_tokens": 20_000, "like": "vllm-0.32"}
        prompts: dict[tuple[str, int], list[list[int]]] = {}
        for line in lines:
            rows, plain = line["rows"], line["policy"] == "retrieval"
            assert {len(values) for values in rows.values() if values is not None} == {30}, "the warmup included"
            assert rows["ttft_ms"] is rows["build_us"] is line["throughput"] is None, "the engine has no clock"
            assert (rows["predicted_tokens"] is None) == plain
            assert ((sum(rows["moved_share"]), sum(rows["displacement"])) == (0, 0)) == plain
            assert (line["engine"], line["warmup"], line["failures"], line["fallbacks"]) == (engine, 5, 0, 0)
            assert line["cell"] == {"workload": line["cell"]["workload"], "capacity_tokens": 20_000}
            prompts.setdefault((line["cell"]["workload"], line["seed"]), []).append(rows["prompt_tokens"])
        assert all(one == other for one, other in prompts.values())
        assert prompts["geo", 0] != prompts["geo", 1]

    def test_has_the_figures_of_the_benchmark(self, folder: Path) -> None:
        sized = {"capacity": Capacity(tokens=20_000), "like": "vllm-0.32"}
        (runs,) = run_traces(Bench(workloads=("geo",), policies=("retrieval", "free"), seeds=(1,), limit=30, **sized))
        kept = [line for line in result_lines(folder, "run") if line["cell"]["workload"] == "geo" and line["seed"] == 1]
        for each, line in zip(runs, kept, strict=True):
            assert each.columns().cached_tokens == line["rows"]["cached_tokens"]
            assert each.columns().prompt_tokens == line["rows"]["prompt_tokens"]

    def test_that_is_done_is_not_run_again(self, folder: Path) -> None:
        before = result_lines(folder, "run")
        assert run(folder, suite(), seeds=(0, 1)) == Outcome()
        assert result_lines(folder, "run") == before
        assert len(result_lines(folder, "session")) >= 2


class TestResuming:
    def test_continues_after_what_is_there(self, tmp_path: Path) -> None:
        run(tmp_path / "whole", suite(), seeds=(0, 1))
        path = tmp_path / "torn" / "results.jsonl"
        path.parent.mkdir()
        text = (tmp_path / "whole" / "results.jsonl").read_text()
        cut = text.splitlines(keepends=True)
        path.write_text("".join(cut[:4]) + cut[4][:200])
        assert run(path.parent, suite(), seeds=(0, 1)) == Outcome(runs=5)
        kept = [json.loads(line) for line in path.read_text().splitlines() if line != cut[4][:200]]
        assert figures(kept) == figures(result_lines(tmp_path / "whole"))

    def test_after_an_interrupt_keeps_what_was_served(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second of two cells is interrupted."""
        from ragorder.eval.suites.serving.experiment import Serving

        serve = Serving.serve

        def interrupted(self: Serving, job: Any, advance: Any) -> Any:
            if job.cell.workload == "geo":
                raise KeyboardInterrupt
            return serve(self, job, advance)

        (tmp_path / "mine.toml").write_text(SUITE)
        command = "run", tmp_path / "mine.toml", "-o", tmp_path / "out", "--seeds", "0"
        with monkeypatch.context() as patched:
            patched.setattr(Serving, "serve", interrupted)
            done = invoke(*command)
        assert done.exit_code == 130
        assert "the same command continues from here" in done.stderr
        assert len(result_lines(tmp_path / "out", "run")) == 2
        assert "2 runs served" in invoke(*command).output

    def test_a_policy_that_is_asked_for_later_is_added(self, tmp_path: Path) -> None:
        assert run(tmp_path, suite(), seeds=(0,), policies=("retrieval",)) == Outcome(runs=2)
        assert run(tmp_path, suite(), seeds=(0,)) == Outcome(runs=2)

    @pytest.mark.parametrize("changed", [{"limit": 10}, {"engine": "vllm"}, {"reduced": True}])
    def test_with_other_options_is_refused(self, tmp_path: Path, changed: dict[str, Any]) -> None:
        run(tmp_path, suite(), seeds=(0,), policies=("retrieval",))
        with pytest.raises(HarnessError, match=f"--{next(iter(changed))} .*choose another folder"):
            run(tmp_path, suite(), seeds=(0,), **changed)

    def test_in_a_folder_of_another_simulated_engine_is_refused(self, tmp_path: Path) -> None:
        run(tmp_path, suite(), seeds=(0,), policies=("retrieval",))
        path = tmp_path / "results.jsonl"
        path.write_text(path.read_text("utf-8").replace('"like":"vllm-0.32"', '"like":"lru"'), "utf-8")
        with pytest.raises(HarnessError, match=r"results of a simulated engine like lru, .*choose another folder"):
            run(tmp_path, suite(), seeds=(0,))

    def test_of_suites_that_measure_the_same_the_one_with_most_policies_serves_the_others(self, tmp_path: Path) -> None:
        larger = read_suite("larger", SUITE.replace('"free"]', '"greedy", "free"]'), "larger.toml")
        assert run(tmp_path, suite(), larger, seeds=(0,)) == Outcome(runs=6, copied=4)
        ours = [line for line in result_lines(tmp_path, "run") if line["suite"] == "mine"]
        assert {line["copied_from"] for line in ours} == {"larger"}
        theirs = [line for line in result_lines(tmp_path, "run") if line["suite"] == "larger"]
        rows = {(line["cell"]["workload"], line["policy"]): line["rows"] for line in theirs}
        assert all(line["rows"] == rows[line["cell"]["workload"], line["policy"]] for line in ours)
        other = read_suite("other", SUITE.replace("requests = 30", "requests = 20"), "other.toml")
        assert run(tmp_path / "other", suite(), other, seeds=(0,)).copied == 0

    def test_real_engines_of_one_size_serve_all_that_they_can_before_another_is_needed(self, tmp_path: Path) -> None:
        sizes = "[sweep]\ncapacity_tokens = [9_000, 5_000]"
        text = SUITE.replace("capacity_tokens = 20_000", "").replace("[sweep]", sizes)
        other = read_suite("other", text.replace("paper-shuf", "unique"), "other.toml")
        with Store(tmp_path) as store:
            plan = plan_run([suite(text), other], Options(engine="vllm", seeds=(0,)), store)
        done = [(job.cell.capacity_tokens, job.suite.name, job.cell.workload) for job in plan.served]
        expected = [("mine", "paper-shuf"), ("mine", "geo"), ("other", "unique")]
        assert done == [(size, *each) for size in (9_000, 5_000) for each in expected]
        assert [(job.suite.name, job.cell.workload) for job in plan.copied] == [("other", "geo")] * 2


def figures(found: list[dict[str, Any]]) -> list[Any]:
    return [
        (line["cell"], line["seed"], line["policy"], line["rows"]["cached_tokens"], line["rows"]["displacement"])
        for line in found
        if line["type"] == "run"
    ]


class TestWhatIsUnavailable:
    def reasons(self, folder: Path) -> dict[str, str]:
        return {line["policy"]: line["reason"] for line in result_lines(folder, "unavailable")}

    def test_is_recorded_once_with_its_reason_while_others_run_but_no_baseline_alone(self, tmp_path: Path) -> None:
        events = SUITE.replace("[cell]", '[cell]\nresidency = "events"')
        asked = suite(events.replace("policies = [", 'policies = ["none", '))
        assert run(tmp_path, asked, seeds=(0,)) == Outcome(runs=4, unavailable=2)
        assert self.reasons(tmp_path) == {"free": "engine sim publishes no KV events: use --engine openai"}
        assert run(tmp_path, asked, seeds=(0,)).unavailable == 2
        assert len(result_lines(tmp_path, "unavailable")) == 2
        assert run(tmp_path / "alone", suite(events), seeds=(0,)).runs == 0

    @pytest.mark.parametrize(
        ("folder", "said"), [(None, "give --corpora"), ("empty", "there is no corpus covidqa in .*empty")]
    )
    def test_a_corpus_that_is_not_here(self, tmp_path: Path, folder: str | None, said: str) -> None:
        asked = suite(SUITE.replace('workload = ["paper-shuf", "geo"]', 'corpus = ["covidqa"]'))
        where = None if folder is None else tmp_path / folder
        assert run(tmp_path, asked, corpora=where) == Outcome(unavailable=2)
        assert all(re.search(said, reason) for reason in self.reasons(tmp_path).values())

    def test_a_dry_run_of_quality_goes_its_whole_way_without_a_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_corpus(tmp_path / "hotpotqa", top_k=4, questions=3)
        asked = choose_suites(["table-2"])
        outcome = run(tmp_path / "out", *asked, seeds=(0,), questions=tmp_path, dry_run=True)
        assert outcome.quality > 0
        lines = result_lines(tmp_path / "out", "quality")
        assert {line["policy"] for line in lines} == set(asked[0].policies)
        assert all(line["dry_run"] for line in lines)
        checks = result_lines(tmp_path / "out", "check")
        assert {(line["name"], line["measured"]) for line in checks} == {("quality-verdict", False)}
        missing = {line["cell"]["dataset"] for line in result_lines(tmp_path / "out", "unavailable")}
        assert missing == {"musique", "2wikimultihopqa"}
        again = run(tmp_path / "out", *asked, seeds=(0,), questions=tmp_path, dry_run=True)
        assert again.quality == 0
        monkeypatch.setitem(sys.modules, "datasets", None)
        run(tmp_path / "out", *asked, seeds=(0,), dry_run=True)
        assert "hotpotqa" not in {line["cell"]["dataset"] for line in result_lines(tmp_path / "out", "unavailable")}

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"dry_run": True}, "loading {} from the Hub needs datasets: in a clone of ragorder, pip install"),
            ({"dry_run": True, "questions": Path()}, "the questions are not here: give --questions"),
            ({}, "quality was not measured, there is no model"),
        ],
    )
    def test_questions_and_a_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
    ) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        if "questions" in options:
            options = options | {"questions": tmp_path}
        run(tmp_path, *choose_suites(["table-2"]), seeds=(0,), **options)
        assert not result_lines(tmp_path, "quality")
        reasons = {line["cell"]["dataset"]: line["reason"] for line in result_lines(tmp_path, "unavailable")}
        assert len(reasons) == 3
        assert all(said.format(dataset) in reason for dataset, reason in reasons.items())

    def test_a_hub_that_is_away_is_asked_once_for_each_data_set(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        class Away:
            def dataset_info(self, name: str, *, timeout: float) -> None:
                asked.append(name)
                raise ConnectionError("no network")

        monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Away))
        run(tmp_path, read_suite("mine", QUALITY, "mine.toml"), seeds=(0, 1, 2), dry_run=True)
        assert asked == ["hotpotqa/hotpot_qa"]
        assert "cannot be loaded (ConnectionError)" in self.reasons(tmp_path)["free+keep_first=2"]

    def test_a_cell_that_the_workload_cannot_draw(self, tmp_path: Path) -> None:
        asked = suite(SUITE.replace("[cell]", "[cell]\ntop_k = 12"))
        outcome = run(tmp_path, asked, seeds=(0,))
        assert (outcome.runs, outcome.unavailable) == (2, 2)
        assert {line["cell"]["workload"] for line in result_lines(tmp_path, "unavailable")} == {"paper-shuf"}

    def test_a_peer_that_fails_affects_no_other_policy_and_is_tried_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried = []

        def missing(name: str) -> Any:
            tried.append(name)
            raise PeerError("contextpilot==0.5.0 cannot be installed: no network")

        monkeypatch.setattr("ragorder.eval.suites.serving.experiment.make_peer", missing)
        asked = suite(SUITE.replace('"free"]', '"free", "contextpilot"]'))
        assert run(tmp_path, asked, seeds=(0, 1)).runs == 8
        assert tried == ["contextpilot"]
        assert "no network" in self.reasons(tmp_path)["contextpilot"]
        # It may also end when it is to order for the first time.
        monkeypatch.setattr("ragorder.eval.suites.serving.experiment.make_peer", lambda name: None)
        monkeypatch.setattr("ragorder.eval.running.policies.make_peer", missing)
        assert run(tmp_path / "later", asked, seeds=(0,)) == Outcome(runs=4, unavailable=2)


class TestCells:
    def result_lines(self, folder: Path, cell: str, requests: int = 30) -> list[Any]:
        text = SUITE.replace("capacity_tokens = 20_000", cell).replace("requests = 30", f"requests = {requests}")
        run(folder, suite(text.replace('["paper-shuf", "geo"]', '["paper-shuf"]')), seeds=(0,))
        return result_lines(folder, "run")

    def test_guards_hold_orderers_back(self, tmp_path: Path) -> None:
        found = self.result_lines(tmp_path, 'guards = "max_displacement=1"')
        assert max(found[1]["rows"]["displacement"]) <= 1
        held = self.result_lines(tmp_path / "all", 'guards = "max_displacement=0"')[1]
        assert sum(held["rows"]["moved_share"]) == 0

    def test_residency_none_promises_what_is_gone(self, tmp_path: Path) -> None:
        wrong = []
        for name in ("none", "lru"):
            cell = f'capacity_tokens = 4_000\nresidency = "{name}"'
            rows = self.result_lines(tmp_path / name, cell, requests=120)[1]["rows"]
            wrong.append(sum(f > c for f, c in zip(rows["predicted_tokens"], rows["cached_tokens"], strict=True)))
        assert wrong[0] > wrong[1] == 0

    def test_a_batch_is_kept_in_the_traces_order_and_has_no_warmup(self, tmp_path: Path) -> None:
        one = self.result_lines(tmp_path / "one", "waiting = 0")
        batch = self.result_lines(tmp_path / "batch", "batch = true")
        assert [line["warmup"] for line in batch] == [0, 0]
        one_by_one, together = one[1]["rows"], batch[1]["rows"]
        assert together["prompt_tokens"] == one_by_one["prompt_tokens"]
        assert sum(together["cached_tokens"]) > sum(one_by_one["cached_tokens"])

    def test_builds_are_timed_if_the_report_needs_them(self, tmp_path: Path) -> None:
        text = SUITE.replace('chart = "strategies"', 'chart = "breakdown"\nmetrics = ["build_us"]')
        run(tmp_path, suite(text), seeds=(0,))
        assert all(min(line["rows"]["build_us"]) > 0 for line in result_lines(tmp_path, "run"))

    def test_timelines_show_the_cache_fill_and_evict(self, tmp_path: Path) -> None:
        text = SUITE.replace('chart = "strategies"', 'chart = "timeline"').replace("requests = 30", "requests = 90")
        run(tmp_path, suite(text), seeds=(0,))
        line = result_lines(tmp_path, "run")[1]["timeline"]
        assert line["request"] == list(range(0, 90, 2))
        assert line["held_tokens"][0] == line["evicted_tokens"][0] == 0
        assert max(line["held_tokens"]) <= 20_000 < line["evicted_tokens"][-1] + line["held_tokens"][-1]
        assert line["tree_nodes"][-1] > 0

    def test_corpora_in_data_order_are_the_same_with_every_seed(self, tmp_path: Path) -> None:
        write_corpus(tmp_path / "corpora" / "tiny", top_k=2)
        text = SUITE.replace('workload = ["paper-shuf", "geo"]', 'corpus = ["tiny"]\norder = ["data", "random"]')
        run(tmp_path, suite(text.replace("[cell]", "[cell]\ntop_k = 2")), corpora=tmp_path / "corpora")
        seeds = [(line["cell"]["order"], line["seed"]) for line in result_lines(tmp_path, "run")][::2]
        assert seeds == [("data", 0), ("random", 0), ("random", 1), ("random", 2)]


class TestTheCommand:
    @pytest.fixture
    def own(self, tmp_path: Path) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(SUITE)
        return path

    def test_lists_suites_by_group_on_a_screen_and_what_others_need(self) -> None:
        shown = invoke("list", env={"COLUMNS": "120"}).output
        assert all(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown) for name in load_suites())
        assert len(shown.splitlines()) < 50
        assert re.search(r"ragcache\+\+ .*table-1", shown)

    def test_a_suite_needs_something_if_nothing_of_it_would_be_measured(self, tmp_path: Path) -> None:
        """The dry run of a suite about answers asks for the questions."""
        kinds = {name: each.kind for name, each in load_suites().items()}
        here, there = (re.findall(r"[\w-]+", part) for part in invoke("list").output.split("┃ needs"))
        lacking = {name for name in kinds if name not in here}
        assert {"table-2", "table-5", "workers", "doll-questions", "fusion-answers"} <= lacking <= {*there}
        asked = [name for name, kind in kinds.items() if kind != "quality"]
        done = invoke("run", *asked, "-o", tmp_path, "--dry-run")
        rows = re.findall(r"│ ([\w-]+) +│ +([\d,]+) +│ +[\d,]+ +│ +([\d,]+) ", done.output)
        measured = {name for name, *runs in rows if runs != ["0", "0"]}
        assert {name for name in asked if name not in measured} == lacking - {"table-2"}
        assert "give --engine torch --model smollm2" in " ".join(done.output.split())

    def test_lists_a_group_or_a_suite_with_its_source(self) -> None:
        shown = invoke("list", "ragcache++", "guards").output
        assert "Strategies compared" in shown and "RAGCache++ Table 1" in shown and "guards" in shown
        assert "skew" not in shown
        assert "unknown suite 'gards'" in invoke("list", "gards").output

    def test_runs_says_what_it_did_prints_its_tables_and_keeps_no_key(self, own: Path, tmp_path: Path) -> None:
        pytest.importorskip("scipy")
        done = invoke("run", own, "-o", tmp_path / "out", "--seeds", "0", "--limit", "25", "--api-key", "sk-secret")
        assert done.exit_code == 0, done.output
        assert "4 runs served" in done.output
        assert len(result_lines(tmp_path / "out", "run")[0]["rows"]["cached_tokens"]) == 25
        assert "mine: ragorder (free) changes the cached tokens" in " ".join(done.output.split())
        assert done.output.index("At a glance") < done.output.index(f"next: ragorder report {tmp_path / 'out'}")
        assert "sk-secret" not in (tmp_path / "out" / "results.jsonl").read_text()

    def test_a_dry_run_says_what_would_be_served_and_leaves_nothing(self, tmp_path: Path) -> None:
        done = invoke("run", "ragcache++", "-o", tmp_path / "out", "--dry-run")
        assert done.exit_code == 0, done.output
        assert not (tmp_path / "out" / "results.jsonl").exists() or not result_lines(tmp_path / "out", "run")
        assert re.search(r"table-1\D+0\D+0\D+48\D+0\D*\n", done.output), "table 9 has the same runs and more"
        assert re.search(r"table-9\D+66\D+39,600\D+0\D+0\D*\n", done.output)

    def test_a_dry_run_names_suites_that_measure_in_their_own_way(self, tmp_path: Path) -> None:
        asked = ("ragcache-ttft-tiers", "ragcache-figure-22", "ragcache-figure-18")
        done = invoke("run", *asked, "-o", tmp_path / "out", "--engine", "openai", "--seeds", "0,1", "--dry-run")
        assert done.exit_code == 0, done.output
        assert [bool(re.search(rf"│ {name} +│ +[1-9]", done.output)) for name in asked] == [False, True, False]
        for said in ("lies outside the project: give --corpora", "the engine is simulated: run it without --engine"):
            assert said in " ".join(done.output.split())
        assert not (tmp_path / "out").exists()

    def test_a_dry_run_of_the_short_forms_has_a_real_engines_size(self, tmp_path: Path) -> None:
        done = invoke("run", "ragcache++", "-o", tmp_path / "out", "--dry-run", "--reduced", "--engine", "vllm")
        assert done.exit_code == 0, done.output
        (total,) = re.findall(r"all\D+[\d,]+\D+([\d,]+)", done.output)
        assert 700 <= int(total.replace(",", "")) <= 1_500

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("tabel-1",), "unknown suite 'tabel-1'"),
            (("table-1", "--policy", "atuo"), "a policy 'atuo'"),
            (("table-1", "--seeds", "1,1"), "each seed once"),
            (("table-1", "--base-url", "http://x"), "require --engine openai"),
            (("table-1", "--model", "m"), "--model requires --engine vllm"),
            (("table-1", "--replay-endpoint", "tcp://x"), "require --events-endpoint"),
            (("table-1", "--corpora", "/nowhere"), "/nowhere"),
        ],
    )
    def test_says_what_is_wrong(self, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
        done = invoke("run", *arguments, "-o", tmp_path / "out")
        assert done.exit_code != 0
        assert said in " ".join(done.stderr.split())

    def test_goes_on_in_a_folder_where_quality_was_asked_about(self, own: Path, tmp_path: Path) -> None:
        """`ragorder eval quality` keeps its answers there as well: whatever it was asked with, no run depends on it."""
        arguments = {"command": "quality", "dataset": "hotpotqa", "engine": "openai", "limit": 5}
        session = {"type": "session", "schema": 1, "session": "s", "arguments": arguments, "environment": {}}
        (tmp_path / "results.jsonl").write_text(json.dumps(session) + "\n", "utf-8")
        done = invoke("run", own, "-o", tmp_path, "--seeds", "0")
        assert done.exit_code == 0, done.stderr
        assert result_lines(tmp_path, "run")
