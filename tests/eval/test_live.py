"""The orderer against a real vLLM server: what it predicts is what the server reports, whatever happens in between."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support.inside import replace_take, scopes_of
from support.waiting import eventually

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import Answer, AsyncOrderedClient, OrderedClient

pytestmark = pytest.mark.vllm

BLOCK = 32
REQUESTS = 300
IN_FLIGHT = 8
TOP_K = 4
MakeOrderer = Callable[..., Orderer]
MakeClient = Callable[[Orderer], OrderedClient]


@pytest.fixture(scope="module")
def builder(vllm_model: Path) -> PromptBuilder:
    from ragorder.eval.engines.models import load_tokenizer

    return PromptBuilder("You are careful. Use the documents.", tokenizer=load_tokenizer(vllm_model))


@pytest.fixture(scope="module")
def documents(builder: PromptBuilder) -> list[Document]:
    """Five times what the server's cache holds."""
    from ragorder.eval.data.workloads import make_workload

    words = " ".join(each.text for each in make_workload("paper-shuf", 0, requests=1).documents).split()
    rng = random.Random(0)
    made: list[Document] = []
    while sum(map(builder.document_tokens, made)) < 5 * 128 * BLOCK:
        first, length = rng.randrange(len(words) - 60), rng.randint(20, 60)
        made.append(Document(f"d{len(made)}", " ".join(words[first : first + length])))
    return made


@pytest.fixture(autouse=True)
def empty_cache(vllm_server: Any) -> None:
    empty(vllm_server)


@pytest.fixture
def make_orderer(vllm_server: Any, builder: PromptBuilder) -> Iterator[MakeOrderer]:
    """Orderers for the server, with its events unless told otherwise."""
    made: list[Orderer] = []

    def make(*, events: bool = True, **options: Any) -> Orderer:
        if events:
            options |= {
                "events_endpoint": vllm_server.events_endpoint,
                "replay_endpoint": vllm_server.replay_endpoint,
                "events_topic": vllm_server.events_topic,
            }
        orderer = Orderer.for_vllm(vllm_server.base_url, builder=builder, strict=True, **options)
        made.append(orderer)
        return orderer

    yield make
    for orderer in made:
        orderer.close()


@pytest.fixture
def client(vllm_server: Any, builder: PromptBuilder) -> MakeClient:
    import openai

    plain = openai.OpenAI(base_url=f"{vllm_server.base_url}/v1", api_key="none", max_retries=0, timeout=60)
    return lambda orderer: OrderedClient(
        plain, model=vllm_server.model_name, orderer=orderer, builder=builder, prompts="token_ids", retries=0
    )


def rankings(count: int, documents: Sequence[Document], seed: int = 0) -> list[list[Document]]:
    """Questions about topics of some documents each, that come in bursts, as the paper's do, and come again."""
    rng = random.Random(seed)
    shuffled = rng.sample(documents, len(documents))
    topics = cycle([shuffled[first : first + TOP_K + 1] for first in range(0, len(documents) - TOP_K, TOP_K + 1)])
    active: list[list[Document]] = []
    asked = []
    for _ in range(count):
        if len(active) < 6 or rng.random() < 0.6:
            active = [*active[-5:], next(topics)]
        asked.append(rng.sample(rng.choice(active), TOP_K))
    return asked


def off_by(answer: Answer) -> float:
    """How far the prediction was above what the server reports, in blocks."""
    assert answer.cached_tokens is not None
    return (answer.ordering.cached_tokens - answer.cached_tokens) / BLOCK


async def serve(server: Any, builder: PromptBuilder, orderer: Orderer, asked: Sequence[list[Document]]) -> list[Answer]:
    """Serve the requests, 8 in flight at any time; retrieval takes each of them a moment, as it does."""
    import openai

    rng = random.Random(1)
    plans = [(number, documents, rng.uniform(0.005, 0.03)) for number, documents in enumerate(asked)]
    waiting = iter(plans)
    answers: dict[int, Answer] = {}
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as plain:
        rag = AsyncOrderedClient(
            plain, model=server.model_name, orderer=orderer, builder=builder, prompts="token_ids", retries=0
        )

        async def work() -> None:
            for number, documents, retrieval_s in waiting:
                await asyncio.sleep(retrieval_s)
                answers[number] = await rag.generate(
                    f"{number}: what is said about it?",
                    documents,
                    max_tokens=1 + number % 12,
                    extra_body={"ignore_eos": True},
                )

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    for number, documents, _ in plans:
        ordered = answers[number].ordering.documents
        assert sorted(map(id, ordered)) == sorted(map(id, documents))
    return [answers[number] for number in range(len(plans))]


class TestExactness:
    """A cache of 128 blocks, five times as much to hold, 8 requests in flight."""

    @pytest.fixture(scope="class")
    def runs(self, vllm_server: Any, builder: PromptBuilder, documents: list[Document]) -> dict[str, list[Answer]]:
        """With events, with the mirror and feedback, and with the paper's trie, which forgets nothing."""
        asked = rankings(REQUESTS, documents)
        served = {}
        for name, options in {"events": {}, "lru": {}, "none": {"residency": "none", "feedback": False}}.items():
            empty(vllm_server)
            if name == "events":
                options = {
                    "events_endpoint": vllm_server.events_endpoint,
                    "replay_endpoint": vllm_server.replay_endpoint,
                }
            with Orderer.for_vllm(vllm_server.base_url, builder=builder, strict=True, **options) as orderer:
                served[name] = asyncio.run(serve(vllm_server, builder, orderer, asked))
            errors = [off_by(answer) for answer in served[name]]
            within = fmean(abs(error) <= 1 for error in errors)
            cached = sum(answer.cached_tokens or 0 for answer in served[name])
            prompt = sum(answer.prompt_tokens or 0 for answer in served[name])
            print(  # noqa: T201
                f"{name:7} within a block {within:.1%}, mean error {fmean(map(abs, errors)):.2f} blocks, "
                f"bias {fmean(errors):+.2f}, cached {cached / prompt:.1%}"
            )
        return served

    def test_the_cache_is_as_small_as_it_should_be(
        self, vllm_server: Any, runs: dict[str, list[Answer]], builder: PromptBuilder, documents: list[Document]
    ) -> None:
        assert vllm_server.capacity_tokens == 128 * BLOCK
        used = {document.key: document for answer in runs["events"] for document in answer.ordering.documents}
        assert sum(map(builder.document_tokens, used.values())) > 4 * vllm_server.capacity_tokens
        for answers in runs.values():
            assert fmean((answer.cached_tokens or 0) / (answer.prompt_tokens or 1) for answer in answers) > 0.2

    def test_with_events_nearly_every_prediction_is_within_a_block(self, runs: dict[str, list[Answer]]) -> None:
        assert fmean(abs(off_by(answer)) <= 1 for answer in runs["events"]) >= 0.97

    def test_with_events_nothing_drifts(self, runs: dict[str, list[Answer]]) -> None:
        errors = [off_by(answer) for answer in runs["events"]]
        for first in range(0, REQUESTS, REQUESTS // 3):
            assert abs(fmean(errors[first : first + REQUESTS // 3])) <= 0.25

    def test_with_feedback_alone_the_mean_error_is_at_most_two_blocks(self, runs: dict[str, list[Answer]]) -> None:
        assert fmean(abs(off_by(answer)) for answer in runs["lru"]) <= 2

    def test_a_trie_that_forgets_nothing_promises_what_is_gone(self, runs: dict[str, list[Answer]]) -> None:
        bias = {name: fmean(off_by(answer) for answer in answers) for name, answers in runs.items()}
        assert bias["none"] > max(0.2, 3 * abs(bias["events"]), 3 * abs(bias["lru"]))


@pytest.mark.slow
class TestForeignTraffic:
    """A second client fills the cache between our requests."""

    @staticmethod
    def fill(server: Any, blocks: int, seed: int) -> None:
        import openai

        rng = random.Random(seed)
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as plain:
            while blocks > 0:
                length = min(blocks, 40)
                prompt = [rng.randrange(300, 2000) for _ in range(length * BLOCK)]
                plain.completions.create(model=server.model_name, prompt=prompt, max_tokens=2)
                blocks -= length

    def errors(
        self, server: Any, rag: OrderedClient, asked: Sequence[list[Document]], blocks: int, every: int
    ) -> list[float]:
        found = []
        for number, documents in enumerate(asked):
            if number and number % every == 0:
                self.fill(server, blocks, seed=number)
                # Events are some milliseconds behind answers.
                time.sleep(0.2)
            found.append(off_by(rag.generate(f"And {number}?", documents, max_tokens=4)))
        return found

    @pytest.mark.parametrize("blocks", [60, 128])
    def test_events_keep_every_prediction_exact(
        self, vllm_server: Any, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document], blocks: int
    ) -> None:
        rag = client(make_orderer())
        errors = self.errors(vllm_server, rag, rankings(40, documents, seed=blocks), blocks, every=4)
        assert max(map(abs, errors)) <= 1

    @pytest.mark.parametrize("blocks", [100, 128])
    def test_feedback_recovers_within_three_requests(
        self, vllm_server: Any, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document], blocks: int
    ) -> None:
        rag = client(make_orderer(events=False))
        asked = rankings(60, documents, seed=blocks)
        errors = self.errors(vllm_server, rag, asked, blocks, every=10)
        assert max(map(abs, errors[:10])) <= 1
        bursts = [[abs(error) > 1 for error in errors[first : first + 10]] for first in range(10, 60, 10)]
        assert any(map(any, bursts)), "the traffic must have pushed us out"
        assert max(map(sum, bursts)) <= 3


class TestInterruptions:
    """Whatever happens to server and events: no exception but the client's own, and right again afterwards."""

    def check(self, rag: OrderedClient, asked: Sequence[list[Document]]) -> None:
        """The predictions are exact, and not because there is nothing to predict."""
        answers = [rag.generate(f"Number {number}?", each, max_tokens=2) for number, each in enumerate(asked)]
        answers += [rag.generate(f"Again {number}?", each, max_tokens=2) for number, each in enumerate(asked)]
        assert max(abs(off_by(answer)) for answer in answers) <= 1
        assert sum(answer.cached_tokens or 0 for answer in answers) > 0

    def test_the_cache_is_reset(
        self, vllm_server: Any, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document]
    ) -> None:
        orderer = make_orderer()
        rag = client(orderer)
        asked = rankings(3, documents)
        self.check(rag, asked)
        empty(vllm_server)
        assert eventually(lambda: orderer.events.counters.cleared >= 1 and len(orderer.events.blocks) == 0)
        answer = rag.generate("After?", asked[0], max_tokens=2)
        assert (answer.ordering.cached_tokens, answer.cached_tokens) == (0, 0)
        self.check(rag, asked)

    @pytest.mark.slow
    def test_a_late_subscriber_gets_missed_events(
        self, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document]
    ) -> None:
        asked = rankings(3, documents)
        self.check(client(make_orderer(events=False)), asked)
        answer = client(make_orderer()).generate("Late?", asked[-1], max_tokens=2)
        assert answer.ordering.cached_tokens == answer.cached_tokens != 0

    def test_lost_events_are_heard_again(
        self, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        orderer = make_orderer()
        rag = client(orderer)
        lost: list[Any] = []
        take = replace_take(monkeypatch, orderer.events, lost.append)
        asked = rankings(8, documents)
        for each in asked:
            rag.generate("Unheard?", each, max_tokens=2)
        assert eventually(lambda: bool(lost))
        replace_take(monkeypatch, orderer.events, take)
        rag.generate("Heard?", asked[0], max_tokens=2)
        assert eventually(lambda: orderer.events.counters.replays >= 2 and orderer.events.synchronised)
        self.check(rag, rankings(3, documents, seed=9))
        assert orderer.events.counters.restarts == orderer.events.counters.garbage == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("end", ["stop", "kill"])
    def test_the_server_goes_with_requests_in_flight_and_comes_back(
        self, vllm_server: Any, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document], end: str
    ) -> None:
        import httpx
        import openai

        orderer, mirrored = make_orderer(), make_orderer(events=False)
        asked = rankings(6, documents)
        self.check(client(orderer), asked[:3])
        self.check(client(mirrored), asked[3:])
        failures: list[BaseException] = []

        def ask(each: Orderer, number: int) -> None:
            try:
                client(each).generate("Cut?", asked[number], max_tokens=1500, extra_body={"ignore_eos": True})
            except (openai.OpenAIError, httpx.TransportError) as error:
                failures.append(error)

        asking = [
            threading.Thread(target=ask, args=(each, number)) for each in (orderer, mirrored) for number in range(6)
        ]
        for thread in asking:
            thread.start()
        time.sleep(0.5)
        try:
            if end == "stop":
                vllm_server.stop(timeout_s=5)
            else:
                vllm_server.kill()
            for thread in asking:
                thread.join(60)
            # A server that is asked to stop may answer first.
            assert failures or end == "stop", "requests must have been in flight"
            # Ordering goes on without a server; nobody raises.
            orderer.order(asked[0]).discard()
        finally:
            vllm_server.start()
        assert eventually(lambda: orderer.events.synchronised and orderer.events.counters.restarts == 1)
        answer = client(orderer).generate("Back?", asked[0], max_tokens=2)
        assert (answer.ordering.cached_tokens, answer.cached_tokens) == (0, 0)
        self.check(client(orderer), asked)
        for number in range(3):
            late = client(mirrored).generate(f"Mirrored {number}?", asked[5], max_tokens=2)
        assert abs(off_by(late)) <= 1
        assert orderer.fallbacks == mirrored.fallbacks == 0
        assert all(lease.open is False for _, lease in scopes_of(orderer).pool.in_flight)


class TestTenants:
    def test_a_tenant_gets_no_hit_from_another_and_expects_none(
        self, make_orderer: MakeOrderer, client: MakeClient, documents: list[Document]
    ) -> None:
        rag = client(make_orderer())
        asked = documents[:TOP_K]
        for scope in (None, "tenant-a", "tenant-b"):
            first = rag.generate("What?", asked, scope=scope, max_tokens=2)
            assert (first.ordering.cached_tokens, first.cached_tokens) == (0, 0)
            again = rag.generate("And now?", asked[::-1], scope=scope, max_tokens=2)
            assert again.ordering.cached_tokens == again.cached_tokens != 0


def empty(server: Any) -> None:
    """Reset the prefix cache, and let the server say so: its events come with the next request."""
    import openai

    server.reset()
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as plain:
        plain.completions.create(model=server.model_name, prompt=[300], max_tokens=1)
