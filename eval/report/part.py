"""The part of a report that an experiment makes of one suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.groups import Group
from ragorder.eval.report.tables import Table
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["Part", "Reporter"]


@dataclass(slots=True)
class Part:
    """`groups` are runs that can be compared, for the overview; `pictures` draws when it is called."""

    tables: Sequence[Table] = ()
    words: Sequence[str] = ()
    engine: str = ""
    setting: str = ""
    groups: list[Group[Any]] = field(default_factory=list)
    baseline: str = ""
    pictures: Callable[[], Sequence[Picture]] = tuple


@runtime_checkable
class Reporter(Protocol):
    """An experiment that the report shows."""

    @classmethod
    def report(cls, suite: Suite, results: Results) -> Part:
        """The tables and pictures of a suite."""
