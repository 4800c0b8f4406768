"""The part of a report on one suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.compared import Compared
from ragorder.eval.report.declared import tables_of
from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.tables import Table
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Experiment, Kind, Suite


@dataclass(slots=True)
class Part:
    """`title`: instead of the suite's; `compared`, by default made from `groups`, is for headline and overview;
    `pictures` draws on demand."""

    tables: Sequence[Table] = ()
    words: Sequence[str] = ()
    headline: Sequence[str] = ()
    engine: str = ""
    setting: str = ""
    groups: list[RecordGroup[Any]] = field(default_factory=list)
    baseline: str = ""
    pictures: Callable[[], Sequence[Picture]] = tuple
    compared: Sequence[Compared] = ()
    title: str = ""


def part_of(experiment: type[Kind], suite: Suite, results: Results) -> Part | None:
    """Return what `make_part(suite, results)` makes, of the experiment's module or of `report` beside it, else the
    tables and words that the experiment declares, or None."""
    module = import_module(experiment.__module__)
    if not hasattr(module, "make_part"):
        name = f"{experiment.__module__.rpartition('.')[0]}.report"
        if find_spec(name) is None:
            if not issubclass(experiment, Experiment) or not experiment.tables:
                return None
            tables = tables_of(experiment, suite, results)
            return Part(tables, experiment.words if tables else ())
        module = import_module(name)
    part: Part = module.make_part(suite, results)
    return part
