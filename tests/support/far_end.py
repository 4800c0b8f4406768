"""A far end of proxies: an application that answers what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Chunk = bytes | float | threading.Event | None


@dataclass
class Request:
    """A request as the far end got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each == name]


@dataclass
class Answer:
    """Its head comes with its first bytes. A number among the chunks is a pause, an event is waited for, and None
    breaks the connection."""

    chunks: Iterable[Chunk]
    status: int = 200
    headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),)


def answer_json(content: Any, status: int = 200, **headers: str) -> Answer:
    """An answer in one piece, as its length says."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    given = [(name.replace("_", "-"), value) for name, value in headers.items()]
    head = [("content-type", "application/json"), ("content-length", str(len(body))), *given]
    return Answer([body], status, head)


def answer_events(*chunks: Chunk) -> Answer:
    """Server-sent events."""
    return Answer(chunks, headers=[("content-type", "text/event-stream; charset=utf-8")])


WHOLE = {"choices": [{"message": {"content": "yes"}}]}


@dataclass
class FarEnd:
    """`reached` is set by a request's head, `begun` by its whole body, `left` by a client that leaves first; `received`
    is as much of the body as came."""

    answer: Answer = field(default_factory=lambda: answer_json(WHOLE))
    requests: list[Request] = field(default_factory=list)
    received: bytes = b""
    reached: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def play(self, request: Request) -> Answer:
        """Return the answer to this request: by default the same to each."""
        return self.answer

    @property
    def last(self) -> Request:
        return self.requests[-1]

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.requests if each.method == "POST"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        self.reached.set()
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            self.received = body = body + message.get("body", b"")
            more = message.get("more_body", False)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self.requests.append(Request(scope["method"], target.decode(), headers, body))
        # A test may drop what was kept.
        body = message = None
        self.begun.set()
        watching = asyncio.create_task(self._watch(receive))
        answer = asyncio.create_task(self._answer(send, self.play(self.last)))
        await asyncio.wait([watching, answer], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        answer.cancel()

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    async def _answer(self, send: Any, answer: Answer) -> None:
        head = {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in answer.headers],
        }
        begun = False
        for chunk in answer.chunks:
            if chunk is None:
                return
            if isinstance(chunk, bytes):
                if not begun:
                    await send(head)
                begun = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                # A server does not wait for a client that left.
                await asyncio.sleep(0)
            elif isinstance(chunk, threading.Event):
                while not chunk.is_set():
                    await asyncio.sleep(0.005)
            else:
                await asyncio.sleep(chunk)
        await send({"type": "http.response.body", "body": b""})
