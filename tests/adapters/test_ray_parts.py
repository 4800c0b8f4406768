"""What the application of Ray Serve is made of, without a cluster: its contract with Ray, requests, answers and their
errors, lifespans."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")

import httpx2
from packaging.requirements import Requirement
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from support.ray_calls import Handle, Items

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.upstream import UpstreamError
from ragorder.adapters.ray import EmbeddedEngine, UnsupportedRayError, application, make_application
from ragorder.adapters.ray.application import AppResponse
from ragorder.adapters.ray.replica import EngineReplica, Lifespan, ReplicaRequest
from ragorder.adapters.ray.transport import ReplicaAnswer, ReplicaLostError, ReplicaTransport
from ragorder.common.degraded import DegradedWarning

ROOT = Path(__file__).resolve().parents[2]
EVENTS = [(b"content-type", b"text/event-stream")]
SECRET = "what the prompt says"  # noqa: S105


class TestTheContract:
    def test_ray_has_all_that_is_used(self) -> None:
        assert application.missing_parts() == []

    def test_its_range_is_that_of_the_extra(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        (wanted,) = (each for each in map(Requirement, extras["ray"]) if each.name == "ray")
        assert wanted.specifier.contains(ray.__version__)
        assert wanted.specifier.contains(f"{application.SUPPORTED_RAY}.0")
        major, minor = application.SUPPORTED_RAY.split(".")
        assert not wanted.specifier.contains(f"{major}.{int(minor) + 1}.0")

    def test_another_version_is_warned_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "__version__", "2.99.1")
        with pytest.warns(DegradedWarning, match=re.escape("Ray 2.99.1 is installed")):
            application.check_ray()

    @pytest.mark.parametrize(
        ("changed", "parameters"),
        [
            ("ray.serve.handle:DeploymentHandle.no_such_method", ()),
            ("ray.serve.no_such_module:Name", ()),
            (
                "ray.serve.request_router:RequestRouter.choose_replicas",
                ("candidate_replicas", "no_such_parameter"),
            ),
        ],
    )
    def test_a_missing_part_or_parameter_is_an_error_that_names_it(
        self, monkeypatch: pytest.MonkeyPatch, changed: str, parameters: tuple[str, ...]
    ) -> None:
        monkeypatch.setitem(application.CONTRACT, changed, parameters)
        with pytest.raises(UnsupportedRayError, match=rf"{re.escape(changed)}.*pip install '\.\[ray\]'"):
            make_application(EmbeddedEngine("/models/none"))


class TestTheApplication:
    def test_has_a_request_router_of_its_own(self) -> None:
        with pytest.raises(ValueError, match="leave request_router_config out"):
            make_application(EmbeddedEngine("/models/none"), replicas={"request_router_config": None})

    async def test_sees_requests_below_its_prefix(self) -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope["path"], scope["raw_path"], scope["root_path"]))

        async def nothing(*_: Any) -> Any: ...

        for prefix, path in [("", "/v1/models"), ("/rag", "/rag/v1/models"), ("/rag", "/v1/models")]:
            scope = {"type": "http", "root_path": prefix, "path": path, "raw_path": path.encode()}
            await AppResponse(app)(scope, nothing, nothing)
        assert seen == [("/v1/models", b"/v1/models", "")] * 3


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
            (None, UpstreamError, 502, "upstream_unavailable"),
        ],
    )
    async def test_that_does_not_begin_is_an_error_without_content(
        self, error: Exception | None, kind: type[HTTPError], status: int, code: str
    ) -> None:
        with pytest.raises(HTTPError) as raised:
            await ReplicaAnswer(Items(error)).begin()  # type: ignore[arg-type]
        assert type(raised.value) is kind
        assert (raised.value.status, raised.value.code) == (status, code)
        assert SECRET not in json.dumps(raised.value.content)
        assert bool(raised.value.headers) is (status == 503), "those can be sent again"

    async def test_that_takes_too_long_or_that_nobody_reads_is_cancelled(self) -> None:
        items = Items("wait")
        with pytest.raises(UpstreamError) as raised:
            await ReplicaAnswer(items, 0.01).begin()  # type: ignore[arg-type]
        assert (raised.value.status, raised.value.code) == (504, "upstream_timeout")
        unread = Items((200, EVENTS), b"data: 1\n\n", b"data: 2\n\n")
        response = await ReplicaAnswer(unread).begin()  # type: ignore[arg-type]
        await response.aclose()
        assert items.cancelled and unread.cancelled

    @pytest.mark.parametrize(
        ("headers", "last", "says"),
        [(EVENTS, b"data: 1\n\n", True), (EVENTS, b"data: 1", False), ([], b"{}\n\n", False)],
    )
    async def test_cut_off_between_events_says_so(self, headers: Any, last: bytes, says: bool) -> None:
        response = await ReplicaAnswer(Items((200, headers), last, ActorDiedError())).begin()  # type: ignore[arg-type]
        chunks = []
        with pytest.raises(ReplicaLostError):
            async for chunk in response.aiter_raw():
                chunks.append(chunk)  # noqa: PERF401
        assert chunks[0] == last
        assert [json.loads(chunk[6:])["error"]["code"] for chunk in chunks[1:]] == ["upstream_unavailable"] * says


class TestTheTransport:
    OK = ((200, []), b"ok")

    async def send(
        self,
        handle: Handle,
        method: str = "POST",
        target: str = "/v1/chat/completions",
        kind: str = "application/json",
        session: str | None = "topic",
    ) -> tuple[int, bytes]:
        headers = {"content-type": kind, "connection": "close"}
        headers |= {} if session is None else {"x-session-id": session}
        request = httpx2.Request(method, f"http://replicas{target}", headers=headers, content=b"{}")
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

    @pytest.mark.parametrize("session", [None, ""])
    async def test_needs_no_session(self, session: str | None) -> None:
        handle = Handle(Items(*self.OK))
        assert await self.send(handle, session=session) == (200, b"ok")
        assert handle.calls[0][0] is None

    @pytest.mark.parametrize(
        ("method", "target", "kind", "calls"),
        [
            ("POST", "/v1/chat/completions", "application/json", 2),
            ("POST", "/v1/embeddings?x=1", "application/json; charset=utf-8", 2),
            ("POST", "/v1/audio/transcriptions", "multipart/form-data", 1),
            ("POST", "/reset", "application/json", 1),
            ("DELETE", "/v1/files/3", "application/json", 1),
            ("GET", "/v1/models", "", 2),
        ],
    )
    async def test_never_repeats_what_may_have_an_effect(self, method: str, target: str, kind: str, calls: int) -> None:
        handle = Handle(Items(ActorDiedError()), Items(*self.OK))
        if calls == 2:
            assert await self.send(handle, method, target, kind) == (200, b"ok")
        else:
            with pytest.raises(ReplicaLostError):
                await self.send(handle, method, target, kind)
        assert len(handle.calls) == calls


# Ray awaits it.
@pytest.mark.filterwarnings("ignore:coroutine 'EngineReplica.__del__' was never awaited")
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
    @pytest.mark.parametrize("cancelled", [False, True])
    async def test_begins_and_ends_once_also_if_the_first_request_is_cancelled(self, cancelled: bool) -> None:
        said = []
        may_start = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert scope["type"] == "lifespan"
            for _ in range(2):
                said.append((await receive())["type"])
                await may_start.wait()
                await send({"type": f"{said[-1]}.complete"})

        lifespan = Lifespan(app)
        if cancelled:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await lifespan.begin()
        may_start.set()
        await asyncio.gather(*(lifespan.begin() for _ in range(3)))
        assert said == ["lifespan.startup"]
        for _ in range(2):
            await lifespan.end()
        assert said == ["lifespan.startup", "lifespan.shutdown"]

    async def test_is_not_needed_and_one_that_cannot_begin_is_an_error(self) -> None:
        async def without(scope: Any, receive: Any, send: Any) -> None:
            raise NotImplementedError

        async def failing(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no"})

        lifespan = Lifespan(without)
        await lifespan.begin()
        await lifespan.end()
        with pytest.raises(RuntimeError, match="cannot start"):
            await Lifespan(failing).begin()
