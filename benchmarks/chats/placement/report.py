"""The part of a report on where documents stand; its tables are those of all runs."""

from __future__ import annotations

from ragorder.eval.report.part import Part
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]


def make_part(suite: Suite, results: Results) -> Part:
    return Part()
