"""A server with OpenAI's API that takes a time for each token, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import click

_PLAN = "Which was opened first?\nWhich was closed last?\nWho has the key?"


@contextmanager
def far_end(tokens: int, token_s: float) -> Iterator[str]:
    """Run one whose answers have `tokens` words, and plans three lines. Its URL."""
    command = [sys.executable, "-m", __spec__.name, str(tokens), str(token_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.terminate()


def _words(messages: Sequence[dict[str, Any]], tokens: int) -> list[str]:
    asked = str(messages[-1]["content"])
    if asked.startswith("Split the question"):
        return [word + " " for word in _PLAN.replace("\n", " \n").split(" ")]
    return [f"w{crc32(f'{number} {asked}'.encode()) % 1000} " for number in range(tokens)]


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    event = {"id": "chatcmpl-far-end", "object": "chat.completion.chunk", "created": 1, "model": "served"}
    data = b"data: " + json.dumps(event | {"choices": choices} | more).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _answer(body: dict[str, Any], writer: asyncio.StreamWriter, tokens: int, token_s: float) -> None:
    words = _words(body["messages"], tokens)
    length = sum(len(str(message["content"])) for message in body["messages"]) // 4
    usage = {"prompt_tokens": length, "completion_tokens": len(words), "total_tokens": length + len(words)}
    if not body.get("stream"):
        await asyncio.sleep(token_s * len(words))
        message = {"role": "assistant", "content": "".join(words)}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        common = {"id": "chatcmpl-far-end", "object": "chat.completion", "created": 1, "model": "served"}
        content = json.dumps(common | {"choices": choices, "usage": usage}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(content) + content)
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for word in words:
        await asyncio.sleep(token_s)
        writer.write(_event([{"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None}]))
    writer.write(_event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]))
    writer.write(_event([], usage=usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def _serve(tokens: int, token_s: float) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n") if b":" in line)
                body = json.loads(await reader.readexactly(int(fields[b"content-length"])))
                await _answer(body, writer, tokens, token_s)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    click.echo(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
