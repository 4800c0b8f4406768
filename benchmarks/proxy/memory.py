"""The peak memory of `ragorder serve` under attack."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from statistics import median
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field

from ragorder.benchmarks.common.processes import ServerProcess, peak_mb
from ragorder.benchmarks.proxy.client import instant_server, proxy_server
from ragorder.benchmarks.proxy.upstream import ENDLESS, allow_many_connections
from ragorder.eval.data.machine import resident_mb
from ragorder.eval.report.declared import Column, Row, TableForm
from ragorder.eval.report.tables import Entry
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

EVERYTHING = "everything"
TEMPLATE = '<document id="{id}">\n{text}\n</document>'
"""How documents stand in the bodies that are not tagged."""
HELD = 2500
"""Connections that an attack keeps: more than the server does, and fewer than the system's limit of open files."""
_CHAT = "/v1/chat/completions"
_FOUND = TEMPLATE.replace("{text}", "text").replace("{id}", "{}")
_TAG = '"messages":[],"ragorder":{"documents":[{"id":"a","text":"t"},{"id":"b","text":"t"}],"query":"?"}'
_TOGETHER = 32
_EACH = 3
_WAIT_S = 10.0
_MIB = 1 << 20
_NOTHING = "nothing"
_LONGEST_S = 120.0


class Target:
    """A port; a context manager that at its end closes the connections that are held, the last `HELD` of them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._held: deque[socket.socket] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._held.popleft().close()

    def connect(self, sent: bytes) -> socket.socket:
        connection = socket.socket()
        # Of an answer that is not read little is taken.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(_WAIT_S)
        try:
            connection.connect(("127.0.0.1", self.port))
            connection.sendall(sent)
        except OSError:
            connection.close()
            raise
        return connection

    def hold(self, sent: bytes) -> None:
        self._held.append(self.connect(sent))
        if len(self._held) > HELD:
            self._held.popleft().close()

    def post(self, body: bytes, encoding: str = "identity") -> None:
        head = _head(_CHAT, len(body), f"Content-Encoding: {encoding}\r\n")
        with closing(self.connect(head + body)) as connection:
            while connection.recv(65536):
                pass


class Attack(NamedTuple):
    """What `clients` do, once each."""

    says: str
    clients: int
    step: Callable[[Target], None]


def attack(target: Target, chosen: Attack, clients: int) -> None:
    """Returns when each of the clients has done its step."""

    def once(_: int) -> None:
        # Refused, or closed in the middle: that is an answer to an attack.
        with suppress(OSError):
            chosen.step(target)

    with ThreadPoolExecutor(min(clients, _TOGETHER)) as pool:
        list(pool.map(once, range(clients)))


def attack_with_everything(target: Target, seconds: float) -> int:
    """Make all attacks at once, by three clients each; return the number of steps done."""
    stop, done = threading.Event(), [0]

    def repeat(step: Callable[[Target], None]) -> None:
        while not stop.is_set():
            with suppress(OSError):
                step(target)
                done.append(1)

    steps: list[Callable[[Target], None]] = [_unread, _half_body, _whole_body_but_one, _unfinished_headers]
    steps += [_endless_headers, _compressed, *map(_posting, _bodies())]
    threads = [threading.Thread(target=repeat, args=(step,), daemon=True) for step in steps for _ in range(_EACH)]
    for thread in threads:
        thread.start()
    try:
        stop.wait(seconds)
    finally:
        stop.set()
        until = time.monotonic() + 3 * _WAIT_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    return sum(done)


def _head(path: str, length: int, fields: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}Content-Length: {length}\r\n\r\n".encode()


def _unread(target: Target) -> None:
    target.hold(_head(ENDLESS, 2) + b"{}")


def _half_body(target: Target) -> None:
    target.hold(_head(_CHAT, _MIB) + b"x" * (_MIB // 2))


def _whole_body_but_one(target: Target) -> None:
    target.hold(_head(_CHAT, 32 * _MIB) + b"x" * (31 * _MIB))


def _no_body(target: Target) -> None:
    target.hold(_head(_CHAT, _MIB))


def _unfinished_headers(target: Target) -> None:
    target.hold(f"POST {_CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode())


def _endless_headers(target: Target) -> None:
    with closing(target.connect(f"POST {_CHAT} HTTP/1.1\r\n".encode())) as connection:
        for number in range(100_000):
            connection.sendall(f"X-{number}: {'y' * 1000}\r\n".encode())


def _posting(body: bytes) -> Callable[[Target], None]:
    return lambda target: target.post(body)


def _wide_characters(target: Target) -> None:
    target.post(_bodies()[0])


def _names(target: Target) -> None:
    target.post(_bodies()[1])


def _compressed(target: Target) -> None:
    target.post(_packed(), "gzip")


@cache
def _packed() -> bytes:
    return gzip.compress(_tagged("a word ", 31 * _MIB))


@cache
def _bodies() -> list[bytes]:
    """Expensive ones: wide characters, unknown names in a tagged body, in a message and in a part, the most that are
    read, three documents, 200,000 documents, unknown fields, brackets."""
    from ragorder.adapters.http_server.untrusted_json import MAX_VALUES

    many = [{"id": f"{number}", "text": "t"} for number in range(200_000)]
    fields = ",".join(f'"f{number}":[{{}}]' for number in range(_MIB // 2))
    names = ",".join(f'"{number:x}":0' for number in range(27 * _MIB // 11))
    few = ",".join(f'"{number:x}":0' for number in range(MAX_VALUES - 50))
    found = json.dumps("".join(map(_FOUND.format, "ab")))
    message = f'"role":"user","content":{found}'
    return [
        _tagged("\U0001f600", 29 * _MIB),
        f"{{{_TAG},{names}}}".encode(),
        f'{{"messages":[{{{message},{names}}}]}}'.encode(),
        f'{{"messages":[{{"role":"user","content":[{{"text":{found},{names}}}]}}]}}'.encode(),
        f"{{{_TAG},{few}}}".encode(),
        f'{{"messages":[{{{message},{few}}}]}}'.encode(),
        _tagged("a word ", 31 * _MIB),
        json.dumps({"messages": [], "ragorder": {"documents": many, "query": "?"}}).encode(),
        f'{{"messages":[],{fields}}}'.encode(),
        b'{"messages":[],"x":' + b"[" * (8 * _MIB),
    ]


def _tagged(text: str, length: int) -> bytes:
    """A body of about `length` bytes with three documents of this text."""
    documents = [{"id": f"{number}", "text": text * (length // 3 // len(text.encode()))} for number in range(3)]
    body = {"messages": [], "ragorder": {"documents": documents, "query": "why?"}}
    return json.dumps(body, ensure_ascii=False).encode()


ATTACKS: Mapping[str, Attack] = {
    "endless headers": Attack("connections, 100 MiB of header lines each, never ended", 5, _endless_headers),
    "unfinished headers": Attack("incomplete headers", 2000, _unfinished_headers),
    "no bodies": Attack("bodies that never arrive", 200, _no_body),
    "long bodies": Attack("clients with 31 of 32 MiB each", 20, _whole_body_but_one),
    "half bodies": Attack("clients with half a body of 1 MiB", 2000, _half_body),
    "unread answers": Attack("clients that do not read an endless answer", 2000, _unread),
    "wide characters": Attack("bodies of 29 MiB, of characters that take four bytes each", 12, _wide_characters),
    "names": Attack("bodies of 26 MiB, of names that mean nothing", 8, _names),
    "compressed": Attack("bodies of 46 KiB, which are 31 MiB unpacked", 100, _compressed),
}


class ProxyMemoryCell(SuiteCell):
    """Each attack by this `share` of its clients; all together for `seconds`. A peak counts once it has not
    risen for `settled` seconds."""

    share: float = Field(1.0, gt=0, le=1)
    seconds: float = Field(90.0, ge=0)
    settled: float = Field(10.0, gt=0)


def _attack_words(row: Row) -> str:
    if row.policy in ATTACKS:
        return f"{row.runs[0].rows['clients'][0]:,} {ATTACKS[row.policy].says}"
    if row.policy == EVERYTHING:
        seconds = row.group.cell.get("seconds", "")
        return f"all of these and other bodies at once, {seconds:g} s" if seconds else "all of these at once"
    return "none, at its start"


def _peak(row: Row) -> Entry:
    peaks = [run.rows["peak_mb"][0] for run in row.runs]
    spread = f"{format_number(min(peaks), 0)} to {format_number(max(peaks), 0)}" if len(peaks) > 1 else ""
    return Entry(format_number(median(peaks), 0), spread)


class ProxyMemory(Experiment):
    """Rows: the most memory of a proxy under one attack, its clients, and the steps of all attacks at once."""

    kind = "proxy-memory"
    cell = ProxyMemoryCell
    columns = ("peak_mb",)
    policies: ClassVar[Any] = (_NOTHING, *ATTACKS, EVERYTHING)
    packages: ClassVar[Any] = {"uvicorn": "proxy"}
    unit = "attacks"
    tables: ClassVar[Any] = [
        TableForm(
            "Memory",
            [Column("attack", _attack_words), Column("peak, MB", _peak)],
            "The most memory of the proxy's process, restarted for each attack: median of {seeds} runs, in brackets "
            "their range.",
            by=(),
        )
    ]

    def obstacle(self, suite: Suite, cell: ProxyMemoryCell, policy: str) -> str | None:
        if resident_mb() is None:
            return "the peak memory of a process is read from /proc, which this system lacks"
        return super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: ProxyMemoryCell) -> int:
        return 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ProxyMemoryCell = job.cell
        for policy in job.policies:
            with attacked_proxy() as proxy:
                rows = measure_peak(proxy, policy, cell)
            yield {"policy": policy, "rows": rows}
            advance()


@contextmanager
def attacked_proxy() -> Iterator[ServerProcess]:
    """`ragorder serve`, with its defaults and a template, before a server with a path that never ends its answer."""
    options = ("--capacity-tokens", "100000", "--template", TEMPLATE)
    with instant_server() as upstream, proxy_server(upstream.port, *options) as proxy:
        yield proxy


def measure_peak(proxy: ServerProcess, policy: str, cell: ProxyMemoryCell) -> dict[str, list[Any]]:
    """Return the figures of a record. Raises OSError if the system allows too few open files, or the proxy ends."""
    allow_many_connections(HELD)
    clients, done = 0, 0
    with Target(proxy.port) as target:
        if policy in ATTACKS:
            chosen = ATTACKS[policy]
            clients = max(1, round(chosen.clients * cell.share))
            attack(target, chosen, clients)
        elif policy == EVERYTHING:
            done = attack_with_everything(target, cell.seconds)
        peak = _settled_peak(proxy.pid, cell.settled)
    return {"peak_mb": [peak], "clients": [clients], "steps": [done]}


def _settled_peak(process: int, settled_s: float) -> float:
    """The peak once it has not risen for so long, after two minutes at the latest."""
    began = rose = time.monotonic()
    peak = 0.0
    while (now := time.monotonic()) < min(rose + settled_s, began + _LONGEST_S):
        found = peak_mb(process)
        if found is None:
            raise OSError("the proxy has ended under attack")
        if found > peak:
            peak, rose = found, now
        time.sleep(0.1)
    return peak
