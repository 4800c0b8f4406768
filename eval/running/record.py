"""Records: the lines of results.jsonl, shared by the store and the report.

Every measurement is a `Record` told apart by `type`; an experiment adds a subclass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, create_model, model_validator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

RESULTS = "results.jsonl"
SCHEMA = 1

Cell = Mapping[str, Any]
Key = tuple[tuple[str, str], ...]
"""A cell that can be compared and hashed: its parameters by name, as JSON."""

_Object = Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})]


def key_of(cell: Cell) -> Key:
    return tuple(sorted((name, json.dumps(value, sort_keys=True)) for name, value in cell.items()))


class _Line(BaseModel):
    # Fields that a later version adds are kept; identifiers that were written as numbers are read.
    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True)

    def line(self) -> dict[str, Any]:
        """The fields that were given."""
        return self.model_dump(exclude_unset=True)


class SessionRecord(_Line):
    """One invocation: its arguments and the machine."""

    type: Literal["session"] = "session"
    schema_version: int = Field(SCHEMA, alias="schema")
    session: str
    started: str = ""
    arguments: _Object = {}
    environment: _Object = {}

    @property
    def id(self) -> str:
        return self.session

    def line(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, by_alias=True)


class UnavailableRecord(_Line):
    """A policy that could not be measured in a cell (empty: in the whole suite)."""

    type: Literal["unavailable"] = "unavailable"
    session: str = ""
    suite: str
    cell: _Object = {}
    policy: str
    reason: str = "no reason given"


class CheckRecord(_Line):
    """A named finding, with figures as further fields."""

    type: Literal["check"] = "check"
    name: str


class Record(_Line):
    """One policy in one cell with one seed; `rows` has a column for each figure, an entry per request."""

    called: ClassVar[str] = "a measurement"
    """In a message about a second one."""
    identified_by: ClassVar[tuple[str, ...]] = ("suite", "cell", "engine", "seed", "policy")
    """Two records that agree in these measure the same."""
    is_run: ClassVar[bool] = True
    """Whether the report counts it among the runs."""
    columns_of_all: ClassVar[tuple[str, ...]] = ()
    facts_needed: ClassVar[tuple[str, ...]] = ()

    type: str
    session: str = ""
    suite: str
    cell: _Object = {}
    seed: int = 0
    policy: str
    engine: _Object = {}
    warmup: int = 0
    rows: dict[str, Any]
    facts: _Object = {}
    load_average: float | None = None

    _columns: dict[object, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        columns = [self.rows.get(name) for name in self.columns_needed]
        if None in columns or len({len(column) for column in columns if column is not None}) > 1:
            raise ValueError("columns are missing, or of different lengths")
        if not self.facts.keys() >= set(self.facts_needed):
            raise ValueError("facts are missing")
        return self

    @property
    def columns_needed(self) -> tuple[str, ...]:
        """Columns of one length."""
        return self.columns_of_all

    @property
    def identity(self) -> tuple[object, ...]:
        values = (getattr(self, name) for name in self.identified_by)
        return self.type, *(key_of(value) if isinstance(value, dict) else value for value in values)

    @property
    def requests(self) -> int:
        return len(self.rows[self.columns_of_all[0]]) if self.columns_of_all else 0

    def column(self, name: str) -> Floats | None:
        """The figures after the warm-up, NaN where one is missing; None without any."""
        import numpy as np

        if name not in self._columns:
            values = self.rows.get(name)
            column = None if values is None else as_column(values)[self.warmup :]
            self._columns[name] = column if column is not None and np.isfinite(column).any() else None
        found: Floats | None = self._columns[name]
        return found

    @property
    def block_size(self) -> int:
        return int(self.engine.get("block_size") or 1)


class RunRecord(Record):
    called: ClassVar[str] = "a run"

    type: Literal["run"] = "run"
    failures: int = 0
    fallbacks: Annotated[int, BeforeValidator(lambda value: value or 0)] = 0
    throughput: Mapping[str, Any] | None = None
    timeline: Any = None

    @model_validator(mode="before")
    @classmethod
    def _known_columns(cls, line: Any) -> Any:
        if isinstance(line, dict) and isinstance(line.get("rows"), dict):
            columns = {
                name: values for name, values in line["rows"].items() if values is None or isinstance(values, list)
            }
            return {**line, "rows": columns}
        return line

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        for name in self.rows:
            self.column(name)
        return self

    @property
    def requests(self) -> int:
        import numpy as np

        column = self.column("prompt_tokens")
        return 0 if column is None else int(np.isfinite(column).sum())


def declared_record(
    base: type[Record], kind: str, columns: tuple[str, ...], facts: tuple[str, ...], *, runs: bool
) -> type[Record]:
    """Return the record whose type is the kind; a `RunRecord` is counted among the runs in any case."""
    fields: Any = {"type": (Literal[kind], kind)}
    made: type[Record] = create_model(kind, __base__=base, **fields)
    made.is_run = runs or issubclass(base, RunRecord)
    made.columns_of_all, made.facts_needed = columns, facts
    return made


def as_column(values: Iterable[Any]) -> Floats:
    """Figures as an array, NaN for None. Raises TypeError or ValueError."""
    import numpy as np

    return np.array([np.nan if value is None else value for value in values], dtype=float)


def json_schema(records: Iterable[type[Record]]) -> dict[str, Any]:
    """The JSON schema of a line."""
    from functools import reduce
    from operator import or_

    from pydantic import TypeAdapter

    union: Any = reduce(or_, [SessionRecord, UnavailableRecord, CheckRecord, *records])
    return TypeAdapter(Annotated[union, Field(discriminator="type")]).json_schema()
