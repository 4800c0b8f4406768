"""A server that answers at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any

import click

Message = MutableMapping[str, Any]
ENDLESS = "/v1/endless"
_PIECE = bytes(1 << 16)
_OTHER_FILES = 64


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
    """An ASGI application; the path `ENDLESS` has an answer without end.

    A body with "stream" is answered by "max_tokens" events for its "user", "pause" s apart. With "together" (a name, a
    number) the second event waits until that number of streams of this name has begun.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if scope["path"] == ENDLESS:
        await _answer_without_end(receive, send)
        return
    # Of the large bodies of an attack none is parsed.
    request = json.loads(body) if b'"stream"' in body else {}
    if not request.get("stream"):
        content = answer()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for number, event in enumerate(answer_events(request["user"], request["max_tokens"])):
        await send({"type": "http.response.body", "body": event, "more_body": True})
        if number == 0 and "together" in request:
            await _meet(*request["together"])
        await asyncio.sleep(request["pause"])
    await send({"type": "http.response.body", "body": b""})


async def _answer_without_end(
    receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    gone = asyncio.ensure_future(receive())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not gone.done():
        await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
        await asyncio.sleep(0)


class _Meeting:
    def __init__(self) -> None:
        self.begun = 0
        self.complete = asyncio.Event()


_meetings: defaultdict[str, _Meeting] = defaultdict(_Meeting)


async def _meet(name: str, count: int) -> None:
    meeting = _meetings[name]
    meeting.begun += 1
    if meeting.begun >= count:
        meeting.complete.set()
    await meeting.complete.wait()


def allow_many_connections(count: int = 0) -> None:
    """Allow all open files that the system does. Raises OSError if `count` connections need more."""
    try:
        import resource
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # The proxy has a second one for each.
    needed = 2 * count + _OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise OSError(
            f"{count:,} connections need {needed:,} open files, and the system allows {allowed:,}: ulimit -Hn"
        )


@click.command()
@click.option("--inside", is_flag=True, help="Order documents in the server itself.")
def main(inside: bool) -> None:
    """Run a server that answers at once."""
    from uvicorn import Config, Server

    app: Any = instant_upstream
    if inside:
        from ragorder.adapters.vllm import OrderDocuments

        app = OrderDocuments(app, capacity_tokens=262_144, block_size=16)
    allow_many_connections()
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    # asyncio sets it for sockets of its own only.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    click.echo(f"http://127.0.0.1:{listening.getsockname()[1]}")
    config = Config(
        app,
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
