"""What the application of Ray Serve is made of, without a cluster: its contract with Ray, answers and their errors,
mirrors, lifespans."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")

import httpx2
from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from ragorder import Document, Orderer
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.parsing import ParsedBody
from ragorder.adapters.proxy.upstream import UpstreamError
from ragorder.adapters.ray import EmbeddedEngine, UnsupportedRayError, make_application, versions
from ragorder.adapters.ray.answer import ReplicaAnswer, ReplicaLostError
from ragorder.adapters.ray.ingress import AppResponse
from ragorder.adapters.ray.lifespan import Lifespan
from ragorder.adapters.ray.mirrors import ReplicaChoice, ReplicaMirrors
from ragorder.adapters.ray.ordered_calls import OrderedCalls
from ragorder.adapters.ray.replica import EngineReplica, ReplicaRequest
from ragorder.adapters.ray.transport import ReplicaTransport
from ragorder.degraded import DegradedWarning
from ragorder.ordering import RequestOutcome
from ragorder.topic import Topics

ROOT = Path(__file__).resolve().parents[2]
EVENTS = [(b"content-type", b"text/event-stream")]
SECRET = "what the prompt says"  # noqa: S105


class TestTheContract:
    def test_ray_has_all_that_is_used(self) -> None:
        assert versions.missing_parts() == []

    def test_its_range_is_that_of_the_extra(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        (wanted,) = (each for each in map(Requirement, extras["ray"]) if each.name == "ray")
        assert wanted.specifier.contains(ray.__version__)
        assert wanted.specifier.contains(f"{versions.SUPPORTED_RAY}.0")
        major, minor = versions.SUPPORTED_RAY.split(".")
        assert not wanted.specifier.contains(f"{major}.{int(minor) + 1}.0")

    def test_another_version_is_warned_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "__version__", "2.99.1")
        with pytest.warns(DegradedWarning, match=re.escape("Ray 2.99.1 is installed")):
            versions.check_ray()

    @pytest.mark.parametrize(
        "changed",
        [
            "ray.serve.handle:DeploymentHandle.no_such_method",
            "ray.serve.no_such_module:Name",
        ],
    )
    def test_a_missing_part_is_an_error_that_names_it(self, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
        monkeypatch.setitem(versions.CONTRACT, changed, ())
        with pytest.raises(UnsupportedRayError, match=rf"{re.escape(changed)}.*pip install 'ragorder\[ray\]'"):
            make_application(EmbeddedEngine("/models/none"))

    def test_so_is_a_parameter_that_is_no_longer_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "ray.serve.request_router:RequestRouter.choose_replicas"
        monkeypatch.setitem(versions.CONTRACT, name, ("candidate_replicas", "no_such_parameter"))
        assert versions.missing_parts() == [name]

    def test_without_ray_the_extra_is_named(self, python: Any) -> None:
        done = python("-c", "import ragorder.adapters.ray", blocked=("ray",))
        assert "Ray Serve needs ray: pip install 'ragorder[ray]'" in done.stderr


class TestTheApplication:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"choose": "random"}, "choose must be 'topic' or 'best', got 'random'"),
            ({"choose": "best", "topics": Topics("secret")}, "topics are for choose='topic'"),
            ({"replicas": {"request_router_config": None}}, "leave out request_router_config"),
            ({"choose": "best", "ingress": {"num_replicas": 2}}, "leave num_replicas out"),
        ],
    )
    def test_options_that_contradict_each_other_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_application(EmbeddedEngine("/models/none"), **options)

    async def test_sees_requests_below_its_prefix(self) -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope["path"], scope["raw_path"], scope["root_path"]))

        async def nothing(*_: Any) -> Any: ...

        for prefix, path in [("", "/v1/models"), ("/rag", "/rag/v1/models"), ("/rag", "/v1/models")]:
            scope = {"type": "http", "root_path": prefix, "path": path, "raw_path": path.encode()}
            await AppResponse(app)(scope, nothing, nothing)
        assert seen == [("/v1/models", b"/v1/models", "")] * 3


class Items:
    """The items of a replica's answer, or the error at their place."""

    def __init__(self, *items: Any) -> None:
        self.items = iter(items)
        self.cancelled = False

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> Any:
        item = next(self.items, None)
        if item is None:
            raise StopAsyncIteration
        if item == "wait":
            await asyncio.Event().wait()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


async def read(answer: ReplicaAnswer) -> tuple[int, list[bytes]]:
    response = await answer.begin()
    return response.status_code, [chunk async for chunk in response.aiter_raw()]


class TestAnAnswer:
    async def test_is_status_headers_and_body(self) -> None:
        items = Items((201, [(b"x-a", b"b")]), b"one", b"two")
        answer = ReplicaAnswer(items)  # type: ignore[arg-type]
        response = await answer.begin()
        assert (response.status_code, response.headers["x-a"]) == (201, "b")
        assert [chunk async for chunk in response.aiter_raw()] == [b"one", b"two"]
        await response.aclose()
        assert not items.cancelled, "it had ended"

    @pytest.mark.parametrize(
        ("error", "kind", "status", "code"),
        [
            (ActorDiedError(), ReplicaLostError, 502, "upstream_unavailable"),
            (ActorUnavailableError(SECRET, None), ReplicaLostError, 502, "upstream_unavailable"),
            (RayTaskError("f", SECRET, ValueError(SECRET)), UpstreamError, 502, "upstream_unavailable"),
            (BackPressureError(num_queued_requests=3, max_queued_requests=3), HTTPError, 503, "too_many_waiting"),
            (DeploymentUnavailableError(None), HTTPError, 503, "no_replica"),
        ],
    )
    async def test_that_does_not_begin_is_an_error_without_content(
        self, error: Exception, kind: type[HTTPError], status: int, code: str
    ) -> None:
        with pytest.raises(HTTPError) as raised:
            await ReplicaAnswer(Items(error)).begin()  # type: ignore[arg-type]
        assert type(raised.value) is kind
        assert (raised.value.status, raised.value.code) == (status, code)
        assert SECRET not in json.dumps(raised.value.content)
        assert bool(raised.value.headers) is (status == 503), "those can be sent again"

    async def test_without_any_item_is_an_error(self) -> None:
        with pytest.raises(UpstreamError, match="did not answer"):
            await ReplicaAnswer(Items()).begin()  # type: ignore[arg-type]

    async def test_that_takes_too_long_is_cancelled(self) -> None:
        items = Items("wait")
        with pytest.raises(UpstreamError) as raised:
            await ReplicaAnswer(items, 0.01).begin()  # type: ignore[arg-type]
        assert (raised.value.status, raised.value.code) == (504, "upstream_timeout")
        assert items.cancelled

    async def test_that_nobody_reads_is_cancelled(self) -> None:
        items = Items((200, EVENTS), b"data: 1\n\n", b"data: 2\n\n")
        response = await ReplicaAnswer(items).begin()  # type: ignore[arg-type]
        await response.aclose()
        assert items.cancelled

    @pytest.mark.parametrize(
        ("headers", "last", "says"),
        [(EVENTS, b"data: 1\n\n", True), (EVENTS, b"data: 1", False), ([], b"{}\n\n", False)],
    )
    async def test_cut_off_between_events_says_so(
        self, headers: list[tuple[bytes, bytes]], last: bytes, says: bool
    ) -> None:
        response = await ReplicaAnswer(Items((200, headers), last, ActorDiedError())).begin()  # type: ignore[arg-type]
        chunks = []
        with pytest.raises(ReplicaLostError):
            async for chunk in response.aiter_raw():
                chunks.append(chunk)  # noqa: PERF401
        assert chunks[0] == last
        assert [json.loads(chunk[6:])["error"]["code"] for chunk in chunks[1:]] == ["upstream_unavailable"] * says


class Handle:
    """Gives these answers, one for each call; keeps the sessions and requests of the calls."""

    def __init__(self, *answers: Items, calls: list[Any] | None = None, session: str | None = None) -> None:
        self.answers = answers
        self.calls = [] if calls is None else calls
        self.session = session

    def options(self, *, session_id: str | None = None, **_: Any) -> Handle:
        return Handle(*self.answers, calls=self.calls, session=session_id)

    def remote(self, request: ReplicaRequest) -> Items:
        self.calls.append((self.session, request))
        return self.answers[len(self.calls) - 1]


class TestTheTransport:
    OK = ((200, []), b"ok")

    async def send(self, handle: Handle, method: str = "POST", session: str = "topic") -> tuple[int, bytes]:
        headers = {"x-session-id": session, "content-type": "application/json", "connection": "close"}
        url = "http://replicas/v1/chat/completions"
        request = httpx2.Request(method, url, headers=headers if session else {}, content=b"{}")
        response = await ReplicaTransport(handle).handle_async_request(request)  # type: ignore[arg-type]
        return response.status_code, b"".join([chunk async for chunk in response.aiter_raw()])

    async def test_sends_a_request_to_the_replica_of_its_session(self) -> None:
        handle = Handle(Items(*self.OK))
        assert await self.send(handle) == (200, b"ok")
        ((session, request),) = handle.calls
        assert session == "topic"
        assert (request.method, request.target, request.body) == ("POST", b"/v1/chat/completions", b"{}")
        assert b"connection" not in dict(request.headers)

    @pytest.mark.parametrize("first", [Items(ActorDiedError()), Items((503, []), b"full"), Items((502, []), b"gone")])
    async def test_sends_it_to_any_other_if_that_takes_no_requests(self, first: Items) -> None:
        handle = Handle(first, Items(*self.OK))
        assert await self.send(handle) == (200, b"ok")
        assert [session for session, _ in handle.calls] == ["topic", None]

    async def test_gives_the_last_answer_after_three(self) -> None:
        handle = Handle(*(Items((503, []), b"full %d" % number) for number in range(4)))
        assert await self.send(handle) == (503, b"full 2")
        handle = Handle(*(Items(ActorDiedError()) for _ in range(4)))
        with pytest.raises(ReplicaLostError):
            await self.send(handle)
        assert len(handle.calls) == 3

    async def test_never_sends_twice_what_may_have_had_an_effect(self) -> None:
        handle = Handle(Items(ActorDiedError()), Items(*self.OK))
        with pytest.raises(ReplicaLostError):
            await self.send(handle, method="DELETE")
        assert len(handle.calls) == 1

    async def test_needs_no_session(self) -> None:
        handle = Handle(Items(*self.OK))
        assert await self.send(handle, session="") == (200, b"ok")
        assert handle.calls[0][0] is None


class TestARequest:
    @pytest.mark.parametrize(
        ("method", "target", "kind", "repeatable"),
        [
            ("POST", b"/v1/chat/completions", b"application/json", True),
            ("POST", b"/v1/embeddings?x=1", b"application/json; charset=utf-8", True),
            ("POST", b"/v1/audio/transcriptions", b"multipart/form-data", False),
            ("POST", b"/reset", b"application/json", False),
            ("DELETE", b"/v1/files/3", b"application/json", False),
            ("GET", b"/v1/models", b"", True),
        ],
    )
    def test_is_sent_again_only_if_it_has_no_effect(
        self, method: str, target: bytes, kind: bytes, repeatable: bool
    ) -> None:
        assert ReplicaRequest(method, target, [(b"content-type", kind)], b"{}").repeatable is repeatable

    def test_has_the_session_of_its_header(self) -> None:
        assert ReplicaRequest("GET", b"/", [(b"x-session-id", b"abc")], b"").session == "abc"
        assert ReplicaRequest("GET", b"/", [(b"x-session-id", b"")], b"").session is None
        assert ReplicaRequest("GET", b"/", [], b"").session is None


class TestAReplica:
    @pytest.fixture
    def replica(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from types import SimpleNamespace

        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="abc"))
        monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
        return EngineReplica

    @staticmethod
    async def ask(replica: Any, request: ReplicaRequest) -> tuple[int, dict[bytes, bytes], bytes]:
        (status, headers), *chunks = [item async for item in replica.answer(request)]
        return status, dict(headers), b"".join(chunks)

    async def test_gives_the_request_as_it_came(self, replica: Any) -> None:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                seen.append((scope["method"], scope["raw_path"], scope["query_string"], (await receive())["body"]))
                await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
                await send({"type": "http.response.body", "body": b"answer"})

        request = ReplicaRequest("POST", b"/v1/a%20b?c=d", [(b"content-length", b"4")], b"body")
        status, headers, body = await self.ask(replica(lambda: app), request)
        assert seen == [("POST", b"/v1/a%20b", b"c=d", b"body")]
        assert (status, headers, body) == (200, {b"x-a": b"b", b"x-ragorder-replica": b"abc"}, b"answer")

    async def test_says_that_its_engine_broke_off(self, replica: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise ValueError(SECRET)

        status, _, body = await self.ask(replica(lambda: app), ReplicaRequest("GET", b"/", [], b""))
        assert (status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
        assert SECRET.encode() not in body

    @pytest.mark.parametrize(("status", "healthy"), [(200, True), (404, True), (503, False)])
    async def test_is_as_healthy_as_its_engine(self, replica: Any, status: int, healthy: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                assert scope["path"] == "/ragorder/ready"
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b""})

        checked = replica(lambda: app).check_health()
        if healthy:
            await checked
        else:
            with pytest.raises(RuntimeError, match="does not answer"):
                await checked


class TestALifespan:
    async def test_begins_and_ends_once(self) -> None:
        said = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["type"] == "lifespan"
            for _ in range(2):
                what = (await receive())["type"]
                said.append(what)
                await send({"type": f"{what}.complete"})

        lifespan = Lifespan(app)
        await asyncio.gather(*(lifespan.begin() for _ in range(3)))
        assert said == ["lifespan.startup"]
        await lifespan.end()
        await lifespan.end()
        assert said == ["lifespan.startup", "lifespan.shutdown"]

    async def test_is_not_needed(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise NotImplementedError

        lifespan = Lifespan(app)
        await lifespan.begin()
        await lifespan.end()

    async def test_that_cannot_begin_is_an_error(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no"})

        with pytest.raises(RuntimeError, match="cannot start"):
            await Lifespan(app).begin()


def parsed(names: Iterable[str]) -> ParsedBody:
    body: Any = None
    return ParsedBody(body, [Document(name, name, tokens=160) for name in names], 0, lambda permutation: b"")


def order(mirrors: ReplicaMirrors, replica: str, names: str) -> None:
    orderer: Any = mirrors._of(replica).orderer
    orderer._orderer.order([Document(name, name, tokens=160) for name in names], scope=b"")


class TestMirrors:
    @pytest.fixture
    def mirrors(self) -> ReplicaMirrors:
        return ReplicaMirrors(lambda: RequestOrderer(Orderer(capacity_tokens=4096, block_size=16, strict=True)))

    def test_rank_the_replica_with_the_documents_first(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        assert mirrors.rank(["a", "b", "c"], parsed("zyx"))[0] == "b"
        assert sorted(mirrors.rank(["a", "b", "c"], parsed("zyx"))) == ["a", "b", "c"]

    def test_rank_others_by_their_load(self, mirrors: ReplicaMirrors) -> None:
        with mirrors.in_flight("a"), mirrors.in_flight("a"), mirrors.in_flight("c"):
            assert mirrors.rank(["a", "b", "c"], None) == ["b", "c", "a"]

    def test_of_a_replica_that_has_gone_are_dropped(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        with mirrors.in_flight("b"):
            mirrors.rank(["a"], parsed("xyz"))
            assert "b" in mirrors._mirrors, "a request of it has not ended"
        mirrors.rank(["a"], parsed("xyz"))
        assert set(mirrors._mirrors) == {"a"}

    def test_choose_a_replica_that_was_tried_only_without_others(self, mirrors: ReplicaMirrors) -> None:
        order(mirrors, "b", "xyz")
        assert "b" not in ReplicaChoice(mirrors, parsed("xyz"), ("b",)).rank(["a", "b", "c"])
        assert ReplicaChoice(mirrors, parsed("xyz"), ("b",)).rank(["b"]) == ["b"]


class Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[dict[str, str]]
    stream: bool = False


class Answer(BaseModel):
    usage: dict[str, Any]


class Server:
    """Keeps what it is asked, and gives these answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[Request] = []

    async def chat(self, request: Request, info: Any = None) -> AsyncIterator[Any]:
        self.asked.append(request)
        return self._stream()

    async def _stream(self) -> AsyncIterator[Any]:
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer


class Failure(BaseModel):
    error: str


class WatchedOrderer(Orderer):
    def __init__(self) -> None:
        super().__init__(capacity_tokens=4096, block_size=16, strict=True)
        self.outcomes: list[RequestOutcome] = []

    def order(self, *documents: Any, **options: Any) -> Any:
        ordering = super().order(*documents, **options)
        ordering.add_done_callback(self.outcomes.append)
        return ordering


class TestCallsOfRaysLLMServer:
    USAGE: ClassVar = {"prompt_tokens": 400, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    EVENTS: ClassVar = [
        ['data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'],
        f'data: {{"choices": [], "usage": {json.dumps(USAGE)}}}\n\n',
        "data: [DONE]\n\n",
    ]

    @staticmethod
    def request(names: str, **fields: Any) -> Request:
        documents = [{"id": name, "text": f"{name} " * 200} for name in names]
        return Request(model="m", messages=[], ragorder={"documents": documents, "query": "?"}, **fields)

    @staticmethod
    async def run(calls: OrderedCalls, server: Server, request: Request) -> list[Any]:
        return [answer async for answer in await calls.run("chat", server.chat, request, "info")]

    @staticmethod
    def order_in(request: Request) -> list[str]:
        prompt = request.messages[-1]["content"]
        return sorted("abc", key=lambda name: prompt.index(f"{name} {name} {name}"))

    @pytest.mark.parametrize(("stream", "answers"), [(False, [Answer(usage=USAGE)]), (True, EVENTS)])
    async def test_are_ordered_alike_and_their_answers_are_read(self, stream: bool, answers: list[Any]) -> None:
        orderer = WatchedOrderer()
        calls, server = OrderedCalls(orderer), Server(*answers)
        for names in ("bac", "cab"):
            assert await self.run(calls, server, self.request(names, stream=stream)) == answers
        first, second = server.asked
        assert self.order_in(first) == self.order_in(second)
        assert first.stream is stream and "ragorder" not in (first.model_extra or {})
        assert orderer.outcomes == [RequestOutcome(True, 0, 401, 400)] * 2

    @pytest.mark.parametrize("answers", [[Failure(error="no")], [ValueError("no")]])
    async def test_that_fail_count_as_not_served(self, answers: list[Any]) -> None:
        orderer = WatchedOrderer()
        with suppress(ValueError):
            await self.run(OrderedCalls(orderer), Server(*answers), self.request("abc"))
        (outcome,) = orderer.outcomes
        assert not outcome.served

    async def test_without_documents_go_on_as_they_are(self) -> None:
        request, server = (
            Request(model="m", messages=[{"role": "user", "content": "hello"}]),
            Server("data: [DONE]\n\n"),
        )
        assert await self.run(OrderedCalls(Orderer(strict=True)), server, request) == ["data: [DONE]\n\n"]
        assert server.asked[0] is request

    async def test_with_malformed_documents_are_refused(self) -> None:
        request = Request(model="m", messages=[], ragorder={"documents": 3, "query": "?"})
        server = Server()
        with pytest.raises(HTTPError, match="ragorder"):
            await self.run(OrderedCalls(Orderer(strict=True)), server, request)
        assert server.asked == []
