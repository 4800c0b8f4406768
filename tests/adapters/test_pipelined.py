"""Pipelines on real engines: the answers are those without speculation, and nothing is left on the server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.inside import engine_of, load_of, ordering_of

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.observing.observed import Observation, ObservedOrderer
from ragorder.adapters.openai.pipelined import (
    MetricsPoll,
    OpenAIStreams,
    OrderedPrompts,
    PipelinedClient,
    PromptLoad,
    Question,
    SyncPipelinedClient,
    SystemPrefix,
    WatchedEngine,
)
from ragorder.adapters.openai.prompts import TimedUsage
from ragorder.ordering import RequestOutcome
from ragorder.pipelining import PipelinedStream, Provisional, Retrieval, Usage

openai = pytest.importorskip("openai")
from support.scripted_chat import Response, Server, chat, error, usage
from support.sent_requests import RecordingOrderer
from support.waiting import eventually

BLOCK = 32
SYSTEM = "You are careful. Use the documents, and nothing but the documents, and say so where they say nothing. " * 2
LONG: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
DOCUMENTS = [Document(f"d{number}", f"Secret {number} is kept in drawer {number}. " * 2) for number in range(8)]

Stage = Sequence[int] | Exception | Callable[[], Any]


def played(*stages: Stage, pause_s: float = 0.01) -> Retrieval[Question, Document]:
    """A search that shows these documents, by number, one stage after another. In between an exception is raised, and
    a function is called and awaited."""
    last = max(number for number, stage in enumerate(stages) if isinstance(stage, Sequence))

    async def search(question: Question) -> AsyncGenerator[Provisional[Document], None]:
        for number, stage in enumerate(stages):
            if isinstance(stage, Exception):
                raise stage
            if isinstance(stage, Sequence):
                await asyncio.sleep(pause_s)
                yield Provisional([DOCUMENTS[each] for each in stage], final=number == last)
            else:
                await stage()

    return search


class Ledger:
    """How many requests were ordered, and how each was finished."""

    def __init__(self) -> None:
        self.open = 0
        self.finished: list[RequestOutcome] = []

    def ordered(self, observation: Observation) -> Callable[[RequestOutcome], None]:
        self.open += 1
        return self._finish

    def _finish(self, outcome: RequestOutcome) -> None:
        self.open -= 1
        self.finished.append(outcome)

    async def has_finished(self, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while len(self.finished) < count:
                await asyncio.sleep(0.005)


class Load:
    """What the server says of its requests."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def read(self) -> Counter[str]:
        with urllib.request.urlopen(f"{self._server.base_url}/metrics", timeout=60) as page:
            lines = re.findall(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", page.read().decode(), re.MULTILINE)
        counts: Counter[str] = Counter()
        for name, labels, value in lines:
            reason = re.search(r'finished_reason="(\w+)"', labels)
            counts[f"{name} {reason[1]}" if reason else name] += float(value)  # type: ignore[assignment]
        return counts

    async def shows(self, condition: Callable[[Counter[str]], bool], within_s: float = 20) -> None:
        async with asyncio.timeout(within_s):
            while not condition(await asyncio.to_thread(self.read)):
                await asyncio.sleep(0.02)

    async def is_gone(self) -> None:
        """Nothing runs or waits on the server, long before an orphan would have come to its end."""

        def is_idle(now: Counter[str]) -> bool:
            return not (now["num_requests_running"] or now["num_requests_waiting"])

        try:
            await self.shows(is_idle, within_s=2)
        except TimeoutError:
            # Where the last request was aborted, vLLM may show it until its next step (vLLM issue 29928).
            await asyncio.to_thread(self.step)
            await self.shows(is_idle)

    def step(self) -> None:
        """One request for one token."""
        body = json.dumps({"model": "served", "prompt": [1], "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._server.base_url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()


class Admissions:
    """Requests that the server has admitted since: those with a first token. One that is aborted while vLLM is about to
    admit it runs on: its `generate` has no queue yet to abort."""

    def __init__(self, server: Any) -> None:
        self._load = Load(server)
        self._before = self._count(self._load.read())

    def reach(self, count: int) -> Callable[[], Awaitable[None]]:
        return lambda: self._load.shows(lambda now: self._count(now) - self._before >= count)

    def _count(self, now: Counter[str]) -> int:
        return now["time_to_first_token_seconds_count"]


def answered(counts: Counter[str]) -> float:
    """Requests that came to their end."""
    return sum(count for name, count in counts.items() if name.startswith("request_success_total "))


async def nothing_left() -> None:
    """No task but this one: the openai client leaves it to the event loop to close its generators."""
    async with asyncio.timeout(60):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def builder(vllm_model: Path) -> PromptBuilder:
    from ragorder.eval.engines.models import load_tokenizer

    return PromptBuilder(SYSTEM, tokenizer=load_tokenizer(vllm_model))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def orders(vllm_server: Any, builder: PromptBuilder, ledger: Ledger) -> Callable[..., ObservedOrderer]:
    """Watched orderers for the server, without its events, whose cache is empty."""

    def make(**options: Any) -> ObservedOrderer:
        vllm_server.reset()
        orderer = Orderer(
            tokens=builder.document_tokens,
            block_size=vllm_server.block_size,
            capacity_tokens=vllm_server.capacity_tokens,
            prefix_tokens=builder.prefix_tokens,
            strict=True,
            **options,
        )
        return ObservedOrderer(orderer, [ledger], compare=False)

    return make


Client = Callable[..., PipelinedClient]


@pytest.fixture
async def client(vllm_server: Any, builder: PromptBuilder, orders: Any) -> AsyncIterator[Client]:
    """Clients of the server by their search; all closed in the end, with nothing left of them."""
    made: list[PipelinedClient] = []

    async with openai.AsyncOpenAI(base_url=f"{vllm_server.base_url}/v1", api_key="none", max_retries=0) as server:

        def make(retrieval: Retrieval[Question, Document], **options: Any) -> PipelinedClient:
            chosen = {"orderer": None, "builder": builder, "max_prefill_bs": 4, "warm_up": False, "report_load": False}
            chosen |= options
            chosen["orderer"] = chosen["orderer"] or orders()
            made.append(PipelinedClient(server, model="served", retrieval=retrieval, **chosen))
            return made[-1]

        yield make
        for each in made:
            await each.close()
    await nothing_left()


@pytest.mark.vllm
class TestTheAnswer:
    async def test_is_the_one_without_speculation(self, client: Client, orders: Any) -> None:
        """Token by token, over sequences that the cache has room for, and no cached block is lost."""
        rng = random.Random(6)
        questions: list[list[list[int]]] = []
        for _ in range(32):
            stages = [rng.sample(range(6), 3)]
            while len(stages) < 4:
                # What is found changes now and then, in content or in rank only.
                stages.append(rng.choice([stages[-1], stages[-1], rng.sample(stages[-1], 3), rng.sample(range(6), 3)]))
            questions.append(stages)

        async def serve(speculate: bool) -> list[PipelinedStream]:
            streams: list[PipelinedStream] = []
            for stages in questions:
                if len(streams) % 8 == 0:
                    orderer = orders()
                one = client(played(*stages), orderer=orderer, speculate=speculate)
                query = f"What is in drawer {len(streams)}?"
                streams.append(await one.answer(query, max_tokens=4, extra_body={"ignore_eos": True}))
            return streams

        plain, speculated = await serve(False), await serve(True)
        assert [stream.text for stream in speculated] == [stream.text for stream in plain]
        for stream, without in zip(speculated, plain, strict=True):
            assert stream.usage is not None and without.usage is not None
            assert stream.usage.prompt_tokens == without.usage.prompt_tokens
            assert stream.usage.completion_tokens == without.usage.completion_tokens == 4
            assert (stream.usage.cached_tokens or 0) >= (without.usage.cached_tokens or 0) - BLOCK
        right = [stream.trace.right for stream in speculated]
        # The same documents, ranked otherwise, make the same prompt more often than not.
        assert all(taken or stages[-1] != stages[-2] for taken, stages in zip(right, questions, strict=True))
        assert 10 < sum(right) < len(questions)
        assert sum(stream.trace.speculations for stream in speculated) > len(questions) + 10

    async def test_reuses_a_wrong_speculations_prefix(self, client: Client, vllm_server: Any, ledger: Ledger) -> None:
        """The first two documents of the wrong prompt are the right ones, and its prefill is over."""
        load = Load(vllm_server)
        before = answered(load.read())
        search = played([0, 1, 2], lambda: load.shows(lambda now: answered(now) > before), [0, 1, 3])
        stream = await client(search).answer("What is kept?", max_tokens=4)
        assert not stream.trace.right and stream.usage is not None
        found, prompt = stream.usage.cached_tokens or 0, stream.usage.prompt_tokens or 0
        assert found > prompt / 2
        # The orderer had not counted on it, and counts the request as served.
        assert [outcome.served for outcome in ledger.finished] == [True]

    async def test_streams_in_pieces(self, client: Client) -> None:
        async with client(played([0], [0])).stream("What is kept?", max_tokens=6) as stream:
            pieces = [piece async for piece in stream]
        assert len(pieces) > 1 and "".join(pieces) == stream.text and stream.trace.right

    @pytest.mark.slow
    def test_comes_to_threads_as_well(self, vllm_server: Any, builder: PromptBuilder, orders: Any) -> None:
        def make() -> SyncPipelinedClient:
            server = openai.AsyncOpenAI(base_url=f"{vllm_server.base_url}/v1", api_key="none")
            search = played([0], [0, 1], [0, 1])
            return SyncPipelinedClient(server, model="served", orderer=orders(), builder=builder, retrieval=search)

        with make() as one:
            whole = one.answer("What is kept?", max_tokens=6)
            with one.stream("What is kept?", max_tokens=6) as stream:
                assert "".join(stream) == whole.text
            assert whole.trace.right and stream.usage is not None and stream.usage.cached_tokens
            assert one.stream("What is kept?", **LONG).__next__() is not None
        with pytest.raises(RuntimeError, match="closed"):
            one.answer("What is kept?")
        asyncio.run(Load(vllm_server).is_gone())


@pytest.mark.vllm
class TestNothingIsLeftOnTheServer:
    """Each request would run for many seconds if it were let, and generate many tokens."""

    @pytest.fixture(autouse=True)
    async def idle(self, vllm_server: Any, client: Client) -> AsyncIterator[None]:
        """While the HTTP client is open: closing that would abort whatever it has."""
        before = Load(vllm_server).read()["generation_tokens_total"]
        yield
        await Load(vllm_server).is_gone()
        assert Load(vllm_server).read()["generation_tokens_total"] - before < LONG["max_tokens"]

    async def test_after_a_retrieval_that_raises(self, client: Client, vllm_server: Any, ledger: Ledger) -> None:
        running = Load(vllm_server).shows(lambda now: now["num_requests_running"] == 1)
        one = client(played([0], lambda: running, LookupError("index"), [0]))
        with pytest.raises(LookupError, match="index"):
            await one.answer("What is kept?", **LONG)
        self.is_finished(one, ledger)

    @pytest.mark.slow
    @pytest.mark.parametrize("sent", range(6))
    async def test_after_a_cancelled_request(self, client: Client, vllm_server: Any, ledger: Ledger, sent: int) -> None:
        """A warm-up, three speculations, two of them aborted, and the request: so many of them have been sent."""
        reach, held = Admissions(vllm_server).reach, asyncio.Event()

        async def hold() -> None:
            held.set()
            await asyncio.Event().wait()

        stages: list[Stage] = [reach(1), [0], reach(2), [1], reach(3), [1, 2], reach(4), [1, 2], [1, 2, 3]]
        if sent < 5:
            stages[max(0, 2 * sent - 1) :] = [hold, [1, 2, 3]]
        one = client(played(*stages), warm_up=True)
        task = asyncio.create_task(one.answer("What is kept?", **LONG))
        await (held.wait() if sent < 5 else reach(5)())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await one.close()
        self.is_finished(one, ledger)

    @pytest.mark.slow
    async def test_after_a_stream_that_is_closed_early(self, client: Client, vllm_server: Any, ledger: Ledger) -> None:
        for last in (0, 1):
            search = played([0], Admissions(vllm_server).reach(1), [last])
            one = client(search)
            async with one.stream("What is kept?", **LONG) as stream:
                await anext(stream)
            self.is_finished(one, ledger)
            assert ledger.finished[-1].served

    def is_finished(self, one: PipelinedClient, ledger: Ledger) -> None:
        assert ledger.open == 0
        # Our own count: the server's gauges may still show what was aborted a moment ago.
        assert load_of(one).pending == 0


@pytest.mark.vllm
class TestWarmUp:
    @pytest.mark.parametrize("prompts", ["messages", "token_ids"])
    async def test_makes_a_cold_engine_warm_while_the_search_runs(
        self, client: Client, orders: Any, builder: PromptBuilder, ledger: Ledger, prompts: str
    ) -> None:
        one = client(played(ledger.has_finished, [0]), warm_up=True, prompts=prompts)
        first = await one.answer("What is kept?", max_tokens=2)
        assert first.trace.warmed_up and first.usage is not None
        assert (first.usage.cached_tokens or 0) >= builder.prefix_tokens // BLOCK * BLOCK >= 2 * BLOCK
        warm_up, answered = ledger.finished
        assert (warm_up.served, warm_up.cached_tokens) == (True, 0)
        assert answered.served and not (await one.answer("And now?", max_tokens=2)).trace.warmed_up


PIECES = [chat("In the "), chat("drawer", "stop")]
ANSWER = Response([*PIECES, usage(300, 4)])
BROKEN = {"hang up": Response(end="hangup"), "cut": Response(PIECES[:1], "cut")}


@pytest.fixture
async def far_end() -> AsyncIterator[Server]:
    with Server() as server:
        server.answer = lambda body: ANSWER
        yield server
        await nothing_left()


async def has_come(far_end: Server, requests: int = 1) -> None:
    while len(far_end.requests) < requests:
        await asyncio.sleep(0.002)


class TestAServerThatFails:
    @pytest.fixture
    async def made(self, far_end: Server, ledger: Ledger) -> AsyncIterator[Client]:
        """Clients of it, whose orderer counts at four characters a token."""
        builder = PromptBuilder(SYSTEM)
        orderer = ObservedOrderer(Orderer(prefix_tokens=builder.prefix_tokens, strict=True), [ledger], compare=False)
        server = openai.AsyncOpenAI(base_url=far_end.url, api_key="none", max_retries=0)

        def make(retrieval: Retrieval[Question, Document], **options: Any) -> PipelinedClient:
            options = {"orderer": orderer, "warm_up": False, "report_load": False} | options
            return PipelinedClient(server, model="served", builder=builder, retrieval=retrieval, **options)

        async with server:
            yield make

    @pytest.mark.parametrize("how", ["hang up", "cut"])
    async def test_during_speculation_is_retried(self, far_end: Server, made: Client, ledger: Ledger, how: str) -> None:
        far_end.plays(BROKEN[how])

        async def has_failed() -> None:
            while not far_end.requests or engine_of(one).running:
                await asyncio.sleep(0.002)

        one = made(played([0], has_failed, [0]))
        stream = await one.answer("What is kept?")
        assert stream.text == "In the drawer" and not stream.trace.right
        assert ledger.open == 0 and [outcome.served for outcome in ledger.finished] == [True]

    @pytest.mark.parametrize("how", ["hang up", "cut"])
    async def test_always_raises_the_clients_error(
        self, far_end: Server, made: Client, ledger: Ledger, how: str
    ) -> None:
        import httpx

        far_end.answer = lambda body: BROKEN[how]
        one = made(played([0], [1], [1]))
        with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
            await one.answer("What is kept?")
        assert load_of(one).pending == 0
        # A prompt whose first token came was computed, whatever became of the answer.
        assert ledger.open == 0 and [outcome.served for outcome in ledger.finished] == [how == "cut"]

    async def test_in_the_middle_of_an_answer_raises_what_it_says(self, far_end: Server, made: Client) -> None:
        far_end.plays(Response([PIECES[0], {"error": {"message": "out of memory", "type": "server_error"}}]))
        with pytest.raises(openai.APIError, match="out of memory"):
            await made(played([0])).answer("What is kept?")

    async def test_that_holds_its_answer_is_closed(self, far_end: Server, made: Client, ledger: Ledger) -> None:
        far_end.answer = lambda body: Response(end="hold")

        async def is_held(requests: int) -> None:
            await has_come(far_end, requests)
            while far_end.held != 1:
                await asyncio.sleep(0.002)

        one = made(played([0], lambda: is_held(1), [1], lambda: is_held(2), RuntimeError("index"), [1]))
        with pytest.raises(RuntimeError, match="index"):
            await one.answer("What is kept?")
        assert load_of(one).pending == 0
        await nothing_left()
        assert await asyncio.to_thread(eventually, lambda: far_end.held == 0)
        assert len(far_end.requests) == 2 and ledger.open == 0

    async def test_is_warmed_up_again_after_a_failure(self, far_end: Server, made: Client, ledger: Ledger) -> None:
        expected = 1
        one = made(played(lambda: has_come(far_end, expected), [0]), warm_up=True)
        assert (await one.answer("What is kept?")).trace.warmed_up
        assert not (await one.answer("What is kept?")).trace.warmed_up
        far_end.answer = lambda body: BROKEN["hang up"]
        for _ in range(2):
            with pytest.raises(openai.APIConnectionError):
                await one.answer("What is kept?")
        far_end.answer = lambda body: ANSWER
        sent = len(far_end.requests)
        expected = sent + 1
        assert (await one.answer("What is kept?")).trace.warmed_up
        warm_up, question = far_end.requests[sent:]
        assert warm_up["max_tokens"] == 1 and question["max_tokens"] == 256
        assert not (await one.answer("What is kept?")).trace.warmed_up
        # Another tenant's system prompt is another, on an engine that may have been restarted.
        assert (await one.answer("What is kept?", scope="red")).trace.warmed_up
        assert ledger.open == 0

    async def test_to_report_usage_is_asked_once(self, far_end: Server, made: Client, ledger: Ledger) -> None:
        far_end.plays(error(400, "unknown field: stream_options"), Response(PIECES), Response(PIECES))
        one = made(played([0]))
        for _ in range(2):
            stream = await one.answer("What is kept?")
            assert stream.text == "In the drawer" and stream.usage is not None and stream.usage.prompt_tokens is None
        assert ["stream_options" in body for body in far_end.requests] == [True, False, False]
        assert ledger.open == 0

    async def test_options_that_are_not_the_callers_are_refused_before_anything_is_sent(self, made: Client) -> None:
        one = made(played([0]))
        with pytest.raises(TypeError, match="messages is set by the client"):
            one.stream("What is kept?", messages=[])
        with pytest.raises(ValueError, match="cache_salt"):
            await one.answer("What is kept?", scope="a/b")

    async def test_a_warm_up_takes_what_shapes_the_prompt_and_nothing_else(self, far_end: Server, made: Client) -> None:
        one = made(played(lambda: has_come(far_end), [0]), warm_up=True)
        shaping = {"chat_template_kwargs": {"enable_thinking": False}}
        await one.answer("What?", stop=["."], extra_body=shaping | {"min_tokens": 2}, scope="red", temperature=None)
        warm_up, question = far_end.requests
        assert warm_up["chat_template_kwargs"] == shaping["chat_template_kwargs"] == question["chat_template_kwargs"]
        assert warm_up["cache_salt"] == question["cache_salt"] == "red"
        assert warm_up["messages"][0] == question["messages"][0]
        assert question["min_tokens"] == 2 and "min_tokens" not in warm_up and "stop" not in warm_up
        assert "temperature" not in question
        tokens = PromptBuilder(SYSTEM).prefix_tokens
        short = made(played([0]), orderer=Orderer(block_size=tokens + 1, prefix_tokens=tokens), warm_up=True)
        assert not (await short.answer("What?")).trace.warmed_up, "no block is whole"


class TestTheLoad:
    async def test_of_a_server_is_read_while_searches_run(self, far_end: Server) -> None:
        far_end.metrics = (
            'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
            'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_requests_waiting_by_reason{reason="capacity"} 3.0\n'
        )
        async with openai.AsyncOpenAI(base_url=far_end.url, api_key="none") as server:
            poll = MetricsPoll(server, engine := WatchedEngine(None))  # type: ignore[arg-type]
            assert poll() is None

            async def is_known() -> None:
                async with asyncio.timeout(60):
                    while poll() is None:
                        await asyncio.sleep(0.005)

            search = poll.during(played([0], is_known, [1]))
            stages = [stage.documents async for stage in search(Question("What?"))]
            assert stages == [[DOCUMENTS[0]], [DOCUMENTS[1]]]
            assert poll() == 6
            # Ours come and go in between.
            engine.running = 2
            assert poll() == 8
            polls = far_end.polls
            await nothing_left()
            assert far_end.polls <= polls + 1
            await poll.close()

    async def test_of_a_server_that_does_not_say_is_not_known(self, far_end: Server) -> None:
        async with openai.AsyncOpenAI(base_url=far_end.url, api_key="none") as server:
            poll = MetricsPoll(server, WatchedEngine(None))  # type: ignore[arg-type]

            async def is_asked() -> None:
                while not far_end.polls:
                    await asyncio.sleep(0.005)

            search = poll.during(played(is_asked, [0]))
            assert [stage.final async for stage in search(Question("What?"))] == [True]
            await poll.close()
            assert poll() is None

    def test_counts_requests_of_others_as_pending(self) -> None:
        engine = WatchedEngine(None)  # type: ignore[arg-type]
        load = PromptLoad(engine, max_prefill_bs=5, requests=lambda: 5)
        assert load.pending == 5 and not load.has_room
        engine.running = 2
        assert load.pending == 3 and load.has_room
        with load.prefilling(), load.prefilling():
            assert load.pending == 5 and not load.has_room
        assert PromptLoad(engine, max_prefill_bs=1, requests=lambda: None).has_room

    def test_has_room_for_what_an_iteration_takes_at_the_mean_length(self) -> None:
        load = PromptLoad(WatchedEngine(None), token_budget=8192)  # type: ignore[arg-type]
        assert load.max_prefill_bs == 1
        load.learn(1000)
        assert load.max_prefill_bs == 8
        for _ in range(200):
            load.learn(4000)
        assert load.max_prefill_bs == 2


class TestPrompts:
    @pytest.mark.parametrize("state_ranking", [False, True])
    def test_are_predicted_as_they_are_committed(self, state_ranking: bool) -> None:
        """Repeated documents and a stated ranking included."""
        rng = random.Random(0)
        prompts = OrderedPrompts(Orderer(strict=True, block_size=1), PromptBuilder(state_ranking=state_ranking))
        moved = 0
        for number in range(100):
            found = [rng.choice(DOCUMENTS) for _ in range(4)]
            question = Question(f"What is {number}?")
            predicted = prompts.preview(question, found)
            assert prompts.preview(question, found) == predicted
            committed = prompts.commit(question, found)
            assert committed.request == predicted
            assert predicted != prompts.preview(Question("Else?"), found)
            moved += list(ordering_of(committed).permutation) != list(range(4))
            committed.confirm(None)
        assert moved > 20

    @pytest.mark.parametrize(("ahead_s", "older"), [(60.0, 2), (-60.0, 0)])
    def test_that_were_sent_ahead_say_nothing_of_what_was_evicted(self, ahead_s: float, older: int) -> None:
        """A speculation finds less than the orderer predicts later: what it misses has been computed since."""
        orderer = Orderer(strict=True, block_size=16, prefix_tokens=64, tokens=lambda document: 32)
        prompts = OrderedPrompts(orderer, PromptBuilder())
        for found in (DOCUMENTS[4:6], DOCUMENTS[:3]):
            prompts.commit(Question("What?"), found).confirm(None)
        committed = prompts.commit(Question("And?"), DOCUMENTS[:3])
        committed.confirm(TimedUsage(200, 0, 4, "stop", time.perf_counter() - ahead_s))
        assert orderer.order(DOCUMENTS[4:6]).prefix_documents == older

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -5, 10**400, 1 << 32, True, "x", [], {}])
    def test_whose_engine_reports_no_numbers_end_as_served_and_spoil_no_length(self, bad: Any) -> None:
        orderer, builder = RecordingOrderer(), PromptBuilder()
        prompts = OrderedPrompts(orderer, builder)
        prompts.commit(Question("What?"), DOCUMENTS[:3]).confirm(Usage(bad, bad, bad, None))
        assert orderer.finished == [RequestOutcome(True)]
        prompts.commit(Question("What?"), DOCUMENTS[:2]).confirm(Usage(100, 0, 40))
        assert prompts.suffix_tokens("What?", {}) == builder.suffix_tokens("What?") + 39, "the mean of one answer"

    def test_of_another_form_and_synchronous_clients_are_refused(self) -> None:
        with pytest.raises(TypeError, match="AsyncOpenAI"):
            OpenAIStreams(openai.OpenAI(api_key="none"), "served")
        with pytest.raises(ValueError, match="'messages' or 'token_ids'"):
            OrderedPrompts(Orderer(), PromptBuilder(), "text")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tokenizer"):
            SystemPrefix(Orderer(), PromptBuilder(), WatchedEngine(None), "token_ids")  # type: ignore[arg-type]
