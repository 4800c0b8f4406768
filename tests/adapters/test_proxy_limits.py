"""What a slow or hostile client can take of the proxy: time, memory, connections, turns."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from support.far_end import WHOLE, Answer, FarEnd, Request, answer_events, answer_json
from support.waiting import eventually

from ragorder import Orderer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

import httpx2
import uvicorn
from support import sent_requests
from support.bodies import Bodies
from support.sent_requests import CHAT, TOKEN
from support.serve_process import ServeProcess, launching

from ragorder.adapters.http_server.connection import HEAD_LIMIT
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.request_body import MemoryBudget, RequestBody
from ragorder.adapters.http_server.server import listen, server_config
from ragorder.adapters.http_server.untrusted_json import VALUE_BYTES, count_values
from ragorder.adapters.proxy import AdmissionQueue, Fleet, ReplicaAddress, Timeouts, make_app
from ragorder.adapters.proxy.app import PROBES
from ragorder.adapters.proxy.workers import Workers

pytestmark = pytest.mark.merge

ANSWER = json.dumps(WHOLE).encode()
TEXTS = {name: f"{name} is a document about {name}. " * 2000 for name in "abc"}


class Upstream(FarEnd):
    """The proxy's server. It answers at once, never on /never, and without end on /endless."""

    def __init__(self) -> None:
        super().__init__()
        self.held = threading.Event()

    def play(self, request: Request) -> Answer:
        chunks: dict[str, Iterable[Any]] = {
            "never": [threading.Event()],
            "endless": itertools.repeat(b"x" * (1 << 16)),
            "held": [b"begun", self.held, b"ended"],
        }
        path = request.target.rpartition("/")[2]
        if b'"stream":true' in request.body:
            return answer_events(TOKEN, self.held, b"ended")
        return Answer(chunks[path]) if path in chunks else answer_json(WHOLE)


class Served:
    """A proxy on a port of its own, as `ragorder serve` runs it."""

    def __init__(self, app: Any, client_s: float, connections: int) -> None:
        self._listening = listen("127.0.0.1", 0)
        self.port = self._listening.getsockname()[1]
        self._server = uvicorn.Server(
            server_config(app, grace_s=1, client_s=client_s, connections=connections, probes=PROBES)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]}, daemon=True)
        self._thread.start()
        assert eventually(lambda: self._server.started)

    def connect(self, sent: bytes = b"", *, small: bool = False) -> socket.socket:
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(60)


class Site:
    """Starts proxies, and keeps what is open, to close it in the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, serve: Callable[[Any], str]) -> None:
        self.far_end = Upstream()
        self.url = serve(self.far_end)
        self.budgets: list[MemoryBudget] = []
        self._served: list[Served] = []
        make_budget = MemoryBudget.__init__

        def make(budget: MemoryBudget, limit: int) -> None:
            make_budget(budget, limit)
            self.budgets.append(budget)

        monkeypatch.setattr(MemoryBudget, "__init__", make)

    @property
    def memory(self) -> MemoryBudget:
        return self.budgets[0]

    def start(self, *, client_s: float = 30.0, connections: int = 100, orderer: Any = None, **options: Any) -> Served:
        app = make_app(
            orderer or Orderer(block_size=16, strict=True),
            timeouts=Timeouts(client_s=client_s),
            **{"upstream": self.url} | options,
        )
        self._served.append(Served(app, client_s, connections))
        return self._served[-1]

    def stop(self) -> None:
        for served in self._served:
            served.stop()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, serve: Callable[[Any], str]) -> Iterator[Site]:
    site = Site(monkeypatch, serve)
    yield site
    site.stop()


def head(path: str = CHAT, length: int | None = None, method: str = "POST") -> bytes:
    declared = b"" if length is None else b"Content-Length: %d\r\n" % length
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode() + declared + b"\r\n"


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    said = b""
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            said += piece
    return said


def hears(connection: socket.socket, end: bytes) -> bool:
    """Whether it gets an answer that ends so, in however many pieces."""
    said = b""
    while end not in said and (piece := connection.recv(1 << 16)):
        said += piece
    return end in said


def answered(connection: socket.socket) -> bool:
    return hears(connection, ANSWER)


def tagged(names: str) -> bytes:
    return json.dumps(sent_requests.tagged(names, texts=TEXTS)).encode()


class TestHeaders:
    @pytest.mark.parametrize(
        "begin", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\n"], ids=["one header", "address", "many"]
    )
    def test_endless_headers_are_cut_off(self, begin: bytes, site: Site) -> None:
        connection = site.start().connect(begin)
        line = b"a: b\r\n" if begin.endswith(b"\n") else b"abcdef"
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 26:
                connection.sendall(line * 10_000)
                sent += 10_000 * len(line)
        assert sent < 1 << 26, "64 MiB were taken"

    def test_long_headers_pass(self, site: Site) -> None:
        value = b"x" * (HEAD_LIMIT - 500)
        connection = site.start().connect(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx: " + value + b"\r\n\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"

    @pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=repr)
    def test_incomplete_headers_time_out(self, sent: bytes, site: Site) -> None:
        said = rest(site.start(client_s=0.3).connect(sent))
        assert said.startswith(b"HTTP/1.1 408") if sent else said == b""

    def test_a_byte_now_and_then_gives_no_more_time(self, site: Site) -> None:
        connection = site.start(client_s=0.5).connect(b"GET / HTTP/1.1\r\n")
        connection.settimeout(0.1)
        deadline = time.monotonic() + 30
        said = None
        while said is None and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection.sendall(b"x")
                said = connection.recv(100)
        assert (said or b"").startswith(b"HTTP/1.1 408")

    def test_between_requests_a_connection_may_wait_longer(self, site: Site) -> None:
        connection = site.start(client_s=0.3).connect(head("/v1/models", method="GET"))
        assert answered(connection)
        time.sleep(0.8)
        connection.sendall(head("/v1/models", method="GET"))
        assert answered(connection)


class TestBodies:
    @pytest.mark.parametrize("path", [CHAT, "/v1/files"])
    def test_a_body_that_does_not_arrive_is_408(self, path: str, site: Site) -> None:
        said = rest(site.start(client_s=0.3).connect(head(path, 100) + b"{"))
        assert said.startswith(b"HTTP/1.1 408")
        assert b"body_too_slow" in said
        assert b"connection: close" in said
        assert site.memory.used == 0

    async def test_each_piece_has_the_time_again_and_each_byte_has_not(self) -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.15)
            return {"type": "http.request", "body": piece, "more_body": next(count) < 7}

        piece, count = b"x" * (1 << 18), iter(range(8))
        assert len(await RequestBody([], receive, 1 << 30, client_s=0.9).read()) == 8 << 18
        piece, count = b"x", iter(range(8))
        with pytest.raises(HTTPError, match="256 KiB may take"):
            await RequestBody([], receive, 1 << 30, client_s=0.9).read()

    def test_the_rest_of_an_answered_body_times_out(self, site: Site) -> None:
        served = site.start(client_s=0.3, api_key="k")
        said = rest(served.connect(head(CHAT, 100) + b"{"))
        assert said.startswith(b"HTTP/1.1 401")

    def test_all_bodies_together_are_bounded_uploads_that_are_passed_on_too(self, site: Site) -> None:
        served = site.start(bodies_limit=1000)
        body = b"x" * 900
        first = served.connect(head(CHAT, 900) + body[:600])
        assert eventually(lambda: site.memory.used == 600)
        refused = rest(served.connect(head(CHAT, 900) + body[:600]))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"no_room_for_body" in refused
        assert b"retry-after: 1" in refused
        assert rest(served.connect(head("/v1/files", 900) + b"x" * 500)).startswith(b"HTTP/1.1 503")
        first.sendall(body[600:])
        assert answered(first)
        assert site.memory.used == 0
        assert answered(served.connect(head(CHAT, 900) + body))
        assert site.far_end.bodies == [body, body]

    @pytest.mark.parametrize("queued", [False, True])
    @pytest.mark.parametrize("replicas", [0, 1])
    def test_what_was_sent_upstream_is_not_kept_for_the_answer(self, replicas: int, queued: bool, site: Site) -> None:
        """Neither its bytes nor what was parsed of them."""
        addresses = [ReplicaAddress(site.url, Orderer(block_size=16, strict=True)) for _ in range(replicas)]
        upstream = Fleet(addresses) if addresses else site.url
        served = site.start(admission=AdmissionQueue(1) if queued else None, upstream=upstream)
        documents = [{"id": name, "text": name * 1_000_000} for name in "abcd"]
        tag = {"documents": documents, "query": "?"}
        body = json.dumps({"stream": True, "messages": [], "ragorder": tag}).encode()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        connection = served.connect(head(CHAT, len(body)) + body)
        assert hears(connection, TOKEN)
        assert len(site.far_end.requests.pop().body) > 4_000_000
        site.far_end.received = b""
        assert site.memory.used == 0
        assert eventually(lambda: tracemalloc.get_traced_memory()[0] - before < 500_000)
        tracemalloc.stop()
        site.far_end.held.set()
        assert hears(connection, b"ended")

    def test_what_waits_for_its_turn_counts_with_its_documents(self, site: Site) -> None:
        served = site.start(admission=AdmissionQueue(1))
        holder = served.connect(head("/v1/held", 2) + b"{}")
        assert hears(holder, b"begun")
        wide = json.dumps({"ragorder": {"documents": [{"id": "a", "text": "\u20ac" * 1000}], "query": "q"}})
        for body, copies in ((tagged("ab"), 2), (wide.encode(), 5)):
            waiting = served.connect(head(CHAT, len(body)) + body)
            count = copies * len(body) + VALUE_BYTES * count_values(body, len(body))
            assert eventually(lambda count=count: site.memory.used == count)  # type: ignore[misc]
            waiting.close()
            assert eventually(lambda: site.memory.used == 0)

    @pytest.mark.parametrize(
        "lengths",
        [
            b"Content-Length: 5\r\nTransfer-Encoding: chunked",
            b"Content-Length: -5",
            b"Content-Length: 5\r\nContent-Length: 6",
        ],
        ids=repr,
    )
    def test_two_lengths_end_the_connection(self, lengths: bytes, site: Site) -> None:
        sent = head(CHAT)[:-2] + lengths + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + head("/v1/next", method="GET")
        said = rest(site.start().connect(sent))
        assert (said[:12], said.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400", 1)
        assert site.far_end.bodies == []

    def test_two_lengths_end_the_connection_on_a_page_of_our_own_as_well(self, site: Site) -> None:
        """Nothing reads that body."""
        two = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        health = head("/ragorder/health", method="GET")
        connection = site.start().connect(health[:-2] + two + health)
        assert rest(connection).count(b"HTTP/1.1 200") == 1


class TestAnswers:
    def test_a_client_that_does_not_read_frees_its_slot(self, site: Site) -> None:
        served = site.start(client_s=0.5, admission=AdmissionQueue(2))
        unread = [served.connect(head("/v1/endless", 2) + b"{}", small=True) for _ in range(2)]
        assert answered(served.connect(head(CHAT, 2) + b"{}"))
        assert site.far_end.left.is_set()
        assert len(unread) == 2

    @pytest.mark.slow
    def test_a_slow_reader_keeps_its_slot(self, site: Site) -> None:
        connection = site.start(client_s=2).connect(head("/v1/endless", 2) + b"{}")
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            assert connection.recv(1 << 20)
            time.sleep(0.05)
        assert not site.far_end.left.is_set()

    def test_requests_in_advance_are_not_kept_without_end(self, site: Site) -> None:
        """They are not read before the first one is answered, or end the connection."""
        connection = site.start().connect(head("/v1/never", method="GET"))
        assert site.far_end.begun.wait(60)
        connection.settimeout(5)
        with pytest.raises((ConnectionError, TimeoutError)):
            connection.sendall(head("/v1/models", method="GET") * 1_000_000)


class TestConnections:
    def test_the_longest_idle_connection_makes_room(self, site: Site) -> None:
        served = site.start(connections=3)
        idle = [served.connect(b"GET ") for _ in range(3)]
        time.sleep(0.2)
        assert answered(served.connect(head(CHAT, 2) + b"{}"))
        assert rest(idle[0]) == b""
        idle[2].sendall(head("/v1/models", method="GET")[4:])
        assert answered(idle[2])

    @pytest.mark.slow
    def test_a_connection_with_a_request_is_never_replaced(self, site: Site) -> None:
        served = site.start(connections=2)
        busy = [served.connect(head("/v1/held", 2) + b"{}") for _ in range(2)]
        assert all(hears(connection, b"begun") for connection in busy)
        refused = rest(served.connect(head(CHAT, 2) + b"{}"))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in refused
        probe = served.connect(head("/ragorder/health", method="GET"))
        assert probe.recv(1000).startswith(b"HTTP/1.1 200")
        more = [served.connect() for _ in range(40)]
        assert rest(more[-1]) == b"", "there is no end of them"
        site.far_end.held.set()
        assert all(hears(connection, b"ended") for connection in busy)


class TestWorkers:
    async def test_short_work_is_done_at_once_and_other_work_in_threads(self) -> None:
        workers, here = Workers(), threading.get_ident()
        assert await workers.run(threading.get_ident, 100) == here
        assert await workers.run(threading.get_ident, 100_000) != here
        assert await Workers(always=True).run(threading.get_ident, 100) != here

    async def test_long_work_does_not_hold_up_other_work(self) -> None:
        workers, release = Workers(), threading.Event()
        long = asyncio.create_task(workers.run(release.wait, 1 << 24))
        ordinary = [asyncio.create_task(workers.run(threading.get_ident, 1 << 17)) for _ in range(5)]
        await asyncio.gather(*ordinary)
        assert not long.done()
        release.set()
        assert await long

    async def test_a_disconnect_ends_the_wait_and_drops_work_not_begun(self) -> None:
        workers, begun, release, ended, did = Workers(), threading.Event(), threading.Event(), threading.Event(), []

        def work() -> bool:
            begun.set()
            return release.wait()

        running = asyncio.create_task(workers.run(work, 1 << 24, abandoned=lambda _: ended.set()))
        waiting = asyncio.create_task(workers.run(lambda: did.append(1), 1 << 24))
        assert await asyncio.to_thread(begun.wait, 60)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not ended.is_set(), "it is still worked on"
        release.set()
        assert await asyncio.to_thread(ended.wait, 60)
        await workers.run(lambda: None, 1 << 24)
        assert did == []

    async def test_threads_end_when_they_are_closed(self) -> None:
        workers = Workers()
        thread = await workers.run(threading.current_thread, 1 << 20)
        workers.close()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    def test_several_threads_count_tokens_as_one_does(self, tokenizers: dict[str, Any]) -> None:
        def counted(number: int) -> Any:
            name = "abc"[number % 3]
            body = {
                "messages": [{"role": "system", "content": f"{name} {number % 40}"}],
                "ragorder": {"documents": [{"id": name, "text": f"{number % 40} {TEXTS[name][:3000]}"}], "query": name},
            }
            read = bodies.found(body)
            assert read.error is None
            return read.prefix_tokens, read.suffix_tokens, [document.tokens for document in read.documents]

        def make() -> Bodies:
            return Bodies(tokenizer=tokenizer)

        tokenizer = next(iter(tokenizers.values()))
        bodies = make()
        expected = list(map(counted, range(120)))
        bodies = make()
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(counted, range(120))) == expected

    def test_documents_of_a_client_that_left_are_discarded(self, site: Site) -> None:
        begun, release = threading.Event(), threading.Event()

        class Slow(Orderer):
            def order(self, *arguments: Any, **options: Any) -> Any:
                begun.set()
                release.wait(60)
                ordering = super().order(*arguments, **options)
                ordering.add_done_callback(finished.append)
                return ordering

        finished: list[Any] = []
        body = tagged("abc")
        connection = site.start(orderer=Slow(block_size=16)).connect(head(CHAT, len(body)) + body)
        assert begun.wait(60)
        connection.close()
        assert eventually(lambda: site.memory.used == 0), "the request waits for the thread"
        release.set()
        assert eventually(lambda: len(finished) == 1)
        assert not finished[0].served

    @pytest.mark.slow
    def test_the_process_ends_while_a_body_is_worked_on(self) -> None:
        code = (
            "from ragorder.adapters.proxy.bodies.parsing import BodyParser\n"
            "def spin(*_):\n    while True: sum(range(1000))\n"
            "BodyParser.parse = spin\n"
            "from ragorder.cli import main; main()"
        )
        options = ["--upstream", "http://127.0.0.1:9", "--port", "0", "--capacity-tokens", "99", "--block-size", "9"]
        with launching(ServeProcess, sys.executable, "-c", code, "serve", *options, "--grace", "1") as launch:
            process, body = launch(), tagged("abc")
            connections = [socket.create_connection(process.address) for _ in range(3)]
            for connection in connections:
                connection.sendall(head(CHAT, len(body)) + body)
            time.sleep(0.5)
            # The loop still answers.
            assert httpx2.get(f"{process.url}/ragorder/health", timeout=60).status_code == 200
            said = process.stop()
            assert process.popen.returncode == 128 + signal.SIGTERM
            assert "Traceback" not in said
            assert "document" not in said
