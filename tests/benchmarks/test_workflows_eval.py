"""Workflows on the virtual clock: the script, the systems, the suites and their report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder.benchmarks.common.vectors import build_index
from ragorder.benchmarks.common.virtual.costs import EngineCosts, SearchCosts
from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.benchmarks.hedra.workflows import measuring
from ragorder.benchmarks.hedra.workflows.cells import MODELS, System, WorkflowsCell
from ragorder.benchmarks.hedra.workflows.experiment import SYSTEMS
from ragorder.benchmarks.hedra.workflows.measuring import Lockstep, Materials, Stages, serve
from ragorder.benchmarks.hedra.workflows.script import Embedder, Script, without_marks
from ragorder.benchmarks.hedra.workflows_elsewhere import ElsewhereCell, WordVectors
from ragorder.benchmarks.hedra.workflows_elsewhere import serve as elsewhere
from ragorder.document import Document
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.corpora import Corpus, CorpusQuestion

WORDS = 60


def passage(number: int) -> str:
    return " ".join(f"p{number}w{place}" for place in range(WORDS))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    documents = [Document(f"d{number}", passage(number)) for number in range(40)]
    questions = [CorpusQuestion(f"q{number}", f"who wrote p{number}w0 ?") for number in range(40)]
    return Corpus("small", documents, questions, [[number] for number in range(40)])


def encode(texts: Any) -> Any:
    """A sum of random vectors, one a word: texts with words in common are near each other."""
    rows = []
    for text in texts:
        words = [np.random.default_rng(list(word.encode())).standard_normal(16) for word in text.split()]
        rows.append(np.sum(words, axis=0) / np.linalg.norm(np.sum(words, axis=0)))
    return np.array(rows, np.float32)


@pytest.fixture(scope="module")
def materials(corpus: Corpus) -> Materials:
    index = build_index(encode([document.text for document in corpus.documents]), 0.5)
    return Materials(corpus.documents, index, Embedder(encode), Script(corpus))


class TestTheScript:
    def test_answers_with_parts_of_the_gold_passage(self, corpus: Corpus) -> None:
        script = Script(corpus)
        gold = passage(7).split()
        for node in ("#answer", "#guess", "#compress"):
            words = script.answer(f"[d1] text #7 {node} Say it: {script.question(7)}".split())
            assert words == gold[: len(words)]

    def test_plans_queries_that_hold_more_and_more_of_the_passage(self, corpus: Corpus) -> None:
        script = Script(corpus)
        plans = [" ".join(script.answer(["#plan", *script.question(number).split()])) for number in range(40)]
        lines = [plan.splitlines() for plan in plans]
        assert {len(each) for each in lines} == {1, 2, 3}
        longest = next(each for each in lines if len(each) == 3)
        assert [line.split()[0] for line in longest] == ["~1", "~2", "~3"]
        assert [len(line) for line in longest] == sorted(len(line) for line in longest)

    def test_is_the_same_each_time_and_varies_with_the_seed(self, corpus: Corpus) -> None:
        prompts = [["#sub", "~1", f"@{number}", "who"] for number in range(20)]
        answers = [[Script(corpus, seed).answer(prompt) for prompt in prompts] for seed in (0, 0, 1)]
        assert answers[0] == answers[1] != answers[2]

    def test_is_embedded_without_its_marks_once_for_all_runs(self, tmp_path: Path) -> None:
        assert without_marks("~2 @17 who #sub wrote it") == "who wrote it"
        seen: list[str] = []
        embed = Embedder(lambda texts: seen.extend(texts) or encode(texts), tmp_path / "vectors.npz")
        vector = embed("@1 who ?")
        assert (vector == embed("@2 ~1 who ?")).all()
        assert seen == ["who ?"]
        embed.save()
        again = Embedder(lambda texts: pytest.fail("embedded twice"), tmp_path / "vectors.npz")
        assert (again("who ?") == vector).all()


class TestLockstep:
    def test_begins_a_stage_when_all_have_ended_the_last(self) -> None:
        begun: list[tuple[int, int, float]] = []

        async def main() -> None:
            batches = Lockstep(limit=2)

            async def ask(number: int, *stages_s: float) -> None:
                async def request(stages: Stages) -> None:
                    for place, seconds in enumerate(stages_s):
                        await stages.reach()
                        begun.append((number, place, asyncio.get_running_loop().time()))
                        await asyncio.sleep(seconds)

                await batches.run(request)

            await asyncio.gather(ask(0, 1, 1), ask(1, 5), ask(2, 1, 1, 1))

        run_virtual(main())
        # Request 0 comes first, and alone; the others are the next batch.
        assert sorted(begun) == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (2, 0, 2), (2, 1, 7), (2, 2, 8)]


REQUESTS = 12


def served(system: str, materials: Materials, workflow: str = "irg", **fields: Any) -> Any:
    cell = WorkflowsCell(workflow=workflow, **fields)
    at_s = [0.2 * number for number in range(REQUESTS)]
    return run_virtual(serve(SYSTEMS[system], cell, materials, at_s, [workflow] * REQUESTS))


class TestSystems:
    def test_compute_the_same_prompts_unless_they_speculate(self, materials: Materials) -> None:
        plain = [served(system, materials)["facts"]["prompt_tokens"] for system in ("langchain", "flashrag", "pieces")]
        assert len(set(plain)) == 1
        facts = served("ragcache", materials)["facts"]
        assert facts["speculations"] >= facts["right"] > 0
        assert facts["prompt_tokens"] >= plain[0]

    def test_tell_what_is_one_stage_ahead_from_what_is_two(self, materials: Materials) -> None:
        near, far = (served(system, materials)["facts"] for system in ("hedra-across", "hedra"))
        assert near["near_speculations"] == near["speculations"] > 0
        assert 0 < far["near_speculations"] < far["speculations"]
        for facts in (near, far):
            assert facts["near_right"] <= facts["near_speculations"]
            assert facts["search_right"] <= facts["search_speculations"] > 0

    def test_take_the_same_times_in_every_run(self, materials: Materials) -> None:
        assert served("hedra", materials) == served("hedra", materials)

    def test_scan_on_a_gpu_where_that_is_faster(self, materials: Materials) -> None:
        pytest.importorskip("torch")
        plain, fast, slow = (
            served(system, materials, nprobe=512, fast=0.4, fast_ns=fast_ns)
            for system, fast_ns in (("hedra", 1.6), ("hedra+fast", 1.6), ("hedra+fast", 1e4))
        )
        shares = [found["facts"]["fast_share"] for found in (plain, slow, fast)]
        assert shares[0] == 0 and shares == sorted(shares) and shares[2] > 0.1
        assert np.mean(fast["rows"]["latency_s"]) < np.mean(plain["rows"]["latency_s"])
        assert "fast_share" not in served("hedra+fast", materials)["facts"]

    def test_wait_for_their_batch_or_not(self, materials: Materials) -> None:
        lockstep, batched, dealt, cut = (
            np.mean(served(name, materials)["rows"]["latency_s"])
            for name in ("langchain", "flashrag", "dealt", "pieces")
        )
        assert max(dealt, cut) < min(batched, lockstep)


class TestWhereTheEngineIsTheBottleneck:
    """Prompts take most of the time, as on a CPU, and a search a fraction of one: there is nothing to overlap."""

    @pytest.fixture(autouse=True)
    def slow_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        costs = EngineCosts(10e-3, 1e-3, 1.5e-6, capacity_tokens=32_768, token_budget=512, max_requests=64)
        monkeypatch.setitem(MODELS, "cpu", costs)
        search = SearchCosts(code_s=1e-7, vectors=300_000, clusters=512, busy_cores=1, piece_s=2e-4)
        monkeypatch.setattr(measuring, "SEARCH", search)

    def mean_s(self, system: System, materials: Materials, workflow: str) -> float:
        cell = WorkflowsCell(workflow=workflow, model="cpu", cores=1, top_k=5, nprobe=2048)
        at_s = [arrival.at_s for arrival in poisson_arrivals(0.7, 40, 0)]
        found = run_virtual(serve(system, cell, materials, at_s, [workflow] * len(at_s)))
        return float(np.mean(found["rows"]["latency_s"]))

    @pytest.mark.parametrize("workflow", ["irg", "multistep"])
    def test_speculation_costs_at_most_three_percent_and_ordering_gains(
        self, materials: Materials, workflow: str
    ) -> None:
        stages = self.mean_s(System("stage by stage", "alone"), materials, workflow)
        assert self.mean_s(SYSTEMS["hedra"], materials, workflow) < 1.03 * stages
        assert self.mean_s(SYSTEMS["hedra+order"], materials, workflow) < stages / 1.1


class TestElsewhere:
    @pytest.mark.parametrize("search", ["remote", "index"])
    def test_known_searches_take_no_time(self, corpus: Corpus, search: str) -> None:
        facts, latency_s = self.played(corpus, "multistep", search)
        assert latency_s["stages"] > latency_s["asyncio"] and latency_s["stages"] > 1.2 * latency_s["hedra"]
        assert facts["asyncio"] == facts["stages"]

    @pytest.mark.parametrize("search", ["remote", "index"])
    @pytest.mark.parametrize("workflow", ["one_shot", "multistep", "irg", "hyde"])
    def test_at_most_a_quarter_is_wasted_from_the_first_request_on(
        self, corpus: Corpus, workflow: str, search: str
    ) -> None:
        facts, _ = self.played(corpus, workflow, search)
        for name in ("engine_tokens", "engine_requests", "embeddings"):
            assert facts["hedra"][name] <= 1.25 * facts["stages"][name], name

    @staticmethod
    def played(corpus: Corpus, workflow: str, search: str) -> tuple[dict[str, Any], dict[str, float]]:
        """Twelve requests with searches of 400 ms: what each policy spends, and the sum of its latencies."""
        cell = ElsewhereCell.read({"workflow": workflow, "search": search, "search_ms": 400.0}, "here")
        embed = WordVectors([document.text for document in corpus.documents])
        vectors = np.concatenate([embed(document.text) for document in corpus.documents])
        index, at_s = build_index(vectors, 0.5), [3.0 * number for number in range(12)]
        facts, latency_s = {}, {}
        for policy in ("stages", "asyncio", "hedra"):
            serving = elsewhere(policy, cell, corpus.documents, index, embed, Script(corpus), at_s)
            found = run_virtual(serving)
            facts[policy], latency_s[policy] = found["facts"], sum(found["rows"]["latency_s"])
        return facts, latency_s
