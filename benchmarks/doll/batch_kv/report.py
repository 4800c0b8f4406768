"""Table of the batches that a KV cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ragorder.benchmarks.doll.batch_kv.measuring import POLICIES
from ragorder.benchmarks.doll.batch_kv.record import BatchKVCell, BatchKVRecord
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_WORDS = {
    "sum": "retrieval order, KV of each request by itself",
    "retrieval": "retrieval order, prefixes shared",
    "order": "ordered one by one",
    "order_batch": "ordered as a batch",
}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(BatchKVRecord, suite.name))
    return Part([_table(group) for group in groups])


def _table(group: RecordGroup[BatchKVRecord]) -> Table:
    cell = BatchKVCell.read(group.cell, "doll-ordering")
    order = "shuffled" if cell.shuffled else "in the corpus's order"
    title = (
        f"{cell.corpus}, {cell.waiting:,} requests that wait, {order}, room for {cell.batch} prompts of {cell.top_k}"
    )
    headings = ["", "tokens a streamed GB", "times retrieval order", "requests in a batch", "KV, % of the sum"]
    table = Table(f"What a streamed gigabyte serves: {title}", headings)
    base = {each.seed: each.tokens_per_gb(cell.streamed_gb) for each in group.runs("retrieval")}
    for policy in POLICIES:
        runs = group.runs(policy)
        if runs:
            table.add(_WORDS[policy], *_row(runs, base, cell.streamed_gb))
    table.note = (
        f"Each of the {_steps(group)} steps of a batch streams {cell.streamed_gb:g} GB. Tokens are those of prompts "
        "and answers; least to most of the seeds below it. Whole batches, none joined: the last one may be small."
    )
    return table


def _steps(group: RecordGroup[BatchKVRecord]) -> int:
    """Steps of a batch."""
    first = group.runs()[0]
    return int(first.facts["steps"]) // len(first.rows["batch"])


def _row(runs: Sequence[BatchKVRecord], base: dict[int, float], streamed_gb: float) -> list[str | Entry]:
    ratios = [each.tokens_per_gb(streamed_gb) / base[each.seed] for each in runs if each.seed in base]
    sizes = [fmean(each.rows["batch"]) for each in runs]
    return [
        format_number(fmean(each.tokens_per_gb(streamed_gb) for each in runs), 2),
        Entry(format_number(fmean(ratios), 2), range_words(ratios, 2)) if ratios else "–",
        format_number(fmean(sizes)),
        format_number(100 * fmean(each.facts["kv_tokens"] / each.facts["served_tokens"] for each in runs)),
    ]
