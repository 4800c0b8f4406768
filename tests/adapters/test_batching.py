"""Decoupled batches on ordered prompts and real engines; their metrics."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

for _module in ("faiss", "numpy", "prometheus_client"):
    pytest.importorskip(_module)

import faiss
import numpy as np
from support.inside import cache_of, runner_of, sequences_of

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.batching import BatchingMetrics, ordered_batches
from ragorder.adapters.openai.prompts import PromptRequest, Question
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


def batches(engine: Any, find: Any = retrieve, **options: Any) -> Any:
    usual = {"orderer": Orderer(capacity_tokens=100_000), "builder": PromptBuilder(), "batching": AllWaiting(1)}
    return ordered_batches(engine, plain_retrieval(find), **usual | options)


def embedded_batches(worker: Any, tokenizer: Any, retrieval: Any, capacity_tokens: int, **options: Any) -> Any:
    from ragorder.adapters.embedded import EmbeddedStreams

    builder = PromptBuilder(tokenizer=tokenizer)
    orderer: Orderer[Document] = Orderer(
        capacity_tokens=capacity_tokens, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens
    )
    streams = EmbeddedStreams(worker)
    return ordered_batches(streams, retrieval, orderer=orderer, builder=builder, prompts="token_ids", **options)


async def test_documents_are_ordered_for_those_that_wait_and_nothing_else_changes() -> None:
    engine = NotedEngine()
    async with batches(engine) as server:
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


async def test_a_short_prompt_overtakes_no_long_one_when_none_has_documents_in_the_cache() -> None:
    """All of them have the system prompt cached: it is no reason to go first."""
    texts = [Document(f"own {number}", f"of document {number} " * (40 - 3 * number)) for number in range(12)]

    async def own(question: Question) -> list[Document]:
        return [texts[int(question.query.split()[-1])]]

    engine, builder = NotedEngine(), PromptBuilder("Answer from the documents. " * 20)
    orderer = Orderer(capacity_tokens=100_000, prefix_tokens=builder.prefix_tokens)
    async with batches(engine, own, orderer=orderer, builder=builder) as server:
        await asyncio.gather(*(server.run(question) for question in asked(12)))
    assert [int(str(request.messages).split("What of ")[1].split("'")[0]) for request in engine.sent] == list(range(12))


async def test_the_kv_of_a_batch_is_counted_once_per_shared_document() -> None:
    builder = PromptBuilder()
    tokens = builder.document_tokens(DOCUMENTS[0])

    async def same(question: Question) -> list[Document]:
        return DOCUMENTS[:4]

    async def largest(limit: int) -> int:
        async with batches(NotedEngine(), same, joins=False, batching=AllWaiting(), kv_limit=limit) as server:
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
    engine = NotedEngine()
    async with batches(engine) as server:
        questions = [Question(f"What of {number}", scope=f"tenant {number % 2}") for number in range(12)]
        await asyncio.gather(*(server.run(question) for question in questions))
    assert {request.scope for request in engine.sent} == {"tenant 0", "tenant 1"}


async def test_metrics_count_batches_and_requests_and_name_no_text() -> None:
    from prometheus_client import generate_latest

    metrics = BatchingMetrics()

    def broken(observed: Any) -> None:
        raise ZeroDivisionError

    options = {"joins": False, "batching": AllWaiting(4), "kv_limit": 100_000, "observers": [broken, metrics]}
    async with batches(NotedEngine(), **options) as server:
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
    """Each request gets its own documents; they are cached for those that follow."""
    questions = asked(20, max_tokens=4)
    with PartitionedSearch(index_path, 4, resident=1, cores=1) as search:
        retrieval = PartitionedRetrieval(search, embed, DOCUMENTS.__getitem__, top_k=3)
        async with embedded_batches(*engine, retrieval, 8192, joins=joins, kv_limit=6000) as server:
            answers = await asyncio.gather(*(server.run(question) for question in questions))
    found = faiss.read_index(str(index_path)).search(embed(questions), 3)[1].tolist()
    for row, answer in zip(found, answers, strict=True):
        assert [document.id for document in answer.documents] == [f"d{number}" for number in row]
        assert answer.usage is not None and answer.usage.completion_tokens == 4
    # Five different questions: of four in five the documents are cached, or nearly.
    cached = sum(answer.trace.cached_tokens or 0 for answer in answers)
    assert cached > 10 * 3 * PromptBuilder(tokenizer=engine[1]).document_tokens(DOCUMENTS[0])


class TestAModelThatStreams:
    """What the engine could not do for want of memory, or of its disk, is done in a smaller batch, or later."""

    @pytest.fixture
    def streamed(self, tmp_path: Path) -> Iterator[Any]:
        sizes = {"device_bytes": "64MiB", "device_tokens": 2048, "host_bytes": 0}
        with working(tmp_path, 3, **sizes, max_retries=0, verify=False) as streamed:
            from ragorder.kernels.offload import LayerTiers

            streamed[0].engine.move_layers(LayerTiers.spread(3, 0))
            yield streamed

    async def answers(self, streamed: Any, observe: Any = lambda observed: None) -> list[Any]:
        streamed[0].engine.clear_cache()
        options = {"batching": AllWaiting(4), "observers": [observe]}
        async with embedded_batches(*streamed, plain_retrieval(retrieve), 2048, **options) as server:
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
    async def test_runs_one_at_a_time_if_memory_is_short(self, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = [answer.text for answer in await self.answers(streamed)]
        engine = streamed[0].engine
        compute = runner_of(engine).compute

        def short(chunks: Any) -> Any:
            if len(sequences_of(engine)) > 1:
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
        async with embedded_batches(*streamed, plain_retrieval(retrieve), 1024) as server:
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
            # Each move takes this long on any machine.
            clock = partial(next, count(step=0.001))
            follower = LoadFollower(replanner, metrics, partial(describe, worker.engine), clock=clock)
            options: dict[str, Any] = {"placement": replanner.placed, "follower": follower, "most": replanner.most}
            async with question_server(worker, retrieval, orderer, builder, metrics=metrics, **options) as server:
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

    async def test_moves_with_the_load_as_the_planner_said(self, model: Path, replanner: Any, index_path: Path) -> None:
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

        async with self.serving(model, replanner, plain_retrieval(one), lambda *_: "moved") as serving:
            server, engine, value = serving
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
