"""Table of conversations: cached tokens that the proxy predicted, beside those reported."""

from __future__ import annotations

import numpy as np

from ragorder.benchmarks.chats.conversations.experiment import ConversationRecord
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.metrics import CACHED
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]


def make_part(suite: Suite, results: Results) -> Part:
    table = Table("Predicted by the proxy", ["", "prompt tokens", "cached, %", "predicted, %"])
    for group in group_runs(results.of(ConversationRecord, suite.name)):
        tokens = group.values("ragorder", "prompt_tokens").sum()
        predicted = np.nansum(group.values("ragorder", "predicted_tokens"))
        if tokens:
            cached = group.value("ragorder", CACHED)
            row = [format_number(tokens, 0), format_number(cached), format_number(100 * predicted / tokens)]
            table.rows.append([Entry(group.label or suite.title), *map(Entry, row)])
    return Part([table] if table.rows else [])
