"""Tables declared by their columns, with a row for each policy of a group unless they say otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import format_number, range_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Experiment, Suite

Figure = str | Callable[[Any], float | None]
"""The name of a fact, or a function of a record."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in a group of records."""

    block: Block
    group: RecordGroup[Any]
    policy: str

    @property
    def cell(self) -> Any:
        """The group's cell, with its defaults."""
        return self.block.read(self.group)

    @property
    def runs(self) -> list[Any]:
        return self.group.runs(self.policy)

    def values(self, of: Figure, policy: str | None = None) -> list[float]:
        """Return the figure of each run that has it, of another policy of the group if one is named."""
        runs = self.runs if policy is None else self.group.runs(policy)
        found = (run.facts.get(of) if isinstance(of, str) else of(run) for run in runs)
        return [value for value in found if value is not None]

    def mean(self, of: Figure, policy: str | None = None) -> float | None:
        """Return the mean of these figures, or None without any."""
        found = self.values(of, policy)
        return fmean(found) if found else None


@dataclass(frozen=True, slots=True)
class Block:
    """The groups of one table."""

    experiment: type[Experiment]
    suite: Suite
    groups: Sequence[RecordGroup[Any]]

    def __getitem__(self, name: str) -> Any:
        """Return the property that a text of the table names in braces."""
        return getattr(self, name)

    def read(self, group: RecordGroup[Any]) -> Any:
        return self.experiment.cell.read(group.cell, self.suite.name)

    @property
    def cell(self) -> Any:
        """The cell of the first group, with its defaults."""
        return self.read(self.groups[0])

    @property
    def runs(self) -> list[Any]:
        return [run for group in self.groups for run in group.runs()]

    @property
    def first(self) -> Any:
        """The first record."""
        return self.runs[0]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len({seed for group in self.groups for seed in group.seeds})


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    entry: Callable[[Row], str | Entry]


Text = str | Callable[[Block], str]
"""A text with properties of the table's `Block` in braces, as in "{cell.top_k} documents", or what writes it."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """The columns of a table. Each group has a table to itself, or all groups that agree in the cell's parameters `by`
    have one, sorted by those of `sort`. The first `labels` columns hold words. Rows follow `policies`, by default the
    order measured. Columns that are texts are headings of what `rows` yields."""

    title: Text
    columns: Sequence[Column | str] | Callable[[Block], Sequence[Column | str]]
    note: Text = ""
    labels: int = 1
    by: Sequence[str] | None = None
    sort: Sequence[str] = ()
    policies: Sequence[str] = ()
    rows: Callable[[Block], Iterable[Sequence[str | Entry]]] | None = None

    def blocks(self, experiment: type[Experiment], suite: Suite, results: Results) -> Iterator[Block]:
        all_of_them = Block(experiment, suite, group_runs(results.of(experiment.record, suite.name)))
        groups = list(all_of_them.groups)
        if self.sort:
            groups.sort(key=lambda group: [getattr(all_of_them.read(group), name) for name in self.sort])
        together: dict[object, list[RecordGroup[Any]]] = {}
        for group in groups:
            alike = None if self.by is None else all_of_them.read(group)
            key = id(group) if self.by is None else tuple(repr(getattr(alike, name)) for name in self.by)
            together.setdefault(key, []).append(group)
        yield from (Block(experiment, suite, each) for each in together.values())

    def table(self, block: Block) -> Table:
        columns = self.columns if isinstance(self.columns, Sequence) else self.columns(block)
        headings = [column if isinstance(column, str) else column.heading for column in columns]
        table = Table(headings=headings, labels=self.labels)
        for fields in self._rows(block, columns) if self.rows is None else self.rows(block):
            table.add(*fields)
        if table.rows:
            table.title, table.note = _written(self.title, block), _written(self.note, block)
        return table

    def _rows(self, block: Block, columns: Sequence[Any]) -> Iterator[Sequence[str | Entry]]:
        for group in block.groups:
            for each in self.policies or group.policies:
                if each in group.policies:
                    yield [column.entry(Row(block, group, each)) for column in columns]


def tables_of(experiment: type[Experiment], suite: Suite, results: Results) -> list[Table]:
    """Return the tables with rows that the experiment declares, form by form; forms in a list share the first one's
    blocks, and take turns."""
    found: list[Table] = []
    for declared in experiment.tables:
        forms = [declared] if isinstance(declared, TableForm) else declared
        for block in forms[0].blocks(experiment, suite, results):
            found += (table for form in forms if (table := form.table(block)).rows)
    return found


def policy_column(heading: str = "policy", words: Mapping[str, str] | None = None) -> Column:
    """Return the column of policies, in these words."""
    return Column(heading, lambda row: (words or {}).get(row.policy, row.policy))


def figure(
    heading: str,
    of: Figure,
    decimals: int = 1,
    *,
    scale: float = 1,
    over: Callable[[Sequence[float]], float] = fmean,
    spread: bool = False,
) -> Column:
    """Return a column of a figure `over` the seeds, with the least and the most below it if they are `spread`."""

    def entry(row: Row) -> Entry:
        found = [scale * value for value in row.values(of)]
        note = range_words(found, decimals) if spread and found else ""
        return Entry(format_number(over(found) if found else None, decimals), note)

    return Column(heading, entry)


def ratio(
    heading: str,
    of: Figure,
    to: str | Callable[[Row], float | None],
    decimals: int = 2,
    *,
    scale: float = 1,
    tone: Callable[[Row, float], Tone] = lambda row, value: "",
) -> Column:
    """Return a column of the mean as a multiple of another policy's, or of what `to` finds; `tone` gets it."""

    def entry(row: Row) -> Entry:
        mean, base = row.mean(of), row.mean(of, to) if isinstance(to, str) else to(row)
        if mean is None or not base:
            return Entry(format_number(None))
        value = scale * mean / base
        return Entry(format_number(value, decimals), tone=tone(row, value))

    return Column(heading, entry)


def _written(text: Text, block: Block) -> str:
    return text.format_map(block) if isinstance(text, str) else text(block)
