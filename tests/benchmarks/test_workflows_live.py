"""Workflows on real parts: an index that takes its time, a real engine with scripted answers, and their report."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.benchmarks.common.vectors import clustered
from ragorder.benchmarks.hedra.workflows.script import Embedder, Script
from ragorder.benchmarks.hedra.workflows_live import measuring
from ragorder.benchmarks.hedra.workflows_live.experiment import SYSTEMS, LiveCell, WorkflowsLive, make_part
from ragorder.benchmarks.hedra.workflows_live.measuring import (
    BatchedSearch,
    LiveMaterials,
    LiveTorch,
    LiveVLLM,
    ScriptedEngine,
    bind_server,
    large_index,
    search_ms,
    serve_live,
)
from ragorder.benchmarks.kernels.embedded.models import SHAPES
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus, CorpusQuestion
from ragorder.eval.running.load import silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.reading import Results
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Job, Suite, load_suites
from ragorder.pipelining import AnswerChunk, Usage

DOCUMENTS = 30


@pytest.fixture(scope="module")
def index() -> Any:
    return large_index(clustered(DOCUMENTS, 16, clusters=30, seed=0), 200, 8, 4)


class TestTheLargeIndex:
    def test_has_the_documents_and_copies_that_are_less_like_them(self, index: Any) -> None:
        assert (index.ntotal, index.nlist, index.nprobe) == (200, 8, 4)
        documents = clustered(DOCUMENTS, 16, clusters=30, seed=0)
        index.nprobe = 8
        similarity, ids = index.search(documents, 2)
        index.nprobe = 4
        assert ids[:, 0].tolist() == list(range(DOCUMENTS))
        assert similarity[:, 1].max() < 0.99

    def test_takes_time(self, index: Any) -> None:
        assert search_ms(index, clustered(3, 16, clusters=30, seed=1)) > 0


class TestWholeSearches:
    @pytest.mark.parametrize("batched", [False, True])
    def test_find_what_faiss_finds(self, index: Any, batched: bool) -> None:
        queries = clustered(9, 16, clusters=30, seed=1)

        async def main() -> list[list[int]]:
            with closing(BatchedSearch(index, batched=batched)) as search:
                return await asyncio.gather(*(search.search(query[None], 3) for query in queries))

        assert asyncio.run(main()) == index.search(queries, 3)[1].tolist()


class Engine:
    """Answers with as many tokens as it is asked for."""

    def __init__(self) -> None:
        self.asked: list[PromptRequest] = []

    async def stream(self, request: PromptRequest, /) -> Any:
        self.asked.append(request)
        for _ in range(request.options["max_tokens"] - 1):
            yield AnswerChunk("?")
        yield AnswerChunk("", Usage(len(request.token_ids or ()), 2, request.options["max_tokens"], "length"))


def test_a_scripted_engine_streams_the_script_for_as_many_tokens() -> None:
    async def main() -> tuple[str, Any]:
        text, usage = "", None
        request = PromptRequest(None, [1, 20, 5], None, {"max_tokens": 256})
        async with aclosing(engine.stream(request)) as chunks:
            async for chunk in chunks:
                text, usage = text + chunk.text, chunk.usage
        return text, usage

    far = Engine()
    engine = ScriptedEngine(far, lambda request: ["a", "b", "c"], 8, {"ignore_eos": True})
    text, usage = asyncio.run(main())
    assert text.split() == ["a", "b", "c"]
    assert usage.completion_tokens == 3
    assert far.asked[0].token_ids == [1, 4, 5]
    assert far.asked[0].options == {"max_tokens": 3, "ignore_eos": True}
    assert (engine.prompt_tokens, engine.cached_tokens) == (3, 2)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = [" ".join(f"p{number}w{place}" for place in range(24)) for number in range(DOCUMENTS)]
    documents = [Document(f"d{number}", text) for number, text in enumerate(texts)]
    questions = [CorpusQuestion(f"q{number}", f"who wrote p{number}w0 ?") for number in range(DOCUMENTS)]
    return Corpus("small", documents, questions, [[number] for number in range(DOCUMENTS)])


@pytest.fixture(scope="module")
def materials(index: Any, corpus: Corpus) -> LiveMaterials:
    vectors = clustered(DOCUMENTS, 16, clusters=30, seed=0)

    def encode(asked: Any) -> Any:
        """The vector of the passage that a text begins."""
        names = [next(word for word in text.split() if word.startswith("p")) for text in asked]
        return np.array([vectors[int(name[1:].partition("w")[0])] for name in names])

    return LiveMaterials(corpus.documents, index, Embedder(encode), Script(corpus), LiveTorch(SHAPES["tiny"].make()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_answers_on_the_real_engine(system: str, materials: LiveMaterials) -> None:
    found = asyncio.run(serve_live(SYSTEMS[system], "irg", 2, materials, [0.0, 0.0, 0.05]))
    assert len(found["rows"]["latency_s"]) == 3
    assert min(found["rows"]["latency_s"]) > 0
    # Three rounds a request, on one system prompt.
    assert 0 < found["facts"]["cached_tokens"] < found["facts"]["prompt_tokens"]
    if SYSTEMS[system].transformations is not None:
        assert found["facts"]["later_prompt_tokens"] > found["facts"]["later_cached_tokens"] > 0


def test_a_vllm_server_computes_the_same_prompts_and_answers(materials: LiveMaterials, vllm_server: Any) -> None:
    served = replace(materials, engine=LiveVLLM(vllm_server, vocabulary=600))
    hedra, embedded = (
        asyncio.run(serve_live(SYSTEMS["hedra"], "irg", 2, each, [0.0, 0.0, 0.05]))["facts"]
        for each in (served, materials)
    )
    # Speculations that were used or not.
    assert hedra["prompt_tokens"] >= 3 * 3 * 100
    assert hedra["later_prompt_tokens"] == embedded["later_prompt_tokens"]
    assert 0 < hedra["cached_tokens"] < hedra["prompt_tokens"]


def test_vllm_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suite = load_suites()["hedra-live"]
    module = "ragorder.benchmarks.hedra.workflows_live.experiment"
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == "vllm" else object())
    with WorkflowsLive(Options(), Store(tmp_path), "session", silent) as experiment:
        assert "make vllm" in str(experiment.obstacle(suite, LiveCell(engine="vllm"), "hedra"))


def test_the_report_has_an_interval_over_seeds() -> None:
    pytest.importorskip("scipy")
    facts = {"rate": 1.5, "search_ms": 30.0, "total_s": 9.0, "prompt_tokens": 100, "cached_tokens": 50}
    seconds = {"stages": (3.0, 2.0, 4.0), "hedra": (2.0, 2.0, 2.0)}
    lines = [
        WorkflowsLive.record(
            suite="mine",
            cell={"workflow": "irg"},
            policy=policy,
            seed=seed,
            rows={"latency_s": [mean - 1, mean + 1]},
            facts=facts | {"later_prompt_tokens": 40, "later_cached_tokens": 30, "speculations": 4, "right": 3},
        )
        for policy, means in seconds.items()
        for seed, mean in enumerate(means)
    ]
    (table,) = make_part(Suite.unlisted("mine"), Results(Path(), records=lines)).tables
    # Logarithms of 1.5, 1 and 2: mean log(3) / 3; Student's t of 2 degrees is 4.303.
    logs = np.log([1.5, 1.0, 2.0])
    low, high = np.exp(logs.mean() + np.array([-1, 1]) * 4.3027 * logs.std(ddof=1) / 3**0.5)
    assert [row[6].text for row in table.rows] == [f"1.44 [{low:.2f}, {high:.2f}]", "1.00"]


def test_each_corpus_has_an_index_of_its_own_for_all_seeds(
    corpus: Corpus, materials: LiveMaterials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    made: list[str] = []

    def materials_of(experiment: WorkflowsLive, job: Job) -> LiveMaterials:
        made.append(job.cell.corpus)
        return replace(materials, documents=[Document(job.cell.corpus, "text")])

    async def serve_nothing(_system: Any, _workflow: str, _top_k: int, found: LiveMaterials, _at_s: Any) -> Any:
        served.append(found.documents[0].id)
        return {"rows": {"latency_s": [1.0]}, "facts": {"total_s": 1.0}}

    monkeypatch.setattr(WorkflowsLive, "_materials", materials_of)
    monkeypatch.setattr(measuring, "serve_live", serve_nothing)
    with WorkflowsLive(Options(), Store(tmp_path), "session", silent) as experiment:
        for name, seed in (("one", 0), ("one", 1), ("other", 0)):
            cell = LiveCell(corpus=name, clusters=8, nprobe=4, requests=1)
            list(experiment.measure(Job(Suite.unlisted("mine"), cell, seed, ("stages",), 1, corpus), lambda: None))
    # First the rate that is sustained, then the policy.
    assert served == ["one", "one", "one", "one", "other", "other"]
    assert made == ["one", "other"]


def test_each_seed_has_other_answers_and_another_policy_first(
    corpus: Corpus, materials: LiveMaterials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: set[str] = set()

    async def serve_nothing(_system: Any, _workflow: str, _top_k: int, found: LiveMaterials, _at_s: Any) -> Any:
        answers.add(" ".join(word for number in range(9) for word in found.script.answer(["#plan", f"@{number}"])))
        return {"rows": {"latency_s": [1.0]}, "facts": {"total_s": 1.0}}

    monkeypatch.setattr(WorkflowsLive, "_materials", lambda *_: materials)
    monkeypatch.setattr(measuring, "serve_live", serve_nothing)
    first = []
    with WorkflowsLive(Options(), Store(tmp_path), "session", silent) as experiment:
        for seed in range(3):
            cell = LiveCell(corpus="small", clusters=8, nprobe=4, requests=1)
            job = Job(Suite.unlisted("mine"), cell, seed, ("stages", "hedra"), 1, corpus)
            lines = list(experiment.measure(job, lambda: None))
            first.append(lines[0]["policy"])
    assert first == ["stages", "hedra", "stages"]
    assert len(answers) == 3


def test_an_interrupted_cell_is_resumed_at_the_same_rate(
    corpus: Corpus, materials: LiveMaterials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[int, float]] = []

    async def serve_nothing(_system: Any, _workflow: str, _top_k: int, _found: LiveMaterials, at_s: Any) -> Any:
        served.append((len(at_s), max(at_s)))
        return {
            "rows": {"latency_s": [1.0] * len(at_s)},
            "facts": {"total_s": 7.0 * len(served), "prompt_tokens": 1, "cached_tokens": 0},
        }

    monkeypatch.setattr(WorkflowsLive, "_materials", lambda *_: materials)
    monkeypatch.setattr(measuring, "serve_live", serve_nothing)
    suite = Suite.unlisted("mine", policies=["stages", "hedra"], baseline="stages")
    cell = LiveCell(corpus="small", clusters=8, nprobe=4, requests=5)
    job = Job(suite, cell, 2, ("stages", "hedra"), 5, corpus)
    named = {"type": "workflows-live", "session": "session", "suite": "mine", "cell": cell.fields, "seed": 2}
    with Store(tmp_path) as store, WorkflowsLive(Options(), store, "session", silent) as experiment:
        first = next(iter(experiment.measure(job, lambda: None)))
        store.append({**named, **first})
    assert first["facts"]["rate"] == pytest.approx(0.8 * 5 / 7)
    with Store(tmp_path) as store, WorkflowsLive(Options(), store, "session", silent) as experiment:
        (second,) = experiment.measure(job.without(["stages"]), lambda: None)
    assert second["policy"] == "hedra"
    assert [second["facts"][name] for name in ("rate", "search_ms")] == [
        first["facts"][name] for name in ("rate", "search_ms")
    ]
    # The rate that is sustained, then each policy once, at the same times.
    assert served[0][1] == 0.0 and served[1] == served[2] and len(served) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_server_and_what_it_has_started_have_the_last_core() -> None:
    pytest.importorskip("psutil")
    child = "import time; print(flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=False)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            bind_server(server.pid)
            engine = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            assert len(engine.split()) == 1
            for pid in (server.pid, int(engine)):
                assert os.sched_getaffinity(pid) == {max(os.sched_getaffinity(0))}
        finally:
            os.killpg(server.pid, signal.SIGKILL)
