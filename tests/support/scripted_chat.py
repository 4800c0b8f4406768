"""A chat server that says what a test tells it to say: streams of events, and all the ways in which they end."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from support.http_server import Handler, LocalServer


def chat(content: str | None = None, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content} | delta, "finish_reason": finish_reason}]}


def usage(prompt_tokens: Any = 100, completion_tokens: Any = 2, **fields: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0}
    return {"choices": [], "usage": counts | fields}


def cached(tokens: Any) -> dict[str, Any]:
    return usage(prompt_tokens_details={"cached_tokens": tokens})


ROLE = chat("", role="assistant")
STOP = chat(None, "stop")


@dataclass
class Response:
    """A stream of events (JSON, or raw lines of bytes), and how it ends.

    done: as it should, "[DONE]" included; eof: without it; cut: in the middle of the body; hold: not until the client
    hangs up; stall: the same, without a sign of life; silent: no response at all; hangup: the connection is closed
    instead of a response.
    """

    events: Sequence[dict[str, Any] | bytes] = ()
    end: str = "done"
    status: int = 200


GOOD = Response([ROLE, chat("Hello"), chat(" world"), STOP, cached(64)])


def error(status: int, message: str = "no", **fields: Any) -> Response:
    return Response([{"error": {"message": message, "type": "x", "param": None, "code": status} | fields}], "", status)


class Scripted(Handler):
    server: Server

    def do_GET(self) -> None:
        self.server.polls += 1
        self.answer(404 if self.server.metrics is None else 200, self.server.metrics or "")

    def do_POST(self) -> None:
        body = self.read_json()
        with self.server.lock:
            self.server.requests.append(body)
            self.server.paths.append(self.path)
            response = self.server.responses.popleft() if self.server.responses else self.server.answer(body)
        self.close_connection = response.end not in ("done", "")
        with suppress(OSError):
            self.play(response)

    def play(self, response: Response) -> None:
        if response.end == "silent":
            self.server.reached.set()
            self.server.closing.wait(60)
        if response.end in ("silent", "hangup"):
            return
        if response.status != 200:
            self.answer(response.status, json.dumps(response.events[0]))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        if response.end != "eof":
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in response.events:
            self.send(event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode(), response.end)
        if response.end == "done":
            self.send(b"data: [DONE]", response.end)
            self.wfile.write(b"0\r\n\r\n")
        elif response.end == "stall":
            self.server.closing.wait(60)
        elif response.end == "hold":
            with self.server.lock:
                self.server.held += 1
            self.server.reached.set()
            with suppress(OSError):
                while not self.server.closing.wait(0.02):
                    self.send(b": ping", response.end)
                return
            with self.server.lock:
                self.server.held -= 1
            self.server.hung_up.set()

    def send(self, line: bytes, end: str) -> None:
        data = line + b"\n\n"
        self.wfile.write(data if end == "eof" else b"%x\r\n%s\r\n" % (len(data), data))


class Server(LocalServer):
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(Scripted)
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.responses: deque[Response] = deque()
        self.answer: Callable[[dict[str, Any]], Response] = lambda body: GOOD
        self.reached, self.hung_up, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.metrics: str | None = None
        self.polls = self.held = 0
        self.url = f"{self.base_url}/v1"

    def plays(self, *responses: Response) -> None:
        self.responses.extend(responses)

    def stop(self) -> None:
        self.closing.set()
        super().stop()
