"""The record of `ragorder bench --pipeline`, and its part of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ragorder.eval.report.compared import Compared
from ragorder.eval.report.metrics import TTFT_P50
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference, compare, summary
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, change_words, format_number, policy_words, verdict_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record, as_column, key_of
from ragorder.eval.running.suite import Kind, Suite

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

_PLAYED = (
    "TTFT counts from the question. Exposed: retrieval that overlaps with nothing, mean. Right: of the speculations, "
    "those taken for the answer; wasted: prompt tokens of the others."
)


class ModesRecord(Record):
    """Rows by mode and column, None for a request that failed."""

    rows: dict[str, dict[str, list[Any]]]

    @model_validator(mode="after")
    def _even(self) -> Self:
        if len({len(values) for columns in self.rows.values() for values in columns.values()}) != 1:
            raise ValueError("columns of different lengths")
        return self

    @property
    def requests(self) -> int:
        return sum(len(self.figures(mode, "ttft_ms")) for mode in self.rows)

    def figures(self, mode: str, name: str) -> Floats:
        """Numbers of a mode after the warm-up, NaN for None."""
        return as_column(self.rows.get(mode, {}).get(name, ()))[self.warmup :]


class PipelinesRecord(ModesRecord):
    """One order of documents on one trace."""

    called: ClassVar[str] = "a benchmark of pipelines"

    type: Literal["pipelines"] = "pipelines"


_Group = Sequence[PipelinesRecord]


class Pipelines(Kind):
    kind = "pipelines"
    record = PipelinesRecord

    @classmethod
    def own_suites(cls) -> Mapping[str, Suite]:
        return {"bench-pipelines": Suite.unlisted("bench-pipelines", "Pipelines")}


def make_part(suite: Suite, results: Results) -> Part:
    groups: dict[object, list[PipelinesRecord]] = {}
    for line in results.of(PipelinesRecord, suite.name):
        groups.setdefault((key_of(line.cell), key_of(line.engine), line.policy), []).append(line)
    compared = []
    for mode, words in (("warmup", "warm-up"), ("speculative", "speculation")):
        chosen = [lines for lines in groups.values() if mode in lines[0].rows]
        cells = [(_label(lines[0]), found) for lines in chosen if (found := _compare(lines, mode)) is not None]
        compared += [Compared(TTFT_P50, words, f"no {words}", cells)] if cells else []
    return Part([_table([*groups.values()])], compared=compared)


def _compare(lines: _Group, mode: str) -> PairedDifference | None:
    sides = [[line.figures(each, "ttft_ms") for line in lines] for each in ("none", mode)]
    return compare(*sides, statistic="p50", relative=True, better="lower") if mode != "none" else None


def _table(groups: Sequence[_Group]) -> Table:
    headings = ["retrieval", "mode", "TTFT p50, ms", "TTFT p95, ms", "exposed, ms", "cached, %", "right"]
    table = Table("Retrieval before the prompt", [*headings, "tokens wasted", "failed"], labels=2, note=_PLAYED)
    for lines in groups:
        for mode in lines[0].rows:
            times = summary([value for line in lines for value in line.figures(mode, "ttft_ms")])
            exposed = summary([value for line in lines for value in line.figures(mode, "exposed_ms")])
            cached, prompts, right, begun, wasted = (
                _known_sum(lines, mode, name)
                for name in ("cached_tokens", "prompt_tokens", "right", "speculations", "wasted_prompt_tokens")
            )
            found = _compare(lines, mode)
            table.add(
                _label(lines[0]),
                mode,
                Entry(
                    format_number(times.p50 if times else None),
                    change_words(found) if found else "baseline",
                    verdict_words(found) if found else "",
                ),
                format_number(times.p95 if times else None),
                format_number(exposed.mean if exposed else None),
                format_number(100 * cached / prompts if prompts else None),
                f"{right:,.0f} of {begun:,.0f}",
                f"{wasted:,.0f}",
                f"{sum(line.rows[mode]['ttft_ms'].count(None) for line in lines):,}",
            )
    return table


def _label(line: PipelinesRecord) -> str:
    cell = line.cell
    load = f", {cell['concurrency']} in flight" if cell.get("concurrency") else ""
    return f"{cell['workload']}, {policy_words(cell['order'])}, {cell['retrieval_ms']:g}{THIN}ms{load}"


def _known_sum(lines: _Group, mode: str, name: str) -> float:
    return float(sum(value or 0 for line in lines for value in line.rows[mode][name]))
