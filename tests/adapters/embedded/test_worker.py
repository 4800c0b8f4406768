"""The embedded engine's thread, its application without a network, and both with the proxy."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from typing import Any

import httpx2
import pytest
from support.embedded_app import COMPLETIONS, WORD, Load, complete, fails_in_a_stream, reaching, refusal
from support.inside import memory_of
from support.waiting import eventually

from ragorder import Orderer
from ragorder.adapters.embedded import AppTransport, EngineStoppedError, EngineWorker, hosted, make_engine_app
from ragorder.adapters.proxy import Timeouts, make_app
from ragorder.kernels.engine import Request, Sampling, TieredEngine

pytestmark = pytest.mark.merge


def slowly(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Let each step take long."""
    step = worker.engine.step

    def slow_step() -> Any:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(worker.engine, "step", slow_step)


def proxy_to(worker: EngineWorker, **options: Any) -> Any:
    engine = make_engine_app(worker)
    options |= {"make_transport": lambda: AppTransport(engine), "tokenizer": deepcopy(worker.engine.tokenizer)}
    return make_app(Orderer(block_size=16), upstream="http://embedded", send_facts=True, **options)


LONG = Request([5, 6, 7], sampling=Sampling(max_tokens=1000, ignore_eos=True))
SHORT = Request([5, 6, 7], sampling=Sampling(max_tokens=2, ignore_eos=True))


class TestWorker:
    async def test_the_event_loop_goes_on_during_a_step(
        self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slowly(worker, monkeypatch, 0.3)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with worker.submit([SHORT]) as updates:
            steps = [update async for _, update in updates]
        ticking.cancel()
        assert ticks > 3 * len(steps)

    async def test_a_request_cancelled_before_it_is_accepted_is_never_computed(
        self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepping, go_on, added = threading.Event(), threading.Event(), []
        step, add = worker.engine.step, worker.engine.add

        def wait_and_step() -> Any:
            stepping.set()
            go_on.wait(60)
            return step()

        def note_and_add(request: Request) -> int:
            added.append(request)
            return add(request)

        monkeypatch.setattr(worker.engine, "step", wait_and_step)
        monkeypatch.setattr(worker.engine, "add", note_and_add)
        async with worker.submit([LONG]) as updates:
            assert await asyncio.to_thread(stepping.wait, 60)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), worker.submit([SHORT]):
                    pass
            go_on.set()
            await anext(updates)
            await anext(updates)
        assert added == [LONG]

    async def test_too_many_prompts_get_a_400_and_too_many_requests_a_503_until_others_end(self, load: Load) -> None:
        worker = load(max_unfinished=3)
        async with reaching(make_engine_app(worker)) as client:
            for prompt in (["a"] * 4, [[1, 2]] * 1024):
                error = await refusal(client, COMPLETIONS, {"prompt": prompt})
                assert (error["code"], error["param"]) == ("invalid_prompt", "prompt")
                assert f"{len(prompt):,} prompts in one request exceed the 3" in error["message"]
                assert "--max-requests" in error["message"]
            async with worker.submit([LONG, LONG]):
                response = await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
                assert await complete(client)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "too_many_waiting")
            assert response.headers["retry-after"] == "1"
            assert len((await complete(client, ["a", "b", "c"]))["choices"]) == 3

    async def test_a_request_that_memory_is_too_short_for_now_gets_a_503(
        self, load: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = load()
        monkeypatch.setattr(memory_of(worker.engine), "hold", lambda tokens: False)
        monkeypatch.setattr(TieredEngine, "device_tokens", 1)
        async with reaching(make_engine_app(worker)) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "short_of_memory")
        assert "not enough KV memory now" in error["message"]
        assert response.headers["retry-after"] == "1"

    async def test_a_failed_engine_fails_all_and_says_so(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = load()

        def fail() -> Any:
            raise RuntimeError(f"out of {WORD}")

        def break_steps() -> None:
            monkeypatch.setattr(worker.engine, "step", fail)

        slowly(worker, monkeypatch)
        async with reaching(make_engine_app(worker)) as client, reaching(hosted(proxy_to(worker), worker)) as proxied:
            assert (await client.get("/health")).status_code == 200
            async with worker.submit([LONG]) as updates:
                failed = await fails_in_a_stream(client, {"prompt": "a", "max_tokens": 1000}, break_steps)
                with pytest.raises(EngineStoppedError):
                    async for _ in updates:
                        pass
            for each in (client, proxied):
                error = await refusal(each, COMPLETIONS, {"prompt": "a"}, status=503)
                assert error["code"] == failed["code"] == "engine_stopped"
                assert "RuntimeError" in error["message"] and "start the server again" in error["message"]
            for each, path in ((client, "/health"), (proxied, "/health"), (proxied, "/ragorder/health")):
                health = await each.get(path)
                assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stopped")
            assert "ragorder_engine_up 0.0" in (await client.get("/metrics")).text
        assert "RuntimeError" in caplog.text
        assert WORD not in error["message"] + caplog.text

    async def test_a_failed_step_fails_its_requests_alone(
        self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> Any:
            raise ValueError(WORD)

        def break_steps() -> None:
            patch.setattr("ragorder.kernels.models.batch.Forward.__call__", fail)

        async with reaching(make_engine_app(worker)) as client:
            with monkeypatch.context() as patch:
                break_steps()
                error = await refusal(client, COMPLETIONS, {"prompt": "a"}, status=500)
            assert error["code"] == "engine_error"
            assert await complete(client)
            with monkeypatch.context() as patch:
                assert await fails_in_a_stream(client, {"prompt": "a", "max_tokens": 1000}, break_steps) == error
            assert await complete(client)
        assert WORD not in error["message"] + caplog.text

    @pytest.mark.parametrize("bound", ["request", "server"])
    async def test_a_request_past_its_deadline_gets_a_504(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, bound: str
    ) -> None:
        worker = load(deadline_s=30.5 if bound == "server" else 90.0)
        steps = itertools.count()
        clock, step = [0.0], worker.engine.step

        def takes_a_second() -> Any:
            clock[0] = float(next(steps))
            return step()

        monkeypatch.setattr("ragorder.kernels.engine.sequence.perf_counter", lambda: clock[0])
        monkeypatch.setattr(worker.engine, "step", takes_a_second)
        own = 30.5 if bound == "request" else 90.0
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "deadline_s": own}
        async with reaching(make_engine_app(worker)) as client:
            error = await refusal(client, COMPLETIONS, body, status=504)
            assert (error["code"], error["param"], error["type"]) == ("deadline_exceeded", "deadline_s", "server_error")
            assert "deadline of 30.5 s has passed" in error["message"]
            assert (await fails_in_a_stream(client, body))["code"] == error["code"]
            assert 'ragorder_engine_requests_total{end="timeout"} 2.0' in (await client.get("/metrics")).text
            assert not worker.engine.has_unfinished

    async def test_requests_after_the_end_are_refused(self, load: Load) -> None:
        worker = load()
        async with worker.submit([LONG]) as updates:
            await anext(updates)
            await asyncio.to_thread(worker.close)
            with pytest.raises(EngineStoppedError):
                async for _ in updates:
                    pass
        with pytest.raises(EngineStoppedError):
            async with worker.submit([SHORT]):
                pass
        worker.close()
        assert worker.stats().running == 0

    def test_an_event_loop_that_has_ended_is_left_alone(self, load: Load) -> None:
        worker = load()

        async def leave() -> None:
            submission = worker.submit([LONG])
            await anext(await submission.__aenter__())

        with suppress(RuntimeError):
            asyncio.run(leave())

        async def ask() -> int:
            async with worker.submit([SHORT]) as updates:
                return len([update async for _, update in updates])

        assert asyncio.run(ask()) == 2


class TestTransport:
    @asynccontextmanager
    async def exchange(self, app: Any, **options: Any) -> AsyncIterator[httpx2.Response]:
        options = {"timeout": 10} | options
        async with (
            httpx2.AsyncClient(transport=AppTransport(app), base_url="http://x", **options) as client,
            client.stream("POST", "/a%20b?c=d", content=b"body", headers={"X-Y": "z"}) as response,
        ):
            yield response

    async def begin(self, send: Any, *pieces: bytes, status: int = 200) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def test_brings_the_request_and_pieces_as_they_come(self) -> None:
        seen, go_on = [], asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body = b""
            while (message := await receive()).get("more_body"):
                body += message["body"]
            seen.append((scope["method"], scope["path"], scope["raw_path"], scope["query_string"], body))
            assert (b"x-y", b"z") in scope["headers"]
            await self.begin(send, b"one", status=207)
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"two"})

        async with self.exchange(app) as response:
            assert (response.status_code, response.headers["a"]) == (207, "b")
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"one"
            go_on.set()
            assert [piece async for piece in pieces] == [b"two"]
        assert seen == [("POST", "/a b", b"/a%20b", b"c=d", b"body")]

    async def test_an_application_waits_for_a_slow_reader(self) -> None:
        sent = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await self.begin(send)
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                sent += 1
            await send({"type": "http.response.body"})

        async with self.exchange(app) as response:
            await asyncio.sleep(0.05)
            assert sent < 100
            assert len(await response.aread()) == 1000

    async def test_leaving_before_the_answer_cancels_the_application(self) -> None:
        cancelled = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), self.exchange(app):
                pass
        assert cancelled.is_set()

    @pytest.mark.parametrize("begun", [False, True])
    @pytest.mark.parametrize("raises", [False, True])
    async def test_an_application_that_gives_up_is_a_broken_connection(self, begun: bool, raises: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if begun:
                await self.begin(send, b"x")
            if raises:
                raise RuntimeError(WORD)

        with pytest.raises(httpx2.RemoteProtocolError):
            async with self.exchange(app) as response:
                await response.aread()


class TestThroughTheProxy:
    """The same through the proxy, as `ragorder serve` puts them together."""

    async def test_probes_are_answered_without_a_key(self, worker: EngineWorker) -> None:
        async with reaching(hosted(proxy_to(worker, api_key="key"), worker)) as client:
            for path in ("/health", "/ragorder/health"):
                assert (await client.get(path)).status_code == 200
            for path in ("/v1/models", "/tokenize"):
                assert (await client.get(path)).status_code == 401
            assert (await client.get("/v1/models", headers={"authorization": "Bearer key"})).status_code == 200

    async def test_a_slow_engine_is_a_timeout(self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        slowly(worker, monkeypatch, 0.5)
        async with reaching(proxy_to(worker, timeouts=Timeouts(read_s=0.1))) as client:
            body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
            assert (await refusal(client, COMPLETIONS, body, status=504))["code"] == "upstream_timeout"
        assert await asyncio.to_thread(eventually, lambda: not worker.engine.has_unfinished)

    async def test_it_runs_while_the_proxy_does_and_ends_after_it(self, load: Load) -> None:
        worker = load()
        seen: list[str] = []
        messages = iter(["lifespan.startup", "lifespan.shutdown"])

        async def background() -> None:
            seen.append("background")
            try:
                await asyncio.sleep(60)
            finally:
                assert worker.failure is None
                seen.append("background ended")

        async def close() -> None:
            assert worker.failure is None
            seen.append("close")

        async def receive() -> Any:
            await asyncio.sleep(0.01)
            return {"type": next(messages)}

        async def send(message: Any) -> None:
            seen.append(message["type"])
            assert (worker.failure is None) == (message["type"] == "lifespan.startup.complete")

        proxy = proxy_to(worker, background=[background])
        await hosted(proxy, worker, close)({"type": "lifespan"}, receive, send)
        started, *ended = ["lifespan.startup.complete", "background ended", "close", "lifespan.shutdown.complete"]
        assert set(seen[:2]) == {started, "background"} and seen[2:] == ended
