"""One proxy for several replicas: which one gets a request, and what becomes of it when a replica is killed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("aiohttp")

import httpx2
from prometheus_client import CollectorRegistry, generate_latest
from support import sent_requests
from support.fake_engine import EngineProcess, Engines
from support.far_end import Answer, FarEnd, Request, answer_json
from support.rings import length
from support.sent_requests import CERTIFICATES, CHAT, ROLE, TOKEN, echo, get, plain, post, post_to, proxy_to
from support.serve_process import Served
from support.streamed_answer import StreamedAnswer, stream
from support.waiting import eventually, until

from ragorder import Orderer
from ragorder.adapters.proxy import AdmissionQueue, Fleet, ReplicaAddress, make_app
from ragorder.adapters.proxy.fleet_proxy import HeldAnswer
from ragorder.adapters.proxy.upstream import UpstreamError

Start = Callable[..., EngineProcess]
Run = Callable[..., Served]
MakeProxy = Callable[..., "Proxy"]
TEXTS = {f"d{number}": f"document {number} is about {number * 7919 % 1000}. " * 48 for number in range(60)}
CAPACITY = 16_384
tagged = partial(sent_requests.tagged, texts=TEXTS)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.stop()


@pytest.fixture
def start(engines: Engines) -> Iterator[Start]:
    yield engines.start
    engines.give_back()


@dataclass
class Proxy:
    url: str
    fleet: Fleet

    def post(self, body: Any, path: str = CHAT) -> httpx2.Response:
        return post(self.url, body, path)

    def get(self, path: str) -> httpx2.Response:
        return get(self.url + path)

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/ragorder/replicas").json()["replicas"]
        return found


@pytest.fixture
def proxy(serve: Callable[[Any], str]) -> MakeProxy:
    """A proxy of these servers, or of ranks of one."""

    def proxy(*urls: str, ranks: int | None = None, check_s: float = 0.2, **options: Any) -> Proxy:
        addresses = [
            ReplicaAddress(url, Orderer(capacity_tokens=CAPACITY, block_size=16, strict=True), rank)
            for url in urls
            for rank in (range(ranks) if ranks else (None,))
        ]
        fleet = Fleet(addresses, check_s=check_s, registry=options.pop("registry", None))
        return Proxy(serve(make_app(Orderer(strict=True), upstream=fleet, **options)), fleet)

    return proxy


@pytest.fixture
def fleet(proxy: MakeProxy, start: Start) -> Callable[..., tuple[Proxy, list[EngineProcess]]]:
    """This number of servers, and a proxy of them."""

    def fleet(count: int, **options: Any) -> tuple[Proxy, list[EngineProcess]]:
        engines = [start() for _ in range(count)]
        return proxy(*(engine.url for engine in engines), **options), engines

    return fleet


MakeFleet = Callable[..., tuple[Proxy, list[EngineProcess]]]


def region(rng: random.Random, regions: int = 12) -> list[str]:
    """Three of the five documents on one subject."""
    first = 5 * rng.randrange(regions)
    return [f"d{number}" for number in rng.sample(range(first, first + 5), 3)]


class TestTheChoice:
    def test_is_the_replica_that_has_the_documents(self, fleet: MakeFleet) -> None:
        front, _ = fleet(3)
        names = [["d0", "d1", "d2"], ["d10", "d11", "d12"], ["d20", "d21", "d22"]]
        first = [front.post(tagged(each)).headers["x-ragorder-replica"] for each in names]
        assert sorted(first) == ["0", "1", "2"]
        again = [front.post(tagged(each[::-1])) for each in names]
        assert [answer.headers["x-ragorder-replica"] for answer in again] == first
        for answer in again:
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            predicted = int(answer.headers["x-ragorder-predicted-cached-tokens"])
            # Lengths are estimated, and the chat has a few characters of its own.
            assert cached >= 700 and abs(predicted - cached) <= 48

    def test_spreads_requests_in_flight(self, fleet: MakeFleet) -> None:
        """All ask for the same documents: one replica alone would compute them once, and have a queue."""
        front, engines = fleet(3)
        with ThreadPoolExecutor(36) as pool:
            bodies = [tagged(["d0", "d1", "d2"], f"{number}", pace=[None, 0]) for number in range(36)]
            waiting = [pool.submit(front.post, body) for body in bodies]
            assert eventually(lambda: sum(len(engine.state["begun"]) for engine in engines) == 36)
            for engine in engines:
                engine.open()
            answers = [each.result() for each in waiting]
        assert {answer.status_code for answer in answers} == {200}
        served = [sum(engine.state["served"]) for engine in engines]
        assert sum(served) == 36 and min(served) >= 8
        assert [each["in_flight"] for each in front.replicas()] == [0, 0, 0]

    def test_caches_together_what_one_with_the_capacity_of_both_would(self, proxy: MakeProxy, start: Start) -> None:
        """The goal: 0.95 of one engine's cached tokens."""
        rng = random.Random(0)
        requests = [region(rng) for _ in range(length(160, 80))]

        def cached(*engines: EngineProcess) -> int:
            front = proxy(*(engine.url for engine in engines))
            for number, names in enumerate(requests):
                assert front.post(tagged(names, str(number))).status_code == 200
            return sum(engine.state["cached_tokens"] for engine in engines)

        # Five documents of twelve subjects are 19,000 tokens: more than one of the two engines holds.
        whole = cached(start(capacity_tokens=2 * CAPACITY))
        assert cached(start(), start()) >= 0.95 * whole

    def test_of_requests_without_documents_is_the_least_busy(self, fleet: MakeFleet) -> None:
        front, _ = fleet(2)
        found = Counter(front.post(plain(str(number))).headers["x-ragorder-replica"] for number in range(10))
        assert found == {"0": 5, "1": 5}
        assert {front.get("/v1/models").json()["data"][0]["id"] for _ in range(4)} == {"fake"}

    def test_waits_for_a_slot_where_they_are_limited(self, fleet: MakeFleet) -> None:
        front, _ = fleet(2, admission=AdmissionQueue(1))
        with ThreadPoolExecutor(6) as pool:
            bodies = [tagged(["d0", "d1"], f"{number}", pace=[0.05, 0]) for number in range(6)]
            answers = list(pool.map(front.post, bodies))
        assert {answer.status_code for answer in answers} == {200}
        # One after another: each finds the documents where the first one left them.
        assert len({answer.headers["x-ragorder-replica"] for answer in answers}) == 1


class TestRanks:
    def test_each_has_a_tree_and_gets_its_header_whatever_the_client_chose(
        self, proxy: MakeProxy, start: Start
    ) -> None:
        engine = start(ranks=3)
        front = proxy(engine.url, ranks=3)
        names = [["d0", "d1", "d2"], ["d10", "d11", "d12"], ["d20", "d21", "d22"]]
        for _ in range(3):
            for each in names:
                assert post(front.url, tagged(each), **{"X-data-parallel-rank": "1"}).status_code == 200
        state = engine.state
        assert state["served"] == [3, 3, 3]
        # Each set was computed once, on its rank.
        assert state["cached_tokens"] >= 0.6 * state["prompt_tokens"]
        assert [each["rank"] for each in front.replicas()] == [0, 1, 2]


class TestAKilledReplica:
    def test_loses_no_request_that_had_not_begun_to_answer(self, fleet: MakeFleet) -> None:
        """Half of the requests wait for their first token, half are in the middle of their answers."""
        front, engines = fleet(2)
        rng = random.Random(1)
        waiting = [StreamedAnswer() for _ in range(12)]
        begun = [StreamedAnswer() for _ in range(12)]
        whole = [tagged(region(rng), f"whole {number}", pace=[None, 0]) for number in range(6)]
        with ThreadPoolExecutor(30) as pool:
            for number, each in enumerate(begun):
                pool.submit(stream, front.url, tagged(region(rng), f"begun {number}", pace=[0, None]), each)
            assert all(each.began.wait(60) for each in begun)
            for number, each in enumerate(waiting):
                pool.submit(stream, front.url, tagged(region(rng), f"waiting {number}", pace=[None, 0]), each)
            answers = [pool.submit(front.post, body) for body in whole]
            assert eventually(lambda: sum(len(engine.state["begun"]) for engine in engines) == 30)
            engines[0].kill()
            engines[1].open()
        assert [(each.status, each.text, each.done) for each in waiting] == [(200, "a b c", True)] * 12
        assert {each.replica for each in waiting} == {"1"}
        assert [answer.result().status_code for answer in answers] == [200] * 6
        lost = [each for each in begun if each.replica == "0"]
        kept = [each for each in begun if each.replica == "1"]
        assert lost and kept
        assert all(each.done and each.text == "a b c" for each in kept)
        for each in lost:
            # What had come is not sent again, and does not look whole.
            assert each.text == "a" and not each.done and each.broke
            assert each.error["code"] == "upstream_unavailable"
            assert each.error["type"] == "server_error"

    def test_is_left_out_until_it_answers_again(self, fleet: MakeFleet, start: Start) -> None:
        front, engines = fleet(2)
        for _ in range(4):
            front.post(tagged(["d0", "d1"]))
        engines[0].kill()
        found = [front.post(tagged(["d0", "d1"], str(number))) for number in range(6)]
        assert [(answer.status_code, answer.headers["x-ragorder-replica"]) for answer in found] == [(200, "1")] * 6
        assert eventually(lambda: [each["up"] for each in front.replicas()] == [False, True])
        assert front.get("/ragorder/ready").status_code == 200
        port = int(engines[0].url.rpartition(":")[2])
        start(port=port)
        assert eventually(lambda: [each["up"] for each in front.replicas()] == [True, True])
        # It has computed least.
        assert front.post(plain("?")).headers["x-ragorder-replica"] == "0"

    def test_when_none_is_left_the_error_says_so(self, fleet: MakeFleet) -> None:
        front, engines = fleet(2)
        for engine in engines:
            engine.kill()
        for _ in range(2):
            answer = front.post(tagged(["d0", "d1"]))
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unavailable")
            assert front.get("/v1/models").status_code == 502
        assert front.get("/ragorder/ready").status_code == 503
        assert front.get("/ragorder/health").status_code == 200
        assert [each["in_flight"] for each in front.replicas()] == [0, 0]

    def test_its_request_is_ordered_for_the_other_one(self, fleet: MakeFleet) -> None:
        """The body is the one that was given, ordered once, with its documents once."""
        front, engines = fleet(2, check_s=60)
        front.post(tagged(["d0", "d1", "d2"]))
        (used,) = (number for number, engine in enumerate(engines) if engine.state["begun"])
        engines[used].kill()
        answer = front.post(tagged(["d2", "d1", "d0"]))
        assert answer.headers["x-ragorder-replica"] == str(1 - used)
        # Three documents, not six: nothing was appended twice.
        tokens = sum(-(-len(f"[{name}]\n{TEXTS[name]}\n\n") // 4) for name in ("d0", "d1", "d2"))
        assert answer.json()["usage"]["prompt_tokens"] == pytest.approx(tokens, abs=16)
        assert answer.headers["x-ragorder-predicted-cached-tokens"] == "0"


class TestStoredResponses:
    """OpenAI's responses, which the server keeps that gave them."""

    @pytest.mark.parametrize("streamed", [False, True])
    def test_are_continued_shown_and_deleted_where_they_are(self, streamed: bool, fleet: MakeFleet) -> None:
        front, _ = fleet(3)

        def respond(**fields: Any) -> tuple[str, str]:
            answer = front.post({"model": "fake", "input": "?", "stream": streamed, **fields}, "/v1/responses")
            assert answer.status_code == 200
            found = re.search(r'"id": "(resp_[^"]+)"', answer.text)
            assert found is not None
            return found[1], answer.headers["x-ragorder-replica"]

        began = [respond() for _ in range(6)]
        assert {replica for _, replica in began} == {"0", "1", "2"}
        for name, replica in began:
            for _ in range(2):
                # Each turn is kept under a name of its own.
                name, again = respond(previous_response_id=name)
                assert again == replica
            tagged = {"documents": [{"id": "d0", "text": TEXTS["d0"]}, {"id": "d1", "text": TEXTS["d1"]}], "query": "?"}
            name, again = respond(previous_response_id=name, ragorder=tagged)
            assert again == replica
            with httpx2.Client(base_url=front.url, trust_env=False, verify=CERTIFICATES) as client:
                for method, path in (("GET", "?include=x"), ("POST", "/cancel"), ("DELETE", ""), ("GET", "")):
                    answer = client.request(method, f"/v1/responses/{name}{path}")
                    assert answer.headers["x-ragorder-replica"] == replica
                assert answer.status_code == 404, "it was deleted"

    @pytest.mark.parametrize("prefix", ["", "/openai", "/openai/v1", "/openai/deployments/gpt", "//v1/"])
    def test_are_found_on_every_route(self, prefix: str, proxy: MakeProxy, serve: Callable[[Any], str]) -> None:
        names = iter(range(8))

        class Store(FarEnd):
            def play(self, request: Request) -> Answer:
                return answer_json({"id": f"resp_{next(names)}"} if request.body else {})

        front = proxy(*(serve(Store()) for _ in range(2)))
        for _ in range(4):
            made = front.post({"model": "m", "input": "?"}, f"{prefix}/responses")
            for path in ("", "?include=x", "/input_items"):
                shown = front.get(f"{prefix}/responses/{made.json()['id']}{path}")
                assert shown.headers["x-ragorder-replica"] == made.headers["x-ragorder-replica"]

    def test_of_a_replica_that_is_lost_fail_as_the_others_say(self, fleet: MakeFleet) -> None:
        front, engines = fleet(2, check_s=60)
        answer = front.post({"model": "fake", "input": "?"}, "/v1/responses")
        name, used = answer.json()["id"], int(answer.headers["x-ragorder-replica"])
        engines[used].kill()
        follow_up = {"model": "fake", "input": "?", "previous_response_id": name}
        assert front.post(follow_up, "/v1/responses").status_code == 502
        # Now it is known, and another one is asked, which may have the same store.
        assert eventually(lambda: not front.replicas()[used]["up"])
        assert front.post(follow_up, "/v1/responses").status_code == 404
        assert front.post({"model": "fake", "input": "?"}, "/v1/responses").status_code == 200


class TestDraining:
    def test_ends_what_is_in_flight_and_gets_nothing_new(self, fleet: MakeFleet) -> None:
        front, engines = fleet(2)
        long = StreamedAnswer()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream, front.url, tagged(["d0", "d1"], pace=[0, None]), long)
            assert long.began.wait(60)
            assert long.replica is not None
            draining = int(long.replica)
            state = front.post({}, f"/ragorder/replicas/{draining}/drain").json()["replicas"]
            assert (state[draining]["draining"], state[draining]["in_flight"]) == (True, 1)
            found = {front.post(tagged(["d0", "d1"], str(n))).headers["x-ragorder-replica"] for n in range(4)}
            assert found == {str(1 - draining)}
            engines[draining].open()
        assert long.done and long.text == "a b c"
        front.post({}, f"/ragorder/replicas/{1 - draining}/drain")
        refused = front.post(tagged(["d0", "d1"]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        front.post({}, f"/ragorder/replicas/{draining}/resume")
        assert front.post(tagged(["d0", "d1"])).headers["x-ragorder-replica"] == str(draining)
        for number in ("7", "9" * 5000, "one"):
            unknown = front.post({}, f"/ragorder/replicas/{number}/drain")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "no_such_replica")

    def test_a_server_that_says_it_is_not_ready_gets_nothing(self, fleet: MakeFleet) -> None:
        front, engines = fleet(2)
        front.get("/v1/models")
        engines[1].sicken()
        assert eventually(lambda: [each["up"] for each in front.replicas()] == [True, False])
        found = {front.post(plain(str(number))).headers["x-ragorder-replica"] for number in range(4)}
        assert found == {"0"}


class TestAnswers:
    @pytest.mark.parametrize("status", [502, 503])
    def test_that_refuse_are_asked_of_another_replica_if_it_may_be_sent_again(
        self, status: int, proxy: Callable[..., Proxy], serve: Callable[[Any], str]
    ) -> None:
        paths: list[str] = []

        async def loading(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            paths.append(scope["path"])
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"the model is loading"})

        front = proxy(serve(loading), serve(loading), check_s=60)
        for path, times in (("/tokenize", 1), ("/v1/embeddings", 2)):
            answer = front.post({"input": "a"}, path)
            assert (answer.status_code, answer.text) == (status, "the model is loading")
            assert paths.count(path) == times

    def test_wait_with_one_body_if_it_has_no_documents(self, fleet: MakeFleet) -> None:
        """Two bodies of 40 kB fit into 100 kB while both could still be sent to the other replica."""
        front, engines = fleet(2, bodies_limit=100_000)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(front.post, plain("a" * 40_000, pace=[None, 0.0]))
            try:
                assert eventually(lambda: sum(len(engine.state["begun"]) for engine in engines) == 1)
                second = front.post(plain("b" * 40_000))
            finally:
                for engine in engines:
                    engine.open()
            assert (first.result().status_code, second.status_code) == (200, 200)

    @pytest.mark.parametrize("options", [{}, {"stable_tools": True}], ids=["as it is", "with sorted tools"])
    def test_of_another_replica_count_a_request_without_documents_once(self, options: dict[str, Any]) -> None:
        class Transport(httpx2.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
                if request.url.host == "down":
                    raise httpx2.ConnectError("down")
                return await httpx2.ASGITransport(echo).handle_async_request(request)

        class Learner(list[Any]):
            def add(self, tenant: str | None, texts: Any) -> None:
                self.append(texts)

        passed: list[str] = []
        learner = Learner()
        fleet = Fleet([ReplicaAddress(f"http://{host}", Orderer()) for host in ("down", "up")], check_s=60)
        facts: dict[str, Any] = {"on_passed": passed.append, "learner": learner, "on_recognised": lambda *_: None}
        app = proxy_to(echo, upstream=fleet, make_transport=Transport, **facts, **options)
        tools = [{"type": "function", "function": {"name": name}} for name in "ba"]
        answer = post_to(app, plain(tools=tools))
        assert answer.headers["x-ragorder-replica"] == "1"
        assert answer.json() == plain(tools=tools[::-1] if options else tools)
        assert [each["served"] for each in fleet.as_json()] == [1, 1]
        assert (passed, len(learner)) == (["no_documents"], 1)


class TestHeldAnswers:
    """What has not begun at the client can still come from elsewhere."""

    HEAD: ClassVar[dict[str, Any]] = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }

    @pytest.fixture
    def sent(self) -> list[Any]:
        return []

    def held(self, sent: list[Any], **options: Any) -> HeldAnswer:
        async def send(message: Any) -> None:
            sent.append(message)

        return HeldAnswer(send, **{"of_tokens": True, "refusable": True, **options})

    def piece(self, body: bytes, more: bool = True) -> dict[str, Any]:
        return {"type": "http.response.body", "body": body, "more_body": more}

    async def test_a_whole_answer_begins_at_its_end_and_a_long_one_before(self, sent: list[Any]) -> None:
        head = {**self.HEAD, "headers": [(b"content-type", b"application/json")]}
        answer = self.held(sent)
        await answer(head)
        await answer(self.piece(b'{"choices":'))
        assert sent == []
        await answer(self.piece(b"[]}", more=False))
        assert sent[1:] == [self.piece(b'{"choices":[]}', more=False)]
        long = self.held(sent)
        await long(head)
        await long(self.piece(b"x" * 70_000))
        assert len(sent) == 4

    async def test_what_is_kept_is_bounded_however_small_its_pieces(self, sent: list[Any]) -> None:
        answer = self.held(sent)
        await answer({**self.HEAD, "headers": [(b"content-type", b"application/json")]})
        tracemalloc.start()
        try:
            for _ in range(50_000):
                await answer(self.piece(b"x"))
            assert sent == [] and tracemalloc.get_traced_memory()[0] < 1 << 19
        finally:
            tracemalloc.stop()

    async def test_a_stream_of_other_routes_or_compressed_is_not_delayed(self, sent: list[Any]) -> None:
        other = self.held(sent, of_tokens=False)
        await other(self.HEAD)
        await other(self.piece(ROLE))
        assert len(sent) == 2
        compressed = self.held(sent)
        await compressed({**self.HEAD, "headers": [*self.HEAD["headers"], (b"content-encoding", b"gzip")]})
        await compressed(self.piece(b"\x1f\x8b"))
        assert len(sent) == 4

    async def test_an_error_event_stands_between_two_events_only(self, sent: list[Any]) -> None:
        error = UpstreamError(502, "gone", code="upstream_unavailable")
        answer = self.held(sent)
        await answer(self.HEAD)
        await answer(self.piece(TOKEN))
        await answer(self.piece(b'data: {"choi'))
        await answer.fail(error)
        assert len(sent) == 3
        await answer(self.piece(b'ces":[]}\n\n'))
        await answer.fail(error)
        assert json.loads(sent[-1]["body"][6:])["error"]["code"] == "upstream_unavailable"


class TestAFleet:
    def test_has_replicas_with_caches_of_their_own(self) -> None:
        orderer = Orderer()
        with pytest.raises(ValueError, match="at least one replica"):
            Fleet([])
        for same in ("http://a:1/", " http://a:1", "http://a:1/v1", "http://a:1/v1/"):
            with pytest.raises(ValueError, match="each server or rank once"):
                Fleet([ReplicaAddress("http://a:1", Orderer()), ReplicaAddress(same, Orderer())])
        with pytest.raises(ValueError, match="its own orderer"):
            Fleet([ReplicaAddress("http://a:1", orderer), ReplicaAddress("http://b:1", orderer)])

    async def test_is_not_checked_any_more_once_its_application_has_shut_down(self) -> None:
        """Other applications may go on in the same event loop."""
        before = asyncio.all_tasks()
        asked: list[Any] = []

        async def far_end(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope)
            await sent_requests.echo(scope, receive, send)

        fleet = Fleet([ReplicaAddress("http://far.end", Orderer())], check_s=0.01)
        app = sent_requests.proxy_to(far_end, upstream=fleet)
        given: asyncio.Queue[Any] = asyncio.Queue()
        lifespan = asyncio.create_task(app({"type": "lifespan"}, given.get, asyncio.Queue().put))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://proxy") as client:
            assert (await client.get("/own")).status_code == 200
        # The request, and a check.
        await until(lambda: len(asked) > 1)
        for event in ("startup", "shutdown"):
            given.put_nowait({"type": f"lifespan.{event}"})
        await lifespan
        await until(lambda: asyncio.all_tasks() <= before)

    def test_shows_its_replicas_in_metrics_without_their_addresses(self, proxy: MakeProxy, start: Start) -> None:
        registry = CollectorRegistry()
        front = proxy(start().url, start().url, registry=registry)
        for number in range(4):
            front.post(plain(str(number)))
        page = generate_latest(registry).decode()
        assert 'ragorder_replica_up{replica="0"} 1.0' in page
        assert 'ragorder_replica_requests_total{replica="1"} 2.0' in page
        assert "127.0.0.1" not in page

    def test_no_user_or_password_is_shown(self, serve: Callable[[Any], str]) -> None:
        fleet = Fleet([ReplicaAddress("http://user:secret@127.0.0.1:9", Orderer())])
        front = Proxy(serve(make_app(Orderer(), upstream=fleet)), fleet)
        assert front.replicas()[0]["server"] == "http://127.0.0.1:9"


class TestTheCommand:
    def test_repeated_upstream_makes_a_fleet_with_the_sizes_of_each(self, run_serve: Run, start: Start) -> None:
        engines = [start(capacity_tokens=tokens) for tokens in (4096, 8192)]
        served = run_serve(*(word for engine in engines for word in ("--upstream", engine.url)))
        replicas = served.app["upstream"].addresses
        assert [each.orderer.settings.capacity_tokens for each in replicas] == [4096, 8192]
        assert [each.rank for each in replicas] == [None, None]
        assert "Warning: the size" not in served.said
        # The metrics' registry, from what counts with it.
        assert b"ragorder_replica_up" in generate_latest(served.app["on_passed"].__self__.registry)

    def test_data_parallel_ranks_makes_a_fleet_of_one_server(self, run_serve: Run, start: Start) -> None:
        engine = start(ranks=2, capacity_tokens=4096)
        served = run_serve("--upstream", engine.url, "--data-parallel-ranks", "2")
        replicas = served.app["upstream"].addresses
        assert [(each.upstream, each.rank) for each in replicas] == [(engine.url, 0), (engine.url, 1)]
        assert [each.orderer.settings.capacity_tokens for each in replicas] == [4096, 4096]
        assert "data-parallel" not in served.said

    def test_says_what_the_server_has(self, run_serve: Run, start: Start) -> None:
        engine = start(ranks=2)
        served = run_serve("--upstream", engine.url)
        assert served.app["upstream"] == engine.url
        assert "has 2 engines" in served.said and "give --data-parallel-ranks 2" in served.said
        assert (
            "--data-parallel-ranks 3: the server has 2"
            in run_serve("--upstream", engine.url, "--data-parallel-ranks", "3").said
        )
