"""The proxy of a busy server: a limited number of requests is in flight, and the others wait for their turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from ragorder import Orderer, Ordering

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import httpx2
from prometheus_client import CollectorRegistry
from support import sent_requests
from support.sent_requests import CHAT, TOKEN, plain
from support.waiting import turns

from ragorder.adapters.observing.observed import ObservedOrderer
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.proxy import AdmissionQueue, make_app
from ragorder.adapters.proxy.pages import StatsPages


def tagged(query: str, names: Iterable[str] = "", **fields: Any) -> dict[str, Any]:
    return sent_requests.tagged(names, query, **fields)


class FarEnd:
    """The proxy's server, without a network: it answers a question with two events, the second of them once it is told
    that the answer ends. `sent` are the questions in the order in which they came."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.in_flight: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        name = request.extensions["target"].decode()
        if request.method == "POST":
            body = json.loads(request.content)
            content = body["messages"][-1]["content"] if "messages" in body else body["input"]
            name = content.rpartition("Question: ")[2]
        self.sent.append(name)
        self.in_flight.append(name)
        if name.startswith("unreachable"):
            self.in_flight.remove(name)
            raise httpx2.ConnectError("gone")
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.answer(name))

    async def answer(self, name: str) -> AsyncIterator[bytes]:
        try:
            yield TOKEN
            await self.ends.setdefault(name, asyncio.Event()).wait()
            yield b"data: [DONE]\n\n"
        finally:
            self.in_flight.remove(name)


class Exchange:
    """A request to the proxy, and what it has answered so far."""

    def __init__(self, app: Any, path: str, body: Any, method: str) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.content = b""
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()})
        headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope: dict[str, Any] = {"type": "http", "method": method, "query_string": b"", "headers": headers}
        scope |= {"path": path, "raw_path": path.encode()}
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._take))

    async def _take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        self.content += message.get("body", b"")

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


class CountingOrderer(Orderer):
    """Keeps the orderings that are not finished."""

    def __init__(self) -> None:
        super().__init__(block_size=16, strict=True)
        self.unfinished: list[Ordering[Any]] = []
        self.waiting: list[int] = []

    def order(self, documents: Any, **options: Any) -> Ordering[Any]:
        ordering = super().order(documents, **options)
        self.waiting.append(len(options["waiting"]))
        self.unfinished.append(ordering)
        ordering.add_done_callback(lambda _: self.unfinished.remove(ordering))
        return ordering


class Proxy:
    """The application, with its far end."""

    def __init__(self, far_end: FarEnd, admission: AdmissionQueue | None, orderer: Any, **options: Any) -> None:
        self.far_end = far_end
        self.admission = admission
        options["make_transport"] = lambda: httpx2.MockTransport(far_end)
        self.app = make_app(orderer, upstream="http://far.end", admission=admission, **options)

    async def send(self, body: Any, path: str = CHAT, method: str = "POST") -> Exchange:
        exchange = Exchange(self.app, path, body, method)
        await let_tasks_run()
        return exchange

    async def end(self, *names: str) -> None:
        for name in names:
            self.far_end.ends.setdefault(name, asyncio.Event()).set()
        await let_tasks_run()

    @property
    def figures(self) -> dict[str, Any]:
        assert self.admission is not None
        return self.admission.as_json()


async def let_tasks_run() -> None:
    """Let everything happen that can."""
    await turns(60)


@pytest.fixture
def far_end() -> FarEnd:
    return FarEnd()


@pytest.fixture
def orderer() -> CountingOrderer:
    return CountingOrderer()


Start = Callable[..., Proxy]


@pytest.fixture
def start(far_end: FarEnd, orderer: CountingOrderer) -> Start:
    def start(max_in_flight: int = 1, options: dict[str, Any] | None = None, **limits: int) -> Proxy:
        return Proxy(far_end, AdmissionQueue(max_in_flight, **limits), orderer, **options or {})

    return start


class TestWhoseTurnItIs:
    async def test_the_most_cached_one_is_next(self, start: Start, far_end: FarEnd, orderer: CountingOrderer) -> None:
        proxy = start()
        await proxy.send(tagged("first", "ab"))
        for query, names in (("nothing", "fg"), ("half", "cbda"), ("all", "ba")):
            await proxy.send(tagged(query, names))
        await proxy.send(plain("plain"))
        assert (far_end.sent, len(orderer.unfinished)) == (["first"], 1), "those that wait are not ordered yet"
        await proxy.end("first", "all", "half", "nothing", "plain")
        assert far_end.sent == ["first", "all", "half", "nothing", "plain"]
        assert orderer.unfinished == []
        assert orderer.waiting == [0, 2, 1, 0], "each is laid out for those that still wait"

    async def test_a_window_limits_how_many_overtake(self, start: Start, far_end: FarEnd) -> None:
        proxy = start(reorder_window=2)
        await proxy.send(tagged("first", "ab"))
        await proxy.send(plain("plain"))
        names = [f"cached {number}" for number in range(5)]
        for name in names:
            await proxy.send(tagged(name, "ab"))
        await proxy.end("first", "plain", *names)
        assert far_end.sent == ["first", "cached 0", "cached 1", "plain", "cached 2", "cached 3", "cached 4"]

    async def test_a_cached_system_prompt_lets_no_short_prompt_overtake(self, start: Start, far_end: FarEnd) -> None:
        proxy = start()
        system = [{"role": "system", "content": "Answer from the documents. " * 20}]
        for name, words in (("first", 30), ("long", 90), ("short", 10)):
            await proxy.send(tagged(name, [name], texts={name: f"of {name} " * words}, messages=system))
        await proxy.end("first", "long", "short")
        assert far_end.sent == ["first", "long", "short"]

    async def test_what_another_tenant_has_cached_lets_none_overtake(
        self, start: Start, far_end: FarEnd, orderer: CountingOrderer
    ) -> None:
        proxy = start()
        await proxy.send(tagged("first", "ab", cache_salt="x"))
        await proxy.send(tagged("other", "ab", cache_salt="y"))
        await proxy.send(tagged("own", "ab", cache_salt="x"))
        await proxy.end("first", "own", "other")
        assert far_end.sent == ["first", "own", "other"]
        assert orderer.waiting == [0, 0, 0]

    async def test_only_posts_below_v1_wait(self, start: Start, far_end: FarEnd) -> None:
        proxy = start()
        await proxy.send(plain("first"))
        await proxy.send({"input": "Question: embedding"}, "/v1/embeddings")
        await proxy.send(None, "/v1/models", "GET")
        await proxy.send({"input": "Question: tokens"}, "/tokenize")
        assert far_end.sent == ["first", "/v1/models", "tokens"], "and the embedding waits"
        await proxy.end("first", "embedding", "/v1/models", "tokens")
        assert far_end.sent[-1] == "embedding"


class TestHowLongATurnLasts:
    async def test_a_slot_is_held_until_the_stream_ends(self, start: Start, far_end: FarEnd) -> None:
        proxy = start(2)
        exchanges = [await proxy.send(tagged(name, "ab")) for name in "xyz"]
        assert [exchange.content for exchange in exchanges].count(b"") == 1, "two have begun to be answered"
        assert far_end.in_flight == ["x", "y"]
        await proxy.end("y")
        assert far_end.in_flight == ["x", "z"]
        await proxy.end("x", "z")
        assert all(exchange.content.endswith(b"[DONE]\n\n") for exchange in exchanges)
        assert (proxy.figures["in_flight"], proxy.figures["waiting"]) == (0, 0)

    async def test_a_disconnect_frees_the_slot(self, start: Start, far_end: FarEnd, orderer: CountingOrderer) -> None:
        proxy = start()
        leaving = await proxy.send(tagged("leaving", "ab"))
        await proxy.send(tagged("next", "ab"))
        leaving.disconnect()
        await let_tasks_run()
        assert far_end.in_flight == ["next"]
        await proxy.end("next")
        assert (proxy.figures["in_flight"], orderer.unfinished) == (0, [])

    async def test_an_error_frees_the_slot(self, start: Start, far_end: FarEnd, orderer: CountingOrderer) -> None:
        proxy = start()
        await proxy.send(tagged("first", "ab"))
        failing = [await proxy.send(tagged(f"unreachable {number}", "ab")) for number in range(3)]
        last = await proxy.send(tagged("last", "cd"))
        await proxy.end("first", "last")
        assert [exchange.status for exchange in failing] == [502, 502, 502]
        assert last.status == 200
        assert (proxy.figures["in_flight"], orderer.unfinished) == (0, [])

    async def test_a_client_that_leaves_while_it_waits_is_never_sent(
        self, start: Start, far_end: FarEnd, orderer: CountingOrderer
    ) -> None:
        proxy = start()
        await proxy.send(tagged("first", "ab"))
        waiting = await proxy.send(tagged("impatient", "ab"))
        other = await proxy.send({"input": "Question: impatient, too"}, "/v1/embeddings")
        assert proxy.figures["waiting"] == 2
        for exchange in (waiting, other):
            exchange.disconnect()
        await let_tasks_run()
        assert (proxy.figures["waiting"], waiting.task.done(), other.task.done()) == (0, True, True)
        await proxy.end("first")
        assert far_end.sent == ["first"]
        assert (proxy.figures["in_flight"], orderer.unfinished) == (0, [])


class TestTooManyWait:
    async def test_one_more_request_gets_a_503(self, start: Start, far_end: FarEnd) -> None:
        proxy = start(max_waiting=1)
        await proxy.send(tagged("first", "ab"))
        await proxy.send(tagged("waits", "ab"))
        refused = await proxy.send(tagged("refused", "ab"))
        assert (refused.status, refused.headers[b"retry-after"]) == (503, b"1")
        message = "too many requests are waiting already (--max-waiting 1): try again later."
        error = {"message": message, "type": "server_error", "param": None, "code": "too_many_waiting"}
        assert json.loads(refused.content)["error"] == error
        assert proxy.figures["turned_away"] == 1
        await proxy.end("first", "waits")
        assert far_end.sent == ["first", "waits"]
        assert (await proxy.send(plain("again"))).status == 200
        await proxy.end("again")

    async def test_a_bad_request_is_refused_without_waiting(self, start: Start) -> None:
        proxy = start()
        await proxy.send(plain("first"))
        assert (await proxy.send({"ragorder": 3})).status == 400
        await proxy.end("first")


class TestWhatIsShown:
    async def test_metrics_and_stats(self, far_end: FarEnd) -> None:
        metrics = Metrics(CollectorRegistry())
        admission = AdmissionQueue(1, max_waiting=1, registry=metrics.registry)
        observed = ObservedOrderer(Orderer(block_size=16, strict=True), [metrics])
        proxy = Proxy(far_end, admission, observed, routes=StatsPages(metrics, admission).routes)
        for name in "abc":
            await proxy.send(tagged(name, "ab"))

        def value(name: str) -> float | None:
            return metrics.registry.get_sample_value(f"ragorder_{name}")

        assert (value("waiting_requests"), value("in_flight_requests")) == (1, 1)
        assert (value("wait_seconds_count"), value("turned_away_requests_total")) == (1, 1)
        await proxy.end("a", "b")
        assert (value("waiting_requests"), value("in_flight_requests")) == (0, 0)
        assert value("wait_seconds_count") == 2
        shown = await proxy.send(None, "/ragorder/stats", "GET")
        await shown.task
        queue = json.loads(shown.content)["queue"]
        assert queue.pop("wait_mean_ms") > 0
        assert queue == {"max_in_flight": 1, "in_flight": 0, "waiting": 0, "turned_away": 1}


@pytest.mark.slow
@pytest.mark.vllm
class TestARealServer:
    async def test_answers_all_that_wait_for_it(self, vllm_server: Any) -> None:
        orderer = CountingOrderer()
        admission = AdmissionQueue(2)
        app = make_app(orderer, upstream=vllm_server.base_url, admission=admission)
        exchanges = []
        for number in range(10):
            names = "abcdefgh"[number % 3 : number % 3 + 2]
            body = tagged(str(number), names, model=vllm_server.model_name, max_tokens=4)
            exchanges.append(Exchange(app, CHAT, body, "POST"))
        await asyncio.wait([exchange.task for exchange in exchanges])
        assert [exchange.status for exchange in exchanges] == [200] * 10
        assert all(json.loads(exchange.content)["usage"]["completion_tokens"] for exchange in exchanges)
        assert orderer.unfinished == []
        assert (admission.as_json()["in_flight"], admission.as_json()["waiting"]) == (0, 0)
