"""Facts of a suite that the report shows: its words, its sweeps, and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragorder.eval.running.record import Cell
from ragorder.eval.running.suite import Suite, load_suites

__all__ = ["ShownPaperRow", "SuiteInfo", "info_of", "known_suites"]


@dataclass(frozen=True, slots=True)
class ShownPaperRow:
    """One row of the paper's: figures by name, for a policy (ours of that name) in a cell."""

    label: str
    policy: str | None
    hardware: str
    unit: str
    at: Cell
    values: Mapping[str, float | str]

    def matches(self, cell: Cell) -> bool:
        return all(name not in cell or cell[name] == value for name, value in self.at.items())


@dataclass(frozen=True, slots=True)
class SuiteInfo:
    """A suite as its file declares it; of a suite whose file is not at hand only the name is known."""

    name: str
    title: str
    source: str = ""
    says: str = ""
    kind: str = "serve"
    baseline: str = "retrieval"
    figure: str = ""
    x: str | None = None
    metrics: Sequence[str] = ()
    paper: Sequence[ShownPaperRow] = ()
    needs: str = ""

    def about(self, *words: str) -> bool:
        """Whether one of these is what the suite shows."""
        return any(word in (self.name, self.figure, *self.metrics) for word in words)


def known_suites() -> dict[str, SuiteInfo]:
    """Every suite that comes with the package, the paper's first. Raises SuiteError."""
    return {name: info_of(suite) for name, suite in load_suites().items()}


def info_of(suite: Suite) -> SuiteInfo:
    parameters = {name for point in suite.points for name in point}
    return SuiteInfo(
        name=suite.name,
        title=suite.title,
        source=suite.source,
        says=suite.says,
        kind=suite.kind,
        baseline=suite.baseline,
        figure=suite.report.figure,
        x=suite.report.x,
        metrics=suite.report.metrics,
        paper=[
            ShownPaperRow(
                label=row.label or "",
                policy=row.policy,
                hardware=row.hardware,
                unit=row.unit,
                at={**row.cell, **{name: value for name, value in row.figures.items() if name in parameters}},
                values={name: value for name, value in row.figures.items() if name not in parameters},
            )
            for row in suite.paper
        ],
        needs=suite.needs,
    )
