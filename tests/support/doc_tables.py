"""Tables of docs/*.md, held to committed data by the [[table]] entries of docs/claims.toml.

Numbers of a page's row must stand together in what is committed: a table of a report, packed lines of `ragorder bench`,
or a printed text. A table without measurements, or without data, is declared with the reason.
"""

from __future__ import annotations

import json
import lzma
import re
import tomllib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from support.claims import CLAIMS, ROOT, frozen, numbers, source_of

DOCS = ROOT / "docs"
# What must stand together. In a row or a column of the data: a row of the page, the numbers at one place of its cells,
# those of a column's cells. A row anywhere in one table, in tables with one header, in any.
WITHIN = ("line", "across", "down", "table", "alike", "data")

_RULE = re.compile(r"\s*\|(?:\s*:?-+:?\s*\|)+\s*")
_NOT_OURS = re.compile(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)|\(paper[^)]*\)")
_GRID = ("workload", "engine", "order", "top_k", "capacity_tokens", "waiting", "batch", "max_wait", "load")
_FIGURES = {"cached_ratio": 100.0, "displacement_mean": 1.0}

# Whether there are data or a test, a reason, and columns that are left out: these alone may have a reason beside data.
_COMPLETE = ((True, False, False), (True, False, True), (True, True, True), (False, True, False))

Cells = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class DocTable:
    """A table of the page, below the heading `title`, `head` its first line, cells without their bars."""

    page: str
    title: str
    head: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def headings(self) -> tuple[str, ...]:
        return _cells(self.head)

    @property
    def known(self) -> str:
        """What `heading` of an entry begins: tables with the same header differ in their first row."""
        return " | ".join([self.head, *next(iter(self.rows), ())])


@dataclass(frozen=True, slots=True)
class Said:
    """A number of a page: its decimals, what its unit divides the data's by, its column and its place in the cell."""

    value: float
    decimals: int
    divide: float
    at: tuple[int, int]

    def stands(self, pool: Sequence[float]) -> bool:
        """In sorted numbers, rounded."""
        half = 0.5 * 10.0**-self.decimals + 1e-9
        at = bisect_left(pool, (self.value - half) * self.divide)
        return at < len(pool) and pool[at] <= (self.value + half) * self.divide


@dataclass(frozen=True, slots=True)
class Source:
    """Where a table's numbers come from. `heading` is the beginning of its header, and of its first row behind that.
    `data`, below docs/: folders of results, packed benchmarks, printed texts. `besides` are columns that the data do
    not have, such as a paper's; `divide` is by what a column's unit divides the data; `tables` are titles of those of a
    report that count."""

    page: str
    heading: str
    data: tuple[str, ...] = ()
    command: str = ""
    test: str = ""
    why: str = ""
    besides: tuple[str, ...] = ()
    divide: Mapping[str, float] = field(default_factory=dict)
    within: str = "line"
    tables: tuple[str, ...] = ()


def sources() -> list[Source]:
    fields = tomllib.loads(CLAIMS.read_text("utf-8"))["table"]
    return [Source(**{name: frozen(value) for name, value in each.items()}) for each in fields]


def doc_tables(text: str, page: str) -> list[DocTable]:
    lines = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL).splitlines()
    found, title = [], ""
    for at, line in enumerate(lines[1:], 1):
        title = line.lstrip("# ") if line.startswith("#") else title
        if _RULE.fullmatch(line) and lines[at - 1].lstrip().startswith("|"):
            end = next((each for each in range(at, len(lines)) if not lines[each].lstrip().startswith("|")), len(lines))
            found.append(DocTable(page, title, lines[at - 1].strip(), tuple(map(_cells, lines[at + 1 : end]))))
    return found


def _cells(line: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def measured(table: DocTable, row: Sequence[str], entry: Source | None = None) -> list[Said]:
    """Numbers of the row that are the page's own: not its label, code, a link, or what a paper has."""
    besides, divide = (entry.besides, entry.divide) if entry else ((), {})
    return [
        Said(value, decimals, divide.get(heading, 1), (column, place))
        for column, (heading, cell) in enumerate(zip(table.headings, row, strict=False))
        if column and heading not in besides
        for place, (value, decimals) in enumerate(numbers(_NOT_OURS.sub(" ", cell)))
    ]


def numberless(table: DocTable) -> bool:
    """Whether nothing of it is more than a count on one hand or two."""
    every = [number for row in table.rows for number in measured(table, row)]
    return all(not each.decimals and abs(each.value) < 10 for each in every)


def declared(tables: Sequence[DocTable], entries: Sequence[Source]) -> tuple[dict[DocTable, Source], list[str]]:
    """The entry of each table, and what is wrong with them."""
    wrong: list[str] = []
    pairs: dict[DocTable, Source] = {}
    for entry in entries:
        found = [each for each in tables if each.page == entry.page and each.known.startswith(entry.heading)]
        if len(found) != 1:
            wrong.append(f"{entry.page}: {len(found)} tables begin with {entry.heading!r}")
        wrong += [f"{entry.page}: {entry.heading!r} is declared twice" for each in found if each in pairs]
        pairs |= dict.fromkeys(found, entry)
        proved = bool(entry.data or entry.test)
        if (proved, bool(entry.why), bool(entry.besides)) not in _COMPLETE or bool(entry.data) != bool(entry.command):
            wrong.append(f"{entry.page}: {entry.heading!r} needs data and a command, or a test, or else a reason")
        if entry.within not in WITHIN:
            wrong.append(f"{entry.page}: {entry.heading!r} is within {entry.within!r}, which is none of {WITHIN}")
        if entry.test and source_of(entry.test) is None:
            wrong.append(f"{entry.page}: {entry.heading!r}: there is no {entry.test}")
    wrong += [f"{each.page}: {each.head!r} is not declared" for each in tables if each not in pairs]
    return pairs, wrong


def every_table() -> list[DocTable]:
    """Those with numbers, but for what this file renders, and for reports."""
    pages = [path for path in sorted(DOCS.glob("*.md")) if path.name != "claims.md"]
    found = [each for path in pages for each in doc_tables(path.read_text("utf-8"), path.name)]
    return [each for each in found if not numberless(each)]


def table_problems() -> list[str]:
    pairs, wrong = declared(every_table(), sources())
    return wrong + [each for table, entry in pairs.items() if entry.data for each in wrong_numbers(table, entry)]


def section(entries: Sequence[Source]) -> list[str]:
    """Lines of docs/claims.md."""
    return [*_INTRO.splitlines(), *map(_row, entries)]


_INTRO = """## Tables

Each table of these pages with numbers. Those of a row, or those at one place of a column's cells, stand together in a
line or a table of the report; `make test` compares them. *no raw data*: the numbers are those that the command printed
once; its results were not kept.

| page | table | raw results, or why there are none | command |
|---|---|---|---|"""


def _row(entry: Source) -> str:
    links = [f"[{each.removeprefix('results/')}]({each}/report.md)" for each in entry.data if (DOCS / each).is_dir()]
    files = [f"`{each}`" for each in entry.data if not (DOCS / each).is_dir()]
    tests = [f"`{entry.test}`"] if entry.test else []
    where = "; ".join(filter(None, (", ".join([*links, *files, *tests]), entry.why)))
    label = ", ".join(filter(None, map(str.strip, entry.heading.split("|"))))
    command = f"`{entry.command}`" if entry.command else "–"
    return f"| [{entry.page.removesuffix('.md')}]({entry.page}) | {label} | {where} | {command} |"


def wrong_numbers(table: DocTable, entry: Source) -> list[str]:
    """Those that the data do not have where the others are."""
    pools = [pool for each in entry.data for pool in _pools(each, entry.within, entry.tables)]
    if entry.within == "data":
        pools = [sorted(value for pool in pools for value in pool)]
    wrong = []
    for label, together in _together(table, entry).items():
        lacking = min((_lacking(together, pool) for pool in pools or [[]]), key=len)
        if lacking:
            wrong.append(f"{table.page}: {table.head[:60]}: {label}: {', '.join(f'{each:g}' for each in lacking)}")
    return wrong


def _together(table: DocTable, entry: Source) -> dict[str, list[Said]]:
    """Numbers that must stand together, by where they are on the page."""
    found: dict[str, list[Said]] = defaultdict(list)
    for at, row in enumerate(table.rows):
        for said in measured(table, row, entry):
            column, place = said.at
            labels = {"down": f"{table.headings[column]} {said.at}", "across": f"{row[0]} {at, place}"}
            found[labels.get(entry.within, f"{row[0]} {at}")].append(said)
    return found


def _lacking(together: Sequence[Said], pool: Sequence[float]) -> list[float]:
    return [said.value for said in together if not said.stands(pool)]


@cache
def _pools(data: str, within: str, titles: tuple[str, ...] = ()) -> list[list[float]]:
    """Numbers that may prove others together, in their order."""
    tables = [(head, table) for title, head, table in _committed(data) if title in titles or not titles]
    if within in ("line", "down", "across"):
        alike: dict[str, list[Cells]] = defaultdict(list)
        for head, table in tables:
            alike[head].append(table)
        # A suite has a table for each cell: the same figure stands in the same column of each.
        joined = [[line for table in each for line in table] for each in alike.values()]
        turned = [zip_longest(*table, fillvalue=()) for table in (*(table for _, table in tables), *joined)]
        lines = (line for table in (*(table for _, table in tables), *turned) for line in table)
        return [sorted(number for cell in line for number in cell) for line in lines]
    pools: dict[str, list[float]] = defaultdict(list)
    for at, (head, table) in enumerate(tables):
        pools[head if within == "alike" else str(at)] += [number for line in table for cell in line for number in cell]
    return [sorted(pool) for pool in pools.values()]


@cache
def _committed(data: str) -> list[tuple[str, str, Cells]]:
    """Title, header and numbers of each table."""
    place = DOCS / data
    if place.suffix == ".xz":
        return _benched(place)
    text = (place / "report.md" if place.is_dir() else place).read_text("utf-8").replace("\u00a0", " ")
    found = doc_tables(text, data)
    if not found:
        return [("", "", [[[value] for value in _values(line)] for line in text.splitlines()])]
    return [(each.title, each.head, [[_values(cell) for cell in row[1:]] for row in each.rows]) for each in found]


def _values(text: str) -> list[float]:
    return [value for value, _ in numbers(text)]


def _benched(place: Path) -> list[tuple[str, str, Cells]]:
    """A table for each figure: what was asked down, policies across, the mean over seeds in each cell."""
    with lzma.open(place, "rt", encoding="utf-8") as lines:
        runs = [run for line in lines for run in json.loads(line)["runs"]]
    tables: list[tuple[str, str, Cells]] = []
    for figure, scale in _FIGURES.items():
        cells: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for run in runs:
            cells[str([run.get(name) for name in _GRID])][run["policy"]][run["seed"]] = scale * run[figure]
        tables.append((figure, "", [[[fmean(each.values())] for each in row.values()] for row in cells.values()]))
    return tables
