"""Claims of README and docs/, held to committed data: `python -m support.claims` (`--write`: render docs/claims.md).

docs/claims.toml names for each claim the entries of the report that it is read from. They are recomputed from the
raw results, by the code that makes reports, and every number of the claim must be one of theirs, rounded. A bound that
a test asserts is claimed with the test, and must stand in its source.
"""

from __future__ import annotations

import ast
import json
import lzma
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ragorder.eval.report.tables import Table

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "docs" / "claims.toml"

_NUMBER = re.compile(r"(?<![\w.,])([−-]?)(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?!\w)")
KINDS = ("measured", "simulated", "simulated with guessed costs")
_UNDECIDED = ("no difference", "not decided")


@dataclass(frozen=True, slots=True)
class Claim:
    """`figure` and `interval` as pages write them; `kind` is one of `KINDS`. `entries` are (row, column) of `table`, in
    the report on `suite`; `where` are runs in a file of JSON lines, instead, by the cached ratio. `note` is a part of
    what stands below the table."""

    claim: str
    figure: str
    kind: str
    pages: tuple[str, ...]
    data: str
    command: str
    interval: str = ""
    suite: str = ""
    table: str = ""
    entries: tuple[tuple[str, str], ...] = ()
    where: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    divide: float = 1

    @property
    def words(self) -> str:
        return f"{self.figure} {self.interval}"


@dataclass(frozen=True, slots=True)
class Bound:
    """What a test asserts: `asserts` is a part of its source with the number of `figure`."""

    claim: str
    figure: str
    pages: tuple[str, ...]
    test: str
    asserts: str


def bounds() -> list[Bound]:
    fields = tomllib.loads(CLAIMS.read_text("utf-8"))["bound"]
    return [Bound(**{name: frozen(value) for name, value in each.items()}) for each in fields]


def unproved(bound: Bound) -> str | None:
    """What the test's source lacks."""
    source = source_of(bound.test)
    if source is None:
        return f"{bound.claim}: there is no {bound.test}"
    if bound.asserts not in source:
        return f"{bound.claim}: {bound.test} does not assert {bound.asserts}"
    asserted = {number for value, _ in numbers(bound.asserts) for number in (value, round(100 * value, 9))}
    wrong = [value for value, _ in numbers(bound.figure) if value not in asserted]
    return f"{bound.claim}: {wrong} is not in {bound.asserts}" if wrong else None


def source_of(test: str) -> str | None:
    """That of `file::Class::name`, if it is there."""
    file, *names = test.split("::")
    nodes: list[Any] = [ast.parse((ROOT / file).read_text("utf-8"))]
    for name in names:
        nodes = [each for node in nodes for each in node.body if getattr(each, "name", None) == name]
    return ast.unparse(nodes[0]) if nodes else None


def claims() -> list[Claim]:
    fields = tomllib.loads(CLAIMS.read_text("utf-8"))["claim"]
    return [Claim(**{name: frozen(value) for name, value in each.items()}) for each in fields]


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def numbers(text: str) -> list[tuple[float, int]]:
    """Each number with its count of decimals. A hyphen or a minus sign directly in front belongs to it."""
    found = []
    for sign, digits in _NUMBER.findall(text):
        value = float(digits.replace(",", ""))
        found.append((-value if sign else value, len(digits.partition(".")[2])))
    return found


def problems(claim: Claim) -> list[str]:
    """What the data say otherwise; empty if they say the same."""
    said = [_found(claim, row, column) for row, column in claim.entries] + [_share(claim, each) for each in claim.where]
    missing = [each for each in said if each.startswith("?")]
    if missing:
        return missing
    note = any(claim.note in table.note for table in _tables(claim))
    text = " ; ".join(said or [claim.note])
    wrong = [] if claim.kind in KINDS else [f"{claim.claim}: kind is {claim.kind!r}, give one of {KINDS}"]
    wrong += [
        f"{claim.claim}: {value:g} is none of: {text}"
        for value, decimals in numbers(claim.words)
        if not any(rounds(other / claim.divide, value, decimals) for other, _ in numbers(text))
    ]
    if claim.note and not note:
        wrong.append(f"{claim.claim}: the table's note lacks: {claim.note}")
    if any("no difference" in each for each in said) and not any(word in claim.words for word in _UNDECIDED):
        wrong.append(f"{claim.claim}: the data decide nothing: {text}")
    return wrong


def rounds(found: float, claimed: float, decimals: int) -> bool:
    return abs(found - claimed) <= 0.5 * 10.0**-decimals + 1e-9


def _tables(claim: Claim) -> list[Table]:
    if not claim.suite:
        return []
    found = [each for each in tables_of(claim.data, claim.suite) if each.title == claim.table]
    # A suite with several cells has a table of this title for each.
    return [each for each in found if claim.note in each.note] if len(found) > 1 else found


def _found(claim: Claim, row: str, column: str) -> str:
    for table in _tables(claim):
        if column not in table.headings:
            continue
        for entries in table.rows:
            labels = [entry.text.replace("\u00a0", " ") for entry in entries[: table.labels]]
            if row in (", ".join(filter(None, labels)), labels[0]):
                entry = entries[list(table.headings).index(column)]
                return " ".join(filter(None, (entry.text, entry.note, entry.verdict)))
    return f"? {claim.claim}: {claim.data} has no {row!r} with {column!r} in a table {claim.table!r} of {claim.suite}"


@cache
def tables_of(data: str, suite: str) -> list[Table]:
    """Of the report on this suite, without its pictures."""
    from ragorder.eval.report.part import part_of
    from ragorder.eval.running.reading import read_results
    from ragorder.eval.running.suite import Suite, experiments, load_suites

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.jsonl"
        with file.open("w", encoding="utf-8") as kept:
            kept.writelines(_lines(ROOT / "docs" / data / "results.jsonl.xz", suite))
        results = read_results(file)
    own = {name: info for each in experiments().values() for name, info in each.own_suites().items()}
    info = load_suites().get(suite) or own.get(suite) or Suite.unlisted(suite)
    parts = (
        part_of(experiment, info, results)
        for kind, experiment in experiments().items()
        if kind == info.kind or results.of(experiment.record, suite)
    )
    return [table for part in parts if part is not None for table in part.tables]


def _lines(file: Path, suite: str) -> Iterator[str]:
    """Those of sessions and of the suite: reading the others takes most of the time."""
    named = re.compile(rf'"suite": ?"{re.escape(suite)}"')
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            if '"type":"session"' in line or '"type": "session"' in line or named.search(line):
                yield line


def _share(claim: Claim, where: Mapping[str, Any]) -> str:
    with lzma.open(ROOT / "docs" / claim.data, "rt", encoding="utf-8") as lines:
        runs = [run for line in lines for run in json.loads(line)["runs"]]
    found = [run for run in runs if all(run[name] == value for name, value in {"max_wait": None, **where}.items())]
    if not found:
        return f"? {claim.claim}: {claim.data} has no run {dict(where)}"
    return str(100 * fmean(run["cached_ratio"] for run in found))


def page(every: Sequence[Claim]) -> str:
    """docs/claims.md."""
    from support.doc_tables import section, sources  # which reads with this module

    rows = [_row(each) for each in every]
    held = [f"| {each.claim} ({_pages(each.pages)}) | {each.figure} | `{each.test}` |" for each in bounds()]
    tables = section(sources())
    return "\n".join([_INTRO.format(count=len(every)), *_HEAD, *rows, "", _TESTED, *_HELD, *held, "", *tables, ""])


_INTRO = """# Claims

*Reference: each number of the README, then the headline numbers of these pages, with the raw results that they are read
from, the command that measures them again, and the interval.*

```
make claims                                              # computes all {count} again from the committed results
PYTHONPATH=tests python -m support.claims --write        # renders this page from claims.toml
```

`make claims` names the claims that differ from the results; `make test` holds every number of the README to this table.

*Measured*: with a real engine or real parts. *Simulated*: cached tokens of a simulated cache or fleet, exact for its
model. *Guessed costs*: times of a simulation whose costs were guessed.

Intervals are 95 % intervals of the paired difference, requests in blocks, within seeds, or over seeds where the page
says so: they speak of traces like these on this machine. *Not decided*, or *no difference*: the interval has zero in
it, or 1 where one figure is divided by another.
"""
_HEAD = ("| claim | figure | interval | how | raw results | command |", "|---|---|---|---|---|---|")
_TESTED = """## Held by tests

Bounds that a test asserts, in `make test` or, if it is slow, in `make test-all`.
"""
_HELD = ("| claim | bound | test |", "|---|---|---|")


def _row(claim: Claim) -> str:
    place = f"[{claim.data.removeprefix('results/')}]({claim.data}/report.md)" if claim.suite else f"`{claim.data}`"
    where = f"{place}, {claim.suite}" if claim.suite else place
    interval = "; ".join(filter(None, (claim.interval, claim.note.rstrip(".")))) or "–"
    cells = (f"{claim.claim} ({_pages(claim.pages)})", claim.figure, interval, claim.kind, where, f"`{claim.command}`")
    return f"| {' | '.join(cells)} |"


def _pages(names: Sequence[str]) -> str:
    return ", ".join(name.removesuffix(".md") for name in names)


def main(write: bool) -> int:
    from support.doc_tables import sources, table_problems

    every = claims()
    if write:
        (ROOT / "docs" / "claims.md").write_text(page(every), "utf-8")
        return 0
    found = [problem for claim in every for problem in problems(claim)]
    found += [*filter(None, map(unproved, bounds())), *table_problems()]
    counts = f"{len(every)} claims, {len(bounds())} bounds, {len(sources())} tables, {len(found)} problems"
    click.echo("\n".join([*found, counts]))
    return min(1, len(found))


if __name__ == "__main__":
    raise SystemExit(main("--write" in sys.argv[1:]))
