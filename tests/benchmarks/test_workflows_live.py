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
from ragorder.benchmarks.hedra.workflows_live.experiment import SYSTEMS, LiveCell, WorkflowsLive
from ragorder.benchmarks.hedra.workflows_live.measuring import (
    BatchedSearch,
    LiveMaterials,
    LiveTorch,
    LiveVLLM,
    ScriptedEngine,
    bind_server,
    large_index,
    serve_live,
)
from ragorder.benchmarks.kernels.embedded.models import SHAPES
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus, CorpusQuestion
from ragorder.eval.running.load import silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Job, Suite
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


@pytest.fixture
def played(materials: LiveMaterials, monkeypatch: pytest.MonkeyPatch) -> list[tuple[LiveMaterials, list[float]]]:
    """What each system was given, and when requests came: it answers each in a second."""
    calls: list[tuple[LiveMaterials, list[float]]] = []

    async def serve(_system: Any, _workflow: str, _top_k: int, given: LiveMaterials, at_s: Any) -> Any:
        calls.append((given, at_s))
        facts = {"total_s": 7.0 * len(calls), "prompt_tokens": 1, "cached_tokens": 0}
        return {"rows": {"latency_s": [1.0] * len(at_s)}, "facts": facts}

    def named(_: WorkflowsLive, job: Job) -> LiveMaterials:
        return replace(materials, documents=[Document(job.cell.corpus, "text")])

    monkeypatch.setattr(WorkflowsLive, "materials", named)
    monkeypatch.setattr(measuring, "serve_live", serve)
    return calls


def job_of(corpus: Corpus, name: str, seed: int, policies: tuple[str, ...], requests: int = 1) -> Job:
    suite = Suite.unlisted("mine", policies=list(policies), baseline=policies[0])
    cell = LiveCell(corpus=name, clusters=8, nprobe=4, requests=requests)
    return Job(suite, cell, seed, policies, requests, corpus)


def test_each_seed_has_other_answers_and_another_policy_first(corpus: Corpus, played: Any, tmp_path: Path) -> None:
    first = []
    with WorkflowsLive(Options(), Store(tmp_path), "session", silent) as experiment:
        for seed in range(3):
            lines = list(experiment.measure(job_of(corpus, "small", seed, ("stages", "hedra")), lambda: None))
            first.append(lines[0]["policy"])
    assert first == ["stages", "hedra", "stages"]
    scripts = [given.script for given, _ in played]
    assert len({str([each.answer(["#plan", f"@{number}"]) for number in range(9)]) for each in scripts}) == 3


def test_an_interrupted_cell_is_resumed_at_the_same_rate(corpus: Corpus, played: Any, tmp_path: Path) -> None:
    job = job_of(corpus, "small", 2, ("stages", "hedra"), 5)
    named = {"type": "workflows-live", "session": "session", "suite": "mine", "cell": job.cell.fields, "seed": 2}
    with Store(tmp_path) as store, WorkflowsLive(Options(), store, "session", silent) as experiment:
        first = next(iter(experiment.measure(job, lambda: None)))
        store.append({**named, **first})
    assert first["facts"]["rate"] == pytest.approx(0.8 * 5 / 7)
    with Store(tmp_path) as store, WorkflowsLive(Options(), store, "session", silent) as experiment:
        (second,) = experiment.measure(job.without(["stages"]), lambda: None)
    assert second["policy"] == "hedra"
    for name in ("rate", "search_ms"):
        assert second["facts"][name] == first["facts"][name]
    # The rate that is sustained, then each policy once, at the same times.
    times = [at_s for _, at_s in played]
    assert max(times[0]) == 0.0 and times[1] == times[2] and len(times) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_server_and_what_it_has_started_have_the_last_core() -> None:
    pytest.importorskip("psutil")
    child = "import time; print(flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=False)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            server.stdout.readline()
            bind_server(server.pid)
            engine = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            assert len(engine.split()) == 1
            for pid in (server.pid, int(engine)):
                assert os.sched_getaffinity(pid) == {max(os.sched_getaffinity(0))}
        finally:
            os.killpg(server.pid, signal.SIGKILL)
