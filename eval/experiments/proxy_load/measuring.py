"""Cost of the proxy: added latency, and many concurrent streams.

`python -m ragorder.eval.proxy_load --rate 50 --seconds 20 --streams 1000` starts a server that answers at once and the
proxy in front of it, each in a process of its own, and asks both the same, in turn.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

import click

from ragorder.eval.experiments.proxy_load.upstream import answer_events

__all__ = ["Latencies", "main", "measure_latency", "post", "run_streams", "servers"]

_CHAT = "/v1/chat/completions"
_DOCUMENTS = 5
_DOCUMENT_TOKENS = 200
_STARTED_S = 60.0
_KINDS = ("tagged", "untagged")


@dataclass(slots=True)
class Latencies:
    """Pairs of latencies, in ms: of a request sent to the server itself and, half a period away, to the proxy."""

    direct: list[float] = field(default_factory=list)
    proxied: list[float] = field(default_factory=list)

    @property
    def added(self) -> list[float]:
        """What the proxy added to each pair."""
        return [proxied - direct for direct, proxied in zip(self.direct, self.proxied, strict=True)]


@contextmanager
def servers(*options: str) -> Iterator[tuple[int, int]]:
    """The ports of an instant upstream and of `ragorder serve` in front of it, with these options."""
    module = "ragorder.eval.experiments.proxy_load.upstream"
    with _process([sys.executable, "-m", module], "stdout", r"http://127.0.0.1:(\d+)") as upstream:
        code = "from ragorder.cli.serve import serve; serve()"
        serve = ["--upstream", f"http://127.0.0.1:{upstream}", "--port", "0"]
        serve += ["--capacity-tokens", "262144", "--block-size", "16", *options]
        with _process([sys.executable, "-c", code, *serve], "stderr", r"127.0.0.1:(\d+)/v1") as proxy:
            yield upstream, proxy


async def measure_latency(upstream: int, proxy: int, rate: float, seconds: float) -> dict[str, Latencies]:
    """Send `rate` requests a second through the proxy, tagged and untagged ones by turns, and as many past it."""
    rng = random.Random(0)
    measured = {kind: Latencies() for kind in _KINDS}
    clients = _Clients(upstream), _Clients(proxy)
    pairs = []
    start = time.perf_counter() + 0.1
    for number in range(max(len(_KINDS), round(rate * seconds))):
        kind = _KINDS[number % len(_KINDS)]
        body = _body(rng, tagged=kind == "tagged")
        # Who is first takes turns.
        times = [start + (number + half) / rate for half in ((0.0, 0.5) if number // 2 % 2 else (0.5, 0.0))]
        tasks = [asyncio.create_task(client.time(body, at)) for client, at in zip(clients, times, strict=True)]
        pairs.append((kind, tasks))
    for kind, tasks in pairs:
        direct, proxied = [await task for task in tasks]
        measured[kind].direct.append(direct * 1000)
        measured[kind].proxied.append(proxied * 1000)
    for client in clients:
        client.close()
    return measured


async def run_streams(port: int, streams: int, events: int = 20, pause_s: float = 0.25) -> list[bool]:
    """Hold so many streams at a time, each with its own content; whether each had exactly that, byte for byte."""

    async def one(number: int) -> bool:
        name = f"client-{number}"
        body = json.dumps({"stream": True, "user": name, "max_tokens": events, "pause": pause_s}).encode()
        return await post(port, body) == b"".join(answer_events(name, events))

    return list(await asyncio.gather(*map(one, range(streams))))


async def post(port: int, body: bytes) -> bytes:
    """The answer to one request, on a connection of its own."""
    connection = await _Connection.open(port)
    try:
        return await connection.post(body)
    finally:
        connection.close()


class _Clients:
    """Connections to one port; a request takes one that is free, or a new one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[_Connection] = []

    async def time(self, body: bytes, at: float) -> float:
        """Send a request at a time, and say how long its answer took, in seconds."""
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        connection = self._free.pop() if self._free else await _Connection.open(self._port)
        sent = time.perf_counter()
        await connection.post(body)
        took = time.perf_counter() - sent
        self._free.append(connection)
        return took

    def close(self) -> None:
        for connection in self._free:
            connection.close()


class _Connection:
    """The least that is an HTTP client, so that what is measured is not the client."""

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


def _body(rng: random.Random, *, tagged: bool) -> bytes:
    """A request with five documents out of fifty, as a field or as a message."""
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


@contextmanager
def _process(command: Sequence[str], stream: str, address: str) -> Iterator[int]:
    """A process, once it has said on which port it serves."""
    pipes = {stream: subprocess.PIPE}
    process = subprocess.Popen(  # type: ignore[call-overload]  # noqa: S603
        command, text=True, stdin=subprocess.DEVNULL, **pipes
    )
    said: IO[str] = getattr(process, stream)
    try:
        port = _port(said, address)
        # An unread pipe would block the process in the end.
        threading.Thread(target=said.read, daemon=True).start()
        yield port
    finally:
        process.terminate()
        try:
            process.wait(_STARTED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(said: IO[str], address: str) -> int:
    lines = []
    for line in said:
        if found := re.search(address, line):
            return int(found[1])
        lines.append(line)
    raise RuntimeError(f"a server did not start: {''.join(lines)}")


@click.command()
@click.option("--rate", type=click.FloatRange(min=1), default=50.0, show_default=True, help="Requests a second.")
@click.option("--seconds", type=click.FloatRange(min=0), default=20.0, show_default=True, help="How long to send them.")
@click.option(
    "--streams", type=click.IntRange(min=0), default=1000, show_default=True, help="Streams to hold at a time."
)
@click.option("--events", type=click.IntRange(min=1), default=20, show_default=True, help="Events of a stream.")
@click.option("--pause", type=click.FloatRange(min=0), default=0.25, show_default=True, help="Seconds between them.")
def main(rate: float, seconds: float, streams: int, events: int, pause: float) -> None:
    """Measure what `ragorder serve` adds to the latency of a server that answers at once; hold streams through it."""
    from rich.console import Console
    from rich.table import Table

    from ragorder.eval.data.machine import describe_environment
    from ragorder.eval.running.measures import percentile

    _allow_many_connections()
    console = Console()
    with servers() as (upstream, proxy):
        if seconds:
            measured = asyncio.run(measure_latency(upstream, proxy, rate, seconds))
            table = Table(title=f"{rate:g} requests/s for {seconds:g} s: latency in ms, p50 / p99")
            for heading in ("requests", "number", "direct", "proxied", "added"):
                table.add_column(heading, justify="left" if heading == "requests" else "right")
            for kind, pairs in measured.items():
                columns = (pairs.direct, pairs.proxied, pairs.added)
                cells = [" / ".join(f"{percentile(column, q):.2f}" for q in (50, 99)) for column in columns]
                table.add_row(kind, str(len(pairs.direct)), *cells)
            console.print(table)
        if streams:
            for name, port in (("direct", upstream), ("proxied", proxy)):
                began = time.perf_counter()
                whole = asyncio.run(run_streams(port, streams, events, pause))
                took = time.perf_counter() - began
                console.print(f"{name}: {sum(whole):,} of {streams:,} streams whole, {took:.1f} s")
    console.print_json(json.dumps(describe_environment()))


def _allow_many_connections() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
