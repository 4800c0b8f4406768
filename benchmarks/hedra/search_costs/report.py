"""Tables of the smallest pieces of work."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, quantiles

from ragorder.benchmarks.hedra.search_costs.record import CostsCell, CostsRecord
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["explained", "make_part"]


def make_part(suite: Suite, results: Results) -> Part:
    lines = [line for group in group_runs(results.of(CostsRecord, suite.name)) for line in group.runs()]
    tables = {"scans": _scans, "decoding": _decoding}
    return Part([table for line in lines for table in tables[line.policy](line)])


def explained(line: CostsRecord) -> float:
    """R²: the share of the variance of the later half of the calls that was predicted from the calls before each."""
    half = len(line.rows["ms"]) // 2
    times, predicted = line.rows["ms"][half:], line.rows["predicted_ms"][half:]
    mean = fmean(times)
    unexplained = sum((ms - guess) ** 2 for ms, guess in zip(times, predicted, strict=True))
    return 1 - unexplained / sum((ms - mean) ** 2 for ms in times)


def _scans(line: CostsRecord) -> Iterator[Table]:
    cell = CostsCell.read(line.cell, "search-costs")
    about = f"{cell.vectors:,} vectors of {cell.dimensions} in {len(line.facts['clusters'])} clusters"
    table = Table(f"Scans of some clusters: {about}", ["", ""])
    codes, times = line.rows["codes"], line.rows["ms"]
    table.add("calls", f"{len(times):,}")
    table.add("ns a vector, mean", format_number(1e6 * sum(times) / sum(codes)))
    table.add("R² of what was predicted", format_number(explained(line), 3))
    clusters = line.facts["clusters"]
    tenths = quantiles(clusters, n=10)
    for name, ms in (("first tenth", tenths[0]), ("median", tenths[4]), ("last tenth", tenths[8])):
        table.add(f"a cluster, {name}, µs", format_number(1e3 * ms))
    table.add("a cluster, longest, µs", format_number(1e3 * max(clusters)))
    for batch, ms in line.facts["queries"].items():
        table.add(f"a whole search in a call of {batch}, ms", format_number(ms, 2))
    table.note = "Processor time. R²: of the later half of the calls, each predicted by ClusterCosts from those before."
    yield table


def _decoding(line: CostsRecord) -> Iterator[Table]:
    cell = CostsCell.read(line.cell, "search-costs")
    rows = list(zip(line.rows["requests"], line.rows["context"], line.rows["ms"], strict=True))
    contexts = sorted({context for _, context, _ in rows})
    table = Table(
        f"A decoding step, ms: the embedded engine, {cell.shape}",
        ["requests", *(f"context {context:g}" for context in contexts)],
    )
    for requests in sorted({requests for requests, _, _ in rows}):
        ms_of = {context: ms for each, context, ms in rows if each == requests}
        table.add(f"{requests:g}", *(format_number(ms_of[context]) for context in contexts))
    table.note = "Processor time of one core, median."
    yield table
