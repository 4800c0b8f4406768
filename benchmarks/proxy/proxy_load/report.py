"""Tables and picture of the proxy under load: added latency, and streams that came whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ragorder.benchmarks.proxy.proxy_load.experiment import ProxyLoadRecord
from ragorder.eval.report.canvas import Picture, draw, label_ends, style
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import cell_words, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import key_of
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_NOTE = (
    "In ms, p50 / p99. Each request is sent to the proxy and, half a period away, upstream, which answers at once. "
    "Added: the differences of these pairs."
)


def make_part(suite: Suite, results: Results) -> Part:
    cells: dict[object, dict[str, dict[int, ProxyLoadRecord]]] = {}
    for record in results.of(ProxyLoadRecord, suite.name):
        sides = cells.setdefault(key_of(record.cell), {"direct": {}, "proxied": {}})
        sides[record.policy][record.seed] = record
    latency = Table("Latency", ["load", "requests", "number", "direct", "proxied", "added"], labels=2, note=_NOTE)
    streams = Table("Streams at a time", ["load", "direct: whole, of all, seconds, memory", "proxied"])
    added: dict[str, Any] = {}
    for sides in cells.values():
        seeds = sides["direct"].keys() & sides["proxied"].keys()
        direct, proxied = ([sides[side][seed] for seed in sorted(seeds)] for side in ("direct", "proxied"))
        if not direct:
            continue
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


def _column(records: Sequence[ProxyLoadRecord], name: str) -> Any:
    return np.concatenate([np.asarray(record.rows[name]) for record in records])


def _quantiles(times: Any) -> str:
    return " / ".join(format_number(float(np.quantile(times, quantile)), 2) for quantile in (0.5, 0.99))


def _streams(records: Sequence[ProxyLoadRecord]) -> str:
    facts = [record.facts for record in records]
    seconds = ", ".join(format_number(each["streams_s"]) for each in facts)
    peaks = [each["peak_mb"] for each in facts if each.get("peak_mb") is not None]
    memory = f", {format_number(max(peaks), 0)} MB" if peaks else ""
    return (
        f"{sum(each['whole'] for each in facts):,} of {sum(each['streams'] for each in facts):,}, {seconds} s{memory}"
    )


def _picture(added: Mapping[str, Any]) -> Picture:
    def paint(axes: Any) -> None:
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
