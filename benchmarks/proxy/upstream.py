"""A server that answers at once, or a word at a time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any
from zlib import crc32

import click

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ENDLESS = "/v1/endless"
_PIECE = bytes(1 << 16)
_OTHER_FILES = 64
_PLAN = "Which was opened first? \nWhich was closed last? \nWho has the key?"


def answer(prompt_tokens: int = 1) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    return json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], "usage": usage}).encode()


def answer_events(name: str, count: int) -> Iterator[bytes]:
    for number in range(count):
        event = {"choices": [{"delta": {"content": f"{name}:{number} "}, "finish_reason": None}]}
        yield b"data: %s\n\n" % json.dumps(event).encode()
    yield b"data: [DONE]\n\n"


async def instant_upstream(scope: Message, receive: Receive, send: Send) -> None:
    """An ASGI application; the path `ENDLESS` has an answer without end.

    A body with "stream" is answered by "max_tokens" events for its "user", "pause" s apart. With "together" (a name, a
    number) the second event waits until that number of streams of this name has begun.
    """
    body = await _body(receive)
    if scope["path"] == ENDLESS:
        await _answer_without_end(receive, send)
        return
    # Of the large bodies of an attack none is parsed.
    request = json.loads(body) if b'"stream"' in body else {}
    if not request.get("stream"):
        await _send_json(send, answer())
        return
    await _begin_events(send)
    for number, event in enumerate(answer_events(request["user"], request["max_tokens"])):
        await send({"type": "http.response.body", "body": event, "more_body": True})
        if number == 0 and "together" in request:
            await _meet(*request["together"])
        await asyncio.sleep(request["pause"])
    await send({"type": "http.response.body", "body": b""})


def slow_upstream(words: int, word_s: float) -> Any:
    """Return an ASGI application: answers have `words`, and each takes `word_s`; plans have three lines."""

    async def upstream(scope: Message, receive: Receive, send: Send) -> None:
        request = json.loads(await _body(receive))
        asked = str(request["messages"][-1]["content"])
        said = [f"w{crc32(f'{number} {asked}'.encode()) % 1000} " for number in range(words)]
        if asked.startswith("Split the question"):
            said = [f"{word} " for word in _PLAN.split(" ")]
        length = sum(len(str(message["content"])) for message in request["messages"]) // 4
        usage = {"prompt_tokens": length, "completion_tokens": len(said), "total_tokens": length + len(said)}
        common = {"id": "chatcmpl-slow", "created": 1, "model": "served"}
        if not request.get("stream"):
            await asyncio.sleep(word_s * len(said))
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(said)}, "finish_reason": "stop"}
            answered = common | {"object": "chat.completion", "choices": [choice], "usage": usage}
            await _send_json(send, json.dumps(answered).encode())
            return
        await _begin_events(send)

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            data = json.dumps(common | {"object": "chat.completion.chunk", "choices": choices} | more).encode()
            await send({"type": "http.response.body", "body": b"data: %s\n\n" % data, "more_body": True})

        for word in said:
            await asyncio.sleep(word_s)
            await event([{"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None}])
        await event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}])
        await event([], usage=usage)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return upstream


async def _body(receive: Receive) -> bytearray:
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _send_json(send: Send, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _begin_events(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})


async def _answer_without_end(receive: Receive, send: Send) -> None:
    gone = asyncio.ensure_future(receive())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not gone.done():
        await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
        await asyncio.sleep(0)


_meetings: defaultdict[str, list[asyncio.Event]] = defaultdict(list)


async def _meet(name: str, count: int) -> None:
    """Wait until `count` have come."""
    came = asyncio.Event()
    _meetings[name].append(came)
    if len(_meetings[name]) >= count:
        for each in _meetings[name]:
            each.set()
    await came.wait()


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
@click.option("--words", type=int, help="Words of an answer.")
@click.option("--word-s", type=float, default=0.0, help="Seconds that each takes.")
def main(inside: bool, words: int | None, word_s: float) -> None:
    """Run a server that answers at once, or a word at a time."""
    from uvicorn import Config, Server

    app: Any = instant_upstream if words is None else slow_upstream(words, word_s)
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
