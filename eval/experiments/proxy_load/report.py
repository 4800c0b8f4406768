"""Tables of the proxy under load: added latency, and streams that came whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ragorder.eval.experiments.proxy_load.experiment import ProxyLoadRecord
from ragorder.eval.report.canvas import Picture, draw, style
from ragorder.eval.report.part import Part
from ragorder.eval.report.reading import Results
from ragorder.eval.report.suites import SuiteInfo
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import figure
from ragorder.eval.running.record import Cell, key_of

__all__ = ["proxy_load_part"]

_SIDES = ("direct", "proxied")
_KINDS = {"tagged": True, "others": False}
_NOTE = (
    "In ms, p50 / p99. Each request is sent to the proxy and, half a period away, to the server itself, which answers at "
    "once; added: the differences of the pairs."
)


def proxy_load_part(suite: SuiteInfo, results: Results) -> Part:
    cells: dict[object, tuple[Cell, dict[str, dict[int, ProxyLoadRecord]]]] = {}
    for record in results.of(ProxyLoadRecord, suite.name):
        cells.setdefault(key_of(record.cell), (record.cell, {side: {} for side in _SIDES}))[1][record.policy][
            record.seed
        ] = record
    latency = Table("Latency", ["requests/s", "requests", "number", "direct", "proxied", "added"], labels=2, note=_NOTE)
    streams = Table("Streams at a time", ["streams", "direct: whole, seconds", "proxied: whole, seconds"])
    pictures: list[Picture] = []
    for cell, sides in cells.values():
        seeds = sorted(sides["direct"].keys() & sides["proxied"].keys())
        if not seeds:
            continue
        pairs = {side: _column(sides[side], seeds, "latency_ms") for side in _SIDES}
        tagged = _column(sides["direct"], seeds, "tagged").astype(bool)
        added = pairs["proxied"] - pairs["direct"]
        for kind, is_tagged in _KINDS.items():
            of_kind = tagged == is_tagged
            if of_kind.any():
                figures = [_quantiles(each[of_kind]) for each in (*pairs.values(), added)]
                row = [f"{cell.get('rate', ''):g}", kind, f"{of_kind.sum():,}", *figures]
                latency.rows.append(list(map(Entry, row)))
        facts = {side: [sides[side][seed].facts for seed in seeds] for side in _SIDES}
        if facts["direct"][0]["streams"]:
            streams.rows.append(
                [Entry(f"{facts['direct'][0]['streams']:,}"), *(_whole(each) for each in facts.values())]
            )
        if len(added):
            pictures.append(_picture({kind: added[tagged == is_tagged] for kind, is_tagged in _KINDS.items()}))
    return Part([table for table in (latency, streams) if table.rows], engine=_ENGINE, pictures=lambda: pictures)
