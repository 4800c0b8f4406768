"""An OpenAI-compatible server that answers at once; run as a module, it prints the port that it serves on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import click

__all__ = ["answer", "answer_events", "instant_upstream", "main"]

Message = MutableMapping[str, Any]


def answer(prompt_tokens: int = 1) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    return json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], "usage": usage}).encode()


def answer_events(name: str, count: int) -> Iterator[bytes]:
    for number in range(count):
        event = {"choices": [{"delta": {"content": f"{name}:{number} "}, "finish_reason": None}]}
        yield b"data: %s\n\n" % json.dumps(event).encode()
    yield b"data: [DONE]\n\n"


async def instant_upstream(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """An ASGI application. A body with "stream" is answered by "max_tokens" events for its "user", "pause" s apart."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    request = json.loads(body) if body else {}
    if not request.get("stream"):
        content = answer()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for event in answer_events(request["user"], request["max_tokens"]):
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(request["pause"])
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    from uvicorn import Config, Server

    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    # asyncio sets it for sockets of its own only.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    click.echo(f"http://127.0.0.1:{listening.getsockname()[1]}")
    config = Config(
        instant_upstream,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        backlog=4096,
        timeout_keep_alive=3600,
    )
    Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
