"""Latency that the proxy adds, and many streams at a time."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field

from ragorder.benchmarks.common.processes import ServerProcess, peak_mb
from ragorder.benchmarks.proxy.client import Connections, chat_body, instant_server, post, proxy_server
from ragorder.benchmarks.proxy.upstream import allow_many_connections, answer_events
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import cell_words, format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

_NOTE = (
    "In ms, p50 / p99. Each request is sent to the proxy and, half a period away, upstream, which answers at once. "
    "Added: the differences of these pairs."
)


class ProxyLoadCell(SuiteCell):
    """`rate` requests a second for `seconds`; then `streams` of `events` events, `pause` seconds apart."""

    rate: float = Field(50.0, ge=1)
    seconds: float = Field(20.0, ge=0)
    streams: int = Field(2000, ge=0)
    events: int = Field(20, ge=1)
    pause: float = Field(0.25, ge=0)


@contextmanager
def servers(*options: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A server that answers at once, and `ragorder serve` with these options before it."""
    sizes = ("--capacity-tokens", "262144", "--block-size", "16")
    with instant_server() as upstream, proxy_server(upstream.port, *sizes, *options) as proxy:
        yield upstream, proxy


async def measure_latency(
    upstream: int, proxy: int, rate: float, seconds: float, seed: int = 0
) -> list[tuple[bool, float, float]]:
    """Send requests to the proxy and upstream, half a period apart; return (tagged, ms upstream, ms by the proxy)."""
    rng = random.Random(seed)
    clients = Connections(upstream), Connections(proxy)
    sent = []
    start = time.perf_counter() + 0.1
    for number in range(max(2, round(rate * seconds))):
        tagged = number % 2 == 0
        body = chat_body(rng, tagged=tagged)
        # Which is first takes turns.
        times = [start + (number + half) / rate for half in ((0.0, 0.5) if number // 2 % 2 else (0.5, 0.0))]
        tasks = [asyncio.create_task(each.time(body, at)) for each, at in zip(clients, times, strict=True)]
        sent.append((tagged, tasks))
    measured = [(tagged, 1e3 * await direct, 1e3 * await proxied) for tagged, (direct, proxied) in sent]
    for client in clients:
        client.close()
    return measured


async def run_streams(port: int, streams: int, events: int = 20, pause_s: float = 0.25) -> list[bool]:
    """Hold `streams` at a time, all begun before any goes on; return whether each had its own bytes."""
    together = [secrets.token_hex(8), streams]

    async def one(number: int) -> bool:
        name = f"client-{number}"
        body = {"stream": True, "user": name, "max_tokens": events, "pause": pause_s, "together": together}
        return await post(port, json.dumps(body).encode()) == b"".join(answer_events(name, events))

    return list(await asyncio.gather(*map(one, range(streams))))


class ProxyLoad(Experiment):
    """Each side has the latencies of its requests, which are pairs with the other's."""

    kind = "proxy-load"
    cell = ProxyLoadCell
    columns = ("latency_ms", "tagged")
    runs = True
    policies: ClassVar[Any] = ("direct", "proxied")
    one_job = True
    unit = "sides"
    counts = "policies"

    def asked(self, suite: Suite) -> Sequence[str]:
        """Both sides: they are compared pair by pair."""
        return suite.policies

    def requests(self, suite: Suite, cell: ProxyLoadCell) -> int:
        asked = round(cell.rate * cell.seconds)
        return min(asked, self.options.limit or asked)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: ProxyLoadCell = job.cell
        allow_many_connections(cell.streams)
        # Those of the latencies are still open.
        connections = str(max(1024, cell.streams + 256))
        started = servers("--max-connections", connections)
        sides = self.kept(connections, lambda: self.resources.enter_context(started))
        seconds = job.requests / cell.rate
        direct, proxied = (side.port for side in sides)
        pairs = asyncio.run(measure_latency(direct, proxied, cell.rate, seconds, job.seed)) if seconds else []
        for policy, server in zip(self.policies, sides, strict=True):
            began = time.perf_counter()
            whole = asyncio.run(run_streams(server.port, cell.streams, cell.events, cell.pause))
            if policy in job.policies:
                side = 2 if policy == "proxied" else 1
                yield {
                    "policy": policy,
                    "rows": {
                        "tagged": [pair[0] for pair in pairs],
                        "latency_ms": [round(pair[side], 4) for pair in pairs],
                    },
                    "facts": {
                        "streams": len(whole),
                        "whole": sum(whole),
                        "streams_s": round(time.perf_counter() - began, 3),
                        "peak_mb": peak_mb(server.pid),
                    },
                }
            advance()


def make_part(suite: Suite, results: Results) -> Part:
    latency = Table("Latency", ["load", "requests", "number", "direct", "proxied", "added"], labels=2, note=_NOTE)
    streams = Table("Streams at a time", ["load", "direct: whole, of all, seconds, memory", "proxied"])
    added: dict[str, Any] = {}
    for group in group_runs(results.of(ProxyLoad.record, suite.name)):
        pairs = group.pairs("direct", "proxied")
        if not pairs:
            continue
        direct, proxied = zip(*pairs, strict=True)
        label = cell_words(direct[0].cell) or suite.title
        times = [_column(records, "latency_ms") for records in (direct, proxied)]
        tagged = _column(direct, "tagged").astype(bool)
        for kind, chosen in {"tagged": tagged, "others": ~tagged}.items():
            if chosen.any():
                columns = [column[chosen] for column in (*times, times[1] - times[0])]
                latency.add(label, kind, f"{chosen.sum():,}", *map(_quantiles, columns))
                added[kind] = columns[-1]
        if direct[0].facts.get("streams"):
            streams.add(label, _streams(direct), _streams(proxied))
    tables = [table for table in (latency, streams) if table.rows]
    return Part(tables, pictures=lambda: [_picture(added)] if added else [])


def _column(records: Sequence[Record], name: str) -> Any:
    import numpy as np

    return np.concatenate([np.asarray(record.rows[name]) for record in records])


def _quantiles(times: Any) -> str:
    import numpy as np

    return " / ".join(format_number(float(np.quantile(times, quantile)), 2) for quantile in (0.5, 0.99))


def _streams(records: Sequence[Record]) -> str:
    facts = [record.facts for record in records]
    seconds = ", ".join(format_number(each["streams_s"]) for each in facts)
    peaks = [each["peak_mb"] for each in facts if each.get("peak_mb") is not None]
    memory = f", {format_number(max(peaks), 0)} MB" if peaks else ""
    return (
        f"{sum(each['whole'] for each in facts):,} of {sum(each['streams'] for each in facts):,}, {seconds} s{memory}"
    )


def _picture(added: Mapping[str, Any]) -> Picture:
    def paint(axes: Any) -> None:
        import numpy as np

        ends = []
        for (kind, times), policy in zip(added.items(), ("earned", "retrieval"), strict=False):
            looks, ordered = style(policy), np.sort(times)
            axes.plot(ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), looks.dashes, color=looks.colour)
            ends.append((float(ordered[-1]), 100.0, kind, looks))
        axes.set_ylim(0, 105)
        axes.set_xlabel("added, ms")
        axes.set_ylabel("requests, %")
        label_ends(axes, ends)

    said = ", ".join(f"{kind}: p50 / p99 {_quantiles(times)} ms" for kind, times in added.items())
    return draw(paint, title="Latency that the proxy adds", alt=said, caption="Requests delayed by at most so much.")
