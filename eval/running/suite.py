"""Suites: the cells and policies of a table or figure, declared in a TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ragorder.eval.data.names import unknown
from ragorder.eval.running.cells import SuiteError, complaint
from ragorder.eval.running.experiment import experiment_of, suite_files
from ragorder.eval.running.policies import POLICIES
from ragorder.eval.running.record import Cell
from ragorder.jsonl import decode_toml

__all__ = ["GROUPS", "Display", "PaperRow", "Reduced", "Suite", "choose_suites", "load_suite", "load_suites"]

GROUPS = ("paper", "ours", "all")
_FROM_PAPER = re.compile(r"(ragcache-)?(table|figure)-\d+|pressure")
_STRICT = ConfigDict(extra="forbid", frozen=True)


class Display(BaseModel):
    model_config = _STRICT

    chart: str = Field(validation_alias=AliasChoices("chart", "figure"))
    x: str | None = None
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PaperRow:
    label: str
    policy: str | None
    hardware: str
    unit: str
    at: Cell
    values: Mapping[str, float | str]

    def matches(self, cell: Cell) -> bool:
        return all(name not in cell or cell[name] == value for name, value in self.at.items())


class PaperLine(BaseModel):
    """A row of the paper's numbers: further fields are figures, or parameters of the cell."""

    model_config = ConfigDict(extra="allow", frozen=True)

    policy: str | None = None
    label: str | None = None
    hardware: str = ""
    unit: str = ""
    note: str = ""
    cell: Mapping[str, Any] = {}

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.policy is None and self.label is None:
            raise ValueError("a row of the paper's has a policy or a label")
        if self.policy is not None and self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}: give a label instead")
        wrong = [name for name, value in self.figures.items() if isinstance(value, bool | list | dict)]
        if wrong:
            raise ValueError(f"{wrong[0]}: a figure is a number or a text")
        return self

    @property
    def figures(self) -> Mapping[str, Any]:
        return self.model_extra or {}


class Reduced(BaseModel):
    """Replacements in a suite's short form. A parameter in `cell` or `sweep` replaces the suite's own in either."""

    model_config = _STRICT

    policies: tuple[str, ...] | None = None
    warmup: int | None = None
    requests: int | None = None
    cell: Mapping[str, Any] = {}
    sweep: Mapping[str, tuple[Any, ...]] = {}
    extra: tuple[Mapping[str, tuple[Any, ...]], ...] | None = None


class Suite(BaseModel):
    """Cells are the product of `sweep`, each with `cell`, and those of each of `extra`.

    The first `warmup` requests of a run are in no figure. `needs` tells why a suite cannot be run yet; `takes_corpora`:
    corpora of --corpora are swept too; `grouped`: part of paper, ours and all; `reduced`: its short form.
    """

    model_config = _STRICT

    name: str
    title: str
    source: str
    says: str
    kind: str = "serve"
    needs: str = ""
    takes_corpora: bool = False
    grouped: bool = True
    policies: tuple[str, ...] = ()
    baseline: str = "retrieval"
    warmup: int = Field(5, ge=0)
    requests: int = Field(600, ge=1)
    cell: Mapping[str, Any] = {}
    sweep: Mapping[str, tuple[Any, ...]] = {}
    extra: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    reduced: Reduced | None = None
    report: Display
    paper: tuple[PaperLine, ...] = ()

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        experiment_of(kind)
        return kind

    @field_validator("policies")
    @classmethod
    def _known(cls, policies: tuple[str, ...], info: Any) -> tuple[str, ...]:
        if len(set(policies)) < len(policies):
            raise ValueError("the same policy twice")
        known = experiment_of(info.data["kind"]).policies if "kind" in info.data else None
        for policy in policies:
            if known is not None and policy not in known:
                raise ValueError(f"unknown policy {policy!r}: choose from {', '.join(known)}")
        return policies

    @field_validator("sweep", "extra")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        for swept in value if isinstance(value, tuple) else (value,):
            for name, values in swept.items():
                if not values:
                    raise ValueError(f"{name} has no value: give one at least")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Suite:
        if not self.needs and not self.policies:
            raise ValueError("policies: name one at least")
        if not self.needs and self.baseline not in self.policies:
            raise ValueError(f"baseline: {self.baseline!r} is not among the policies")
        twice = [name for swept in (self.sweep, *self.extra) for name in swept if name in self.cell]
        if self.sweep and twice and any(name in self.sweep for name in twice):
            raise ValueError(f"{twice[0]}: either in [cell] or in [sweep]")
        return self

    @classmethod
    def unlisted(cls, name: str, title: str = "", **fields: Any) -> Self:
        return cls.model_construct(
            name=name, title=title or name, report=Display(chart=""), **{"source": "", "says": ""} | fields
        )

    def about(self, *words: str) -> bool:
        return any(word in (self.name, self.report.chart, *self.report.metrics) for word in words)

    @property
    def paper_rows(self) -> list[PaperRow]:
        """The paper's numbers, parameters of the cell told from figures."""
        parameters = {name for point in self.points for name in point}
        return [
            PaperRow(
                label=row.label or "",
                policy=row.policy,
                hardware=row.hardware,
                unit=row.unit,
                at={**row.cell, **{name: value for name, value in row.figures.items() if name in parameters}},
                values={name: value for name, value in row.figures.items() if name not in parameters},
            )
            for row in self.paper
        ]

    @property
    def from_paper(self) -> bool:
        return _FROM_PAPER.fullmatch(self.name) is not None

    @property
    def points(self) -> list[dict[str, Any]]:
        """The parameters of each cell, as in the file."""
        if self.needs:
            return []
        found: list[dict[str, Any]] = []
        for swept in (self.sweep, *self.extra):
            for values in product(*swept.values()):
                point = {**self.cell, **dict(zip(swept, values, strict=True))}
                if point not in found:
                    found.append(point)
        return found

    @property
    def cells(self) -> list[Any]:
        """Raises SuiteError."""
        return list(experiment_of(self.kind).cells(self, f"{self.name}.toml"))

    def with_corpora(self, names: Iterable[str]) -> Suite:
        swept = self.sweep.get("corpus", ())
        added = tuple(name for name in names if name not in swept)
        if not self.takes_corpora or not added:
            return self
        return self.model_copy(update={"sweep": {**self.sweep, "corpus": (*swept, *added)}})

    def with_parameters(self, given: Iterable[str]) -> Suite:
        """With these values ("top_k=1,5") in its cells; several are swept, none ("top_k=") is the default. Raises
        SuiteError."""
        texts: dict[str, list[str]] = {}
        for each in given:
            name, equals, values = each.partition("=")
            if not equals:
                raise SuiteError(f"{each!r}: write NAME=VALUE")
            texts.setdefault(name, []).extend(filter(None, values.split(",")))
        if not texts:
            return self
        found = {name: experiment_of(self.kind).cell.parse(name, each) for name, each in texts.items()}
        swept = {name: values for name, values in found.items() if len(values) > 1}
        fixed = {name: values[0] for name, values in found.items() if len(values) == 1}

        def rest(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in found}

        ours = self.model_dump(exclude_none=True)
        ours |= {"cell": rest(self.cell) | fixed, "sweep": rest(self.sweep) | swept}
        if self.reduced is not None:
            ours["reduced"] |= {"cell": rest(self.reduced.cell), "sweep": rest(self.reduced.sweep)}
        for form in (ours, ours.get("reduced", {})):
            if "extra" in form:
                form["extra"] = [kept | swept for each in form["extra"] if (kept := rest(each))]
        changed = Suite.model_validate(ours)
        experiment_of(self.kind).check(changed, self.name)
        return changed

    @property
    def short_form(self) -> Suite | None:
        """Raises ValidationError."""
        if self.reduced is None:
            return None
        ours, theirs = self.model_dump(), self.reduced.model_dump(exclude_none=True)
        cell, sweep = theirs.pop("cell"), theirs.pop("sweep")
        ours["cell"] = {name: value for name, value in self.cell.items() if name not in sweep} | cell
        ours["sweep"] = {name: values for name, values in self.sweep.items() if name not in cell} | sweep
        return Suite.model_validate({**ours, **theirs, "reduced": None})

    @property
    def times_builds(self) -> bool:
        return "build_us" in self.report.metrics

    @property
    def keeps_timelines(self) -> bool:
        return "timeline" in (self.report.chart, *self.report.metrics)


def load_suites() -> dict[str, Suite]:
    """Raises SuiteError."""
    suites = [read_suite(file.stem, file.read_text("utf-8"), file.name) for file in suite_files()]
    return {suite.name: suite for suite in sorted(suites, key=_place)}


def load_suite(path: Path) -> Suite:
    """Raises SuiteError."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: cannot be read ({error})") from None
    return read_suite(path.stem, text, str(path))


def read_suite(name: str, text: str, where: str) -> Suite:
    """Raises SuiteError naming file and field."""
    try:
        fields = decode_toml(text.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise SuiteError(f"{where}: {error}") from None
    try:
        suite = Suite.model_validate({**fields, "name": name})
    except ValidationError as error:
        raise SuiteError(f"{where}: {complaint(error)}") from None
    experiment = experiment_of(suite.kind)
    experiment.check(suite, where)
    try:
        short_form = suite.short_form
    except ValidationError as error:
        raise SuiteError(f"{where}: [reduced] {complaint(error)}") from None
    if short_form is not None:
        experiment.check(short_form, f"{where}: [reduced]")
    return suite


def choose_suites(names: Sequence[str]) -> list[Suite]:
    """By name, group (`GROUPS`) or path of a TOML file, each once. Raises SuiteError."""
    known = load_suites()
    chosen: dict[str, Suite] = {}
    for name in names:
        for suite in _named(name, known):
            if chosen.setdefault(suite.name, suite) != suite:
                raise SuiteError(f"two suites called {suite.name}: rename {name}")
    return list(chosen.values())


def _named(name: str, known: Mapping[str, Suite]) -> Iterable[Suite]:
    if name in GROUPS:
        grouped = [suite for suite in known.values() if suite.grouped]
        return [suite for suite in grouped if name == "all" or suite.from_paper == (name == "paper")]
    if name in known:
        return [known[name]]
    if name.endswith(".toml"):
        return [load_suite(Path(name))]
    raise SuiteError(f"{unknown('suite', name, [*known, *GROUPS])}, or give a TOML file")


def _place(suite: Suite) -> tuple[bool, bool, int, str]:
    kind, _, number = suite.name.partition("-")
    numbered = suite.from_paper and number.isdigit()
    return not suite.from_paper, not numbered, int(number) if numbered else 0, kind
