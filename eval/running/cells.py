"""Cells: the parameters of runs that are compared with one another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from ragorder.common.counts import parse_count
from ragorder.errors import RagorderError
from ragorder.eval.data.names import unknown
from ragorder.eval.running.policies import POLICIES
from ragorder.eval.running.record import Cell

STRICT = ConfigDict(extra="forbid", frozen=True)


class SuiteError(RagorderError, ValueError):
    """A suite that does not exist or is wrong. The message says where, and what to change."""


class SuiteCell(BaseModel):
    """The parameters of a cell; an experiment declares its own. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def read(cls, fields: Mapping[str, Any], where: str) -> Self:
        """Raises SuiteError beginning with `where`."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise SuiteError(f"{where}: {complaint(error)}") from None

    @classmethod
    def parse(cls, name: str, texts: Sequence[str]) -> list[Any]:
        """Values of a parameter from a command line ("40k", "0.5", "yes", "none" or a word), as one value where the
        parameter is a list. Raises SuiteError."""
        if name not in cls.model_fields:
            raise SuiteError(unknown("parameter", name, cls.model_fields))
        field = cls.model_fields[name]
        lists = [each for each in (field.annotation, *get_args(field.annotation)) if get_origin(each) is tuple]
        kind: Any = get_args(lists[0])[0] if lists else Annotated[field.annotation, field]
        adapter = TypeAdapter[Any](kind, config=ConfigDict(strict=True))
        values = [_read(adapter, name, text) for text in texts]
        return [tuple(values)] if lists and values else values

    @property
    def fields(self) -> dict[str, Any]:
        """The given parameters, as JSON values: the cell's name in the results."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @property
    def varies_with_seed(self) -> bool:
        return True


class SeedlessCell(SuiteCell):
    """A cell that every seed measures alike."""

    @property
    def varies_with_seed(self) -> bool:
        return False


def _read(adapter: TypeAdapter[Any], name: str, text: str) -> Any:
    problems = []
    for value in _readings(text):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            problems.append(error)
    # A reading of the right type says what is wrong with its value.
    told = next((each for each in problems if not each.errors()[0]["type"].endswith("_type")), problems[0])
    raise SuiteError(f"{name} = {text}: {complaint(told)}")


_WORDS = {"yes": True, "true": True, "no": False, "false": False, "none": None, "unlimited": None}


def _readings(text: str) -> list[Any]:
    found: list[Any] = [text]
    for read in (float, parse_count):
        with suppress(ValueError):
            found.insert(0, read(text))
    return [*found, _WORDS[text]] if text in _WORDS else found


def one_of(kind: str, known: Iterable[str]) -> AfterValidator:
    """A validator that refuses other names, and suggests the nearest one."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(unknown(kind, name, known))
        return name

    return AfterValidator(check)


def complaint(error: ValidationError) -> str:
    """The first error in one line; an unknown name before a missing one, which it may be, misspelt."""
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    field = ".".join(map(str, first["loc"]))
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


class Display(BaseModel):
    model_config = STRICT

    chart: str
    x: str | None = None
    metrics: tuple[str, ...] = ()


class PaperLine(BaseModel):
    """A row of the paper's numbers: further fields are figures, or parameters of the cell."""

    model_config = ConfigDict(extra="allow", frozen=True)

    policy: str | None = None
    label: str | None = None
    hardware: str = ""
    unit: str = ""
    note: str = ""
    cell: Cell = {}

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

    def split(self, parameters: Collection[str]) -> Self:
        """Return the row with the figures that are parameters in its cell."""
        at = {name: value for name, value in self.figures.items() if name in parameters}
        kept = {name: value for name, value in self if name not in at}
        return self.model_construct(**{**kept, "cell": {**self.cell, **at}})

    def matches(self, cell: Cell) -> bool:
        return all(name not in cell or cell[name] == value for name, value in self.cell.items())


class Reduced(BaseModel):
    """Replacements in a suite's short form. A parameter in `cell` or `sweep` replaces the suite's own in either."""

    model_config = STRICT

    policies: tuple[str, ...] | None = None
    warmup: int | None = None
    requests: int | None = None
    cell: Mapping[str, Any] = {}
    sweep: Mapping[str, tuple[Any, ...]] = {}
    extra: tuple[Mapping[str, tuple[Any, ...]], ...] | None = None
