"""Tables of docs/*.md, held to committed data by the [[table]] entries of docs/claims.toml.

Numbers of a page's row must all stand in one line of what is committed: a row or a column of one table of a report, of
a packed `ragorder bench --json`, or of a printed text. A table without measurements is declared with the reason.
"""

from __future__ import annotations

import json
import lzma
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from support.claims import CLAIMS, ROOT, numbers, rounds, source_of

__all__ = ["DocTable", "Source", "declared", "doc_tables", "measured", "numberless", "sources", "wrong_rows"]

DOCS = ROOT / "docs"
# A row or a column of one table; one table; all tables of a report with this header; all tables of all the data.
WITHIN = ("line", "table", "alike", "data")

_RULE = re.compile(r"\s*\|(?:\s*:?-+:?\s*\|)+\s*")
_NOT_OURS = re.compile(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)|\(paper[^)]*\)")
_GRID = ("workload", "engine", "order", "top_k", "capacity_tokens", "waiting", "batch", "max_wait", "load")
_FIGURES = {"cached_ratio": 100.0, "displacement_mean": 1.0}

Cells = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class DocTable:
    """A table of the page, `head` its first line, cells without their bars."""

    page: str
    head: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def headings(self) -> tuple[str, ...]:
        return _cells(self.head)

    @property
    def known(self) -> str:
        """What `heading` of an entry begins: tables with the same header differ in their first row."""
        return " | ".join([self.head, *self.rows[0]])


@dataclass(frozen=True, slots=True)
class Source:
    """Where a table's numbers come from. `data`, below docs/: folders of results, packed benchmarks, printed texts.
    `besides` are columns that are not ours to prove, `divide` what the page's units divide the data's by."""

    page: str
    heading: str
    data: tuple[str, ...] = ()
    command: str = ""
    test: str = ""
    why: str = ""
    besides: tuple[str, ...] = ()
    divide: tuple[float, ...] = (1,)
    within: str = "line"


def sources() -> list[Source]:
    fields = tomllib.loads(CLAIMS.read_text("utf-8"))["table"]
    return [Source(**{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()}) for each in fields]


def doc_tables(text: str, page: str) -> list[DocTable]:
    lines = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL).splitlines()
    found = []
    for at, line in enumerate(lines[1:], 1):
        if _RULE.fullmatch(line) and lines[at - 1].lstrip().startswith("|"):
            end = next((each for each in range(at, len(lines)) if not lines[each].lstrip().startswith("|")), len(lines))
            found.append(DocTable(page, lines[at - 1].strip(), tuple(map(_cells, lines[at + 1 : end]))))
    return found


def _cells(line: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def measured(table: DocTable, row: Sequence[str], besides: Sequence[str] = ()) -> list[tuple[float, int]]:
    """Numbers of the row that are the page's own: not its label, code, a link, or what a paper has."""
    cells = [cell for heading, cell in list(zip(table.headings, row, strict=False))[1:] if heading not in besides]
    return [number for cell in cells for number in numbers(_NOT_OURS.sub(" ", cell))]


def numberless(table: DocTable) -> bool:
    """Whether nothing of it is more than a count on one hand or two."""
    every = [number for row in table.rows for number in measured(table, row)]
    return all(not decimals and abs(value) < 10 for value, decimals in every)


def declared(tables: Sequence[DocTable], entries: Sequence[Source]) -> tuple[dict[DocTable, Source], list[str]]:
    """The entry of each table, and what is wrong with them."""
    wrong, pairs = [], {}
    for entry in entries:
        found = [each for each in tables if each.page == entry.page and each.known.startswith(entry.heading)]
        if len(found) != 1:
            wrong.append(f"{entry.page}: {len(found)} tables begin with {entry.heading!r}")
        wrong += [f"{entry.page}: {entry.heading!r} is declared twice" for each in found if each in pairs]
        pairs |= dict.fromkeys(found, entry)
        if (bool(entry.data) + bool(entry.why) + bool(entry.test)) != 1 or bool(entry.data) != bool(entry.command):
            wrong.append(f"{entry.page}: {entry.heading!r} needs data and a command, or a test, or a reason")
        if entry.within not in WITHIN:
            wrong.append(f"{entry.page}: {entry.heading!r} is within {entry.within!r}, which is none of {WITHIN}")
        if entry.test and source_of(entry.test) is None:
            wrong.append(f"{entry.page}: {entry.heading!r}: there is no {entry.test}")
    wrong += [f"{each.page}: {each.head!r} is not declared" for each in tables if each not in pairs]
    return pairs, wrong


def wrong_rows(table: DocTable, entry: Source) -> list[str]:
    """Rows with a number that the data do not have where the others are."""
    pools = [pool for each in entry.data for pool in _pools(each, entry.within)]
    if entry.within == "data":
        pools = [[value for pool in pools for value in pool]]
    wrong = []
    for row in table.rows:
        said = measured(table, row, entry.besides)
        lacking = min((_lacking(said, pool, entry.divide) for pool in pools), key=len)
        if lacking:
            wrong.append(f"{table.page}: {' | '.join(row)}: {', '.join(f'{each:g}' for each in lacking)}")
    return wrong


def _lacking(said: Sequence[tuple[float, int]], pool: Sequence[float], divide: Sequence[float]) -> list[float]:
    return [
        value
        for value, decimals in said
        if not any(rounds(each / by, value, decimals) for by in divide for each in pool)
    ]


@cache
def _pools(data: str, within: str) -> Sequence[Sequence[float]]:
    """Numbers that may prove a row together."""
    tables = [table for _, table in _committed(DOCS / data)]
    if within == "line":
        turned = [zip_longest(*table, fillvalue=()) for table in tables]
        return [[number for cell in line for number in cell] for table in (*tables, *turned) for line in table]
    alike: dict[str, list[float]] = defaultdict(list)
    for at, (head, table) in enumerate(_committed(DOCS / data)):
        alike[head if within == "alike" else str(at)] += [number for line in table for cell in line for number in cell]
    return list(alike.values())


def _committed(place: Path) -> list[tuple[str, Cells]]:
    """Header and numbers of its tables."""
    if place.is_dir():
        found = doc_tables((place / "report.md").read_text("utf-8").replace("\u00a0", " "), place.name)
        of_results = [each for each in found if not each.head.startswith("| session |")]
        return [(each.head, [[_values(cell) for cell in row[1:]] for row in each.rows]) for each in of_results]
    if place.suffix == ".xz":
        return _benched(place)
    return [("", [[_values(line)] for line in place.read_text("utf-8").splitlines()])]


def _values(text: str) -> list[float]:
    return [value for value, _ in numbers(text)]


def _benched(place: Path) -> list[tuple[str, Cells]]:
    """A table for each figure: what was asked down, policies across, the mean over seeds in each cell."""
    with lzma.open(place, "rt", encoding="utf-8") as lines:
        runs = [run for line in lines for run in json.loads(line)["runs"]]
    tables = []
    for figure, scale in _FIGURES.items():
        cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in runs:
            cells[str([run.get(name) for name in _GRID])][run["policy"]].append(scale * run[figure])
        tables.append((figure, [[[fmean(each)] for each in row.values()] for row in cells.values()]))
    return tables
