"""Engines of Ray Serve's replicas: each in its replica's process, known to the test by a file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from support.fake_engine import FakeEngine, RunningEngine

_OPEN = "gates-open"


@dataclass
class ReplicaProcess(RunningEngine):
    """A replica with a fake engine."""

    name: str
    pid: int
    url: str

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def replicas_in(folder: Path) -> list[ReplicaProcess]:
    """All that have started, those that have ended included."""
    return [ReplicaProcess(**json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]


class FakeReplica:
    """Makes the proxy before a fake engine, a server in a thread, whose gate is open where `folder` says so."""

    def __init__(self, folder: Path, *, capacity_tokens: int = 16_384) -> None:
        self.folder = folder
        self.capacity_tokens = capacity_tokens

    def open_all(self) -> None:
        """The gates of those that run, and of those to come."""
        (self.folder / _OPEN).touch()
        for each in replicas_in(self.folder):
            try:
                each.open()
            except OSError:
                # It was killed.
                continue

    def __call__(self) -> Any:
        from ray import serve

        from ragorder import Orderer
        from ragorder.adapters.proxy import make_app

        url = _serving(self.capacity_tokens, is_open=(self.folder / _OPEN).exists())
        name = serve.get_replica_context().replica_id.unique_id
        path = self.folder / f"{name}.json"
        path.with_suffix(".new").write_text(json.dumps({"name": name, "pid": os.getpid(), "url": url}), "utf-8")
        path.with_suffix(".new").rename(path)
        return make_app(Orderer(capacity_tokens=self.capacity_tokens, block_size=16, strict=True), upstream=url)


class NeverEnding:
    """Makes an application that sends one token and waits; `folder` tells that it was cancelled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            if scope["path"] != "/v1/chat/completions":
                await send({"type": "http.response.start", "status": 404, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": event, "more_body": True})
            try:
                await asyncio.Event().wait()
            finally:
                (self.folder / "cancelled").touch()

        return app


def _serving(capacity_tokens: int, *, is_open: bool) -> str:
    """The URL of a fake engine in a thread of this process."""
    started = threading.Event()
    urls: list[str] = []

    async def run() -> None:
        engine = FakeEngine(1, capacity_tokens)
        if is_open:
            engine.gate.set()
        runner = web.AppRunner(engine.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=[run()], daemon=True).start()
    assert started.wait(60)
    return urls[0]


@contextmanager
def deploying(url: str) -> Iterator[Callable[..., str]]:
    """Runs applications of Ray Serve, whose HTTP server is at `url`; gives their addresses. The end deletes them."""
    from ray import serve

    names: list[str] = []

    def deploy(app: Any) -> str:
        names.append(f"app-{len(names)}-{os.urandom(4).hex()}")
        serve.run(app, name=names[-1], route_prefix=f"/{names[-1]}", logging_config={"log_level": "ERROR"})
        return f"{url}/{names[-1]}"

    try:
        yield deploy
    finally:
        for name in names:
            serve.delete(name)
