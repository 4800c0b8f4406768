"""A minimal client of chats, and processes of servers and proxies."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from ragorder.benchmarks.common.processes import ServerProcess, server_process

_CHAT = "/v1/chat/completions"
_DOCUMENTS = 5
_DOCUMENT_TOKENS = 200


@contextmanager
def instant_server(*options: str) -> Iterator[ServerProcess]:
    """A server that answers at once; for `options` see `upstream`."""
    module = "ragorder.benchmarks.proxy.upstream"
    with server_process([sys.executable, "-m", module, *options], "stdout", r"http://127.0.0.1:(\d+)") as server:
        yield server


@contextmanager
def proxy_server(upstream: int, *options: str, command: str = "serve") -> Iterator[ServerProcess]:
    """Run this command (`serve` or `route`) with these options, as a proxy of this port."""
    arguments = [command, "--upstream", f"http://127.0.0.1:{upstream}", "--port", "0", *options]
    with server_process([sys.executable, "-m", "ragorder", *arguments], "stderr", r"127.0.0.1:(\d+)/v1") as server:
        yield server


async def post(port: int, body: bytes) -> bytes:
    connection = await _Connection.open(port)
    try:
        return await connection.post(body)
    finally:
        connection.close()


class Connections:
    """Connections to a port, one a request at a time; `in_turn`: that which was free for longest."""

    def __init__(self, port: int, *, in_turn: bool = False) -> None:
        self._port = port
        self._in_turn = in_turn
        self._free: deque[_Connection] = deque()

    async def open(self, count: int) -> None:
        self._free += [await _Connection.open(self._port) for _ in range(count)]

    async def time(self, body: bytes, at: float) -> float:
        """Send a request at that time; returns the seconds to its answer."""
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        take = self._free.popleft if self._in_turn else self._free.pop
        connection = take() if self._free else await _Connection.open(self._port)
        sent = time.perf_counter()
        await connection.post(body)
        took = time.perf_counter() - sent
        self._free.append(connection)
        return took

    def close(self) -> None:
        for connection in self._free:
            connection.close()


class _Connection:
    """A minimal HTTP client: what is measured is not the client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def close(self) -> None:
        self._writer.close()

    async def post(self, body: bytes) -> bytes:
        head = f"POST {_CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().splitlines()
        headers = dict(line.split(b": ", 1) for line in lines if line)
        if b" 200 " not in status:
            raise RuntimeError(f"the server answers with {status.decode()}")
        if b"content-length" in headers:
            return await self._reader.readexactly(int(headers[b"content-length"]))
        chunks = []
        while size := int(await self._reader.readline(), 16):
            chunks.append(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return b"".join(chunks)


def chat_body(rng: random.Random, *, tagged: bool) -> bytes:
    """Five of fifty documents of 200 tokens and a question, tagged or in one message."""
    names = rng.sample(range(50), _DOCUMENTS)
    texts = [random.Random(name).randbytes(_DOCUMENT_TOKENS * 2).hex() for name in names]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer from the documents."}]
    body: dict[str, Any] = {"model": "instant", "messages": messages}
    if tagged:
        documents = [{"id": str(name), "text": text} for name, text in zip(names, texts, strict=True)]
        body["ragorder"] = {"documents": documents, "query": "What do they say?"}
    else:
        messages.append({"role": "user", "content": "\n\n".join([*texts, "What do they say?"])})
    return json.dumps(body).encode()
