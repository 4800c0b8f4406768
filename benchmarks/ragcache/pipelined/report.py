"""Tables of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragorder.benchmarks.ragcache.pipelined.experiment import PipeliningRecord
from ragorder.eval.report.compared import Compared
from ragorder.eval.report.metrics import TBT_P50, TTFT_P50, Metric
from ragorder.eval.report.paper import number
from ragorder.eval.report.part import Part
from ragorder.eval.report.statistics import PairedDifference, compare, summary
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import (
    THIN,
    change_words,
    format_number,
    interval_words,
    seeds_by_row,
    served_words,
    signed,
    verdict_words,
)
from ragorder.eval.running.cells import PaperLine
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import key_of
from ragorder.eval.running.suite import Suite

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

_SLACK = 0.10
_LESS = 0.02
_COLD = (
    "Every request has a salt of its own, so that the system prompt is never cached: each one is a cold start. "
    "Retrieval is a pause. Medians; in brackets 95 % intervals of the ratio of medians. The bound is "
    "max(T_ret, T_sys) + T_docs of each request; T_sys (the system prompt by itself) and T_docs (the whole prompt "
    "after it) were measured in turn with both modes. It holds if the median is at most 10 % above."
)
_SPECULATION = (
    "T2 is the search before the answer, T1 what is left of it with speculation (RAGCache Table 3): means, one "
    "request at a time. Embedding the question counts in neither. Each mode is a tenant with a cache of its own. A "
    "search is stretched: each stage of the real one waits for its share of the time, as for a database on another "
    "machine. Extra prefill: prompt tokens that the server says it computed, beyond those without speculation. "
    "Cautious: as ragorder speculates by default, only where recent searches say that it saves more than it may cost."
)
_STAGES = (
    "Of the speculations that began after a stage, how many were right: taken for the answer. After the last stage "
    "there is nothing left to speculate on. Of cautious ones it is not kept after which stage they began."
)
_THROUGHPUT = (
    "A closed loop: each client asks again as soon as it is answered. Segments of the same questions with and without "
    "speculation take turns; the interval is over segments, each without its beginning and end. Offered: what the "
    "clients would ask for if a request took no longer than alone, in terms of what is served. Refused: of the "
    "occasions to speculate, those for which the engine had too much to do."
)
_BETWEEN = (
    "Of answers of several tokens (RAGCache 5.4): each answer's mean, or under saturation that of a segment's answers. "
    "Tokens that speculation computed before the search ended come at once."
)
_RATE = Metric("throughput", "requests_per_s", "requests/s", relative=True)
_Group = Sequence[PipeliningRecord]


def make_part(suite: Suite, results: Results) -> Part:
    lines = results.of(PipeliningRecord, suite.name)
    groups: dict[object, list[PipeliningRecord]] = {}
    for line in lines:
        groups.setdefault((key_of(line.cell), key_of(line.engine), line.policy), []).append(line)
    measured = {name: [each for each in groups.values() if each[0].cell.get("measure") == name] for name in _TABLES}
    return Part(
        [table for name, chosen in measured.items() if chosen for table in _TABLES[name](suite, chosen)],
        engine=_engine(lines),
        compared=[_against_serial(name, chosen) for name, chosen in measured.items() if chosen],
    )


def _against_serial(measure: str, groups: Sequence[_Group]) -> Compared:
    mode, words = ("warmup", "warm-up") if measure == "cold" else ("speculative", "speculation")
    metric = _RATE if measure == "throughput" else TTFT_P50
    label = _retrieval if measure == "cold" else _search
    how = {"statistic": metric.statistic, "better": metric.better}
    cells = [(label(lines[0]), _compare(lines, "none", mode, metric.column, **how)) for lines in groups]
    return Compared(metric, words, f"no {words}", cells)


def _engine(lines: _Group) -> str:
    found = [
        f"a live server, model {line.engine.get('model')}, blocks of {line.engine.get('block_size')} tokens"
        for line in lines
    ]
    return "; ".join(dict.fromkeys(found))


def _cold(suite: Suite, groups: Sequence[_Group]) -> list[Table]:
    headings = ["retrieval", "T_sys, ms", "T_docs, ms", "serial, ms", "with warm-up, ms", "saving, %"]
    headings += ["bound, ms", "of the bound, %", "to 10 %"]
    paper = any(_beside(suite, lines) for lines in groups)
    headings += ["paper: serial, pipelined, ms", "paper: saving, %"] * paper
    table = Table("Time to the first token of a cold start", headings)
    for lines, seeds in zip(groups, _seeds(groups)[0], strict=True):
        system = f"system prompt {lines[0].system_tokens:,} tokens"
        alone = [_stat(lines, "alone", name) for name in ("system_ms", "documents_ms")]
        saved = _compare(lines, "none", "warmup", "ttft_ms", statistic="p50", better="lower")
        bounds = [_bounds(line) for line in lines]
        over = compare(
            bounds,
            [line.figures("warmup", "ttft_ms") for line in lines],
            statistic="p50",
            relative=True,
            better="lower",
        )
        row = [
            Entry(_retrieval(lines[0]), ", ".join(filter(None, (system, seeds)))),
            *(Entry(format_number(value)) for value in alone),
            Entry(format_number(saved.baseline)),
            Entry(format_number(saved.value), change_words(saved), verdict_words(saved)),
            Entry(format_number(-100 * saved.difference)),
            Entry(format_number(over.baseline)),
            Entry(
                format_number(100 * (1 + over.difference)),
                interval_words(over, 1, lambda difference: 100 * (1 + difference)),
            ),
            Entry("holds" if over.difference <= _SLACK else "does not hold"),
        ]
        row += _paper_cold(suite, lines) if paper else []
        table.rows.append(row)
    table.note = f"{_COLD} {_counted(groups)}"
    return [table]


def _speculation(suite: Suite, groups: Sequence[_Group]) -> list[Table]:
    headings = ["search", "T2, ms", "T1, ms", "T2 / T1", "TTFT mean, ms", "TTFT p50, ms", "TTFT p95, ms"]
    headings += ["right, %", "extra prefill, %"]
    paper = any(_beside(suite, lines) for lines in groups)
    table = Table("Search before the answer", [*headings, *["paper: T2 / T1"] * paper])
    for lines, seeds in zip(groups, _seeds(groups)[0], strict=True):
        exposed = _compare(lines, "none", "speculative", "exposed_ms", statistic="mean", better="lower")
        row = [
            Entry(_search(lines[0]), seeds),
            Entry(format_number(exposed.baseline)),
            Entry(format_number(exposed.value)),
            Entry(
                f"{format_number(1 / (1 + exposed.difference), 2)} ×",
                interval_words(exposed, 2, lambda difference: 1 / (1 + difference)),
                verdict_words(exposed),
            ),
        ]
        for statistic in ("mean", "p50", "p95"):
            times = _compare(lines, "none", "speculative", "ttft_ms", statistic=statistic, better="lower")
            row.append(
                Entry(
                    f"{format_number(times.baseline)} → {format_number(times.value)}",
                    change_words(times),
                    verdict_words(times),
                )
            )
        right, started = (_sum(lines, "speculative", name) for name in ("right", "speculations"))
        row.append(Entry(format_number(100 * right / started if started else None), f"{right:,.0f} of {started:,.0f}"))
        row.append(_extra(lines))
        row += [Entry(_paper_ratios(suite, lines))] * paper
        table.rows.append(row)
    table.note = f"{_SPECULATION} {_counted(groups)}"
    known = [lines for lines in groups if not lines[0].cell.get("cautious")]
    return [table, *_between(groups), *([_stages(known)] if known else [])]


def _between(groups: Sequence[_Group]) -> list[Table]:
    modes = ("none", "speculative")
    headings = [f"{words}, p{share}, ms" for words in ("without", "speculating") for share in (50, 99)]
    table = Table("Time between tokens", ["search", *headings], note=_BETWEEN)
    for lines in groups:
        found = [summary([v for line in lines for v in line.figures(mode, TBT_P50.column)]) for mode in modes]
        times = [value for each in found if each is not None for value in (each.p50, each.p99)]
        if len(times) == len(headings):
            table.rows.append([Entry(_search(lines[0])), *(Entry(format_number(value)) for value in times)])
    return [table] if table.rows else []


def _stages(groups: Sequence[_Group]) -> Table:
    most = max((max(stages, default=1) for lines in groups for stages in _started(lines)), default=1)
    table = Table("Speculations that were right, by stage", ["search", *(f"after stage {n + 1}" for n in range(most))])
    for lines in groups:
        started = [stage for stages in _started(lines) for stage in stages]
        right = [stage for line in lines for stage in line.entries("speculative", "speculated_stage")]
        row = [Entry(_search(lines[0]))]
        for stage in range(1, most + 1):
            begun, taken = started.count(stage), right.count(stage)
            row.append(
                Entry(f"{taken:,} of {begun:,}", f"{format_number(100 * taken / begun)}{THIN}%" if begun else "")
            )
        table.rows.append(row)
    table.note = _STAGES
    return table


def _throughput(suite: Suite, groups: Sequence[_Group]) -> list[Table]:
    headings = ["search", "clients", "offered", "without, requests/s", "speculating, requests/s", "at most 2 % less"]
    table = Table("Throughput under saturation", [*headings, "refused, %", "extra prefill, %"], note=_THROUGHPUT)
    for lines in groups:
        rates = _compare(lines, "none", "speculative", "requests_per_s", statistic="mean", better="higher")
        alone = _stat(lines, "none", "alone_s")
        clients = int(_stat(lines, "none", "clients") or 0)
        refused, started = (_sum(lines, "speculative", name) for name in ("refused", "speculations"))
        table.rows.append(
            [
                Entry(_search(lines[0])),
                Entry(f"{clients:,}"),
                Entry(f"{format_number(clients / alone / rates.baseline)} ×" if alone else "–"),
                Entry(format_number(rates.baseline, 2)),
                Entry(format_number(rates.value, 2), change_words(rates), verdict_words(rates)),
                Entry(_at_most_less(rates)),
                Entry(format_number(100 * refused / (refused + started) if refused + started else None)),
                _extra(lines),
            ]
        )
    return [table, *_between(groups)]


_TABLES: Mapping[str, Callable[[Suite, Sequence[_Group]], list[Table]]] = {
    "cold": _cold,
    "speculation": _speculation,
    "throughput": _throughput,
}


def _bounds(line: PipeliningRecord) -> Floats:
    import numpy as np

    waited = np.maximum(line.figures("warmup", "retrieval_ms"), line.figures("alone", "system_ms"))
    bound: Floats = waited + line.figures("alone", "documents_ms")
    return bound


def _compare(lines: _Group, plain: str, mode: str, name: str, *, statistic: Any, better: Any) -> PairedDifference:
    sides = [[line.figures(each, name) for line in lines] for each in (plain, mode)]
    return compare(*sides, statistic=statistic, relative=True, better=better)


def _stat(lines: _Group, mode: str, name: str) -> float | None:
    found = summary([value for line in lines for value in line.figures(mode, name)])
    return found.p50 if found else None


def _sum(lines: _Group, mode: str, name: str) -> float:
    return float(sum(line.figures(mode, name).sum() for line in lines))


def _started(lines: _Group) -> list[Sequence[int]]:
    return [
        stages
        for line in lines
        for stages, refused in zip(
            line.entries("speculative", "started_stages"), line.entries("speculative", "refused"), strict=True
        )
        if not refused
    ]


def _extra(lines: _Group) -> Entry:
    plain, ours = (_sum(lines, mode, "computed_tokens") for mode in ("none", "speculative"))
    if not plain > 0 or ours != ours:
        return Entry("–", "the server does not say")
    return Entry(signed(100 * (ours / plain - 1)), f"{plain:,.0f} → {ours:,.0f} tokens")


def _retrieval(line: PipeliningRecord) -> str:
    if (share := line.cell.get("retrieval_of_system")) is not None:
        pause = summary([float(value) for value in line.figures("none", "retrieval_ms")])
        return f"{share:g} × T_sys ({format_number(pause.p50 if pause else None, 0)}{THIN}ms)"
    return f"{line.cell['retrieval_ms']:g}{THIN}ms"


def _search(line: PipeliningRecord) -> str:
    cell = line.cell
    taken = f"stretched to {cell['search_ms']:g}{THIN}ms" if cell.get("search_ms") else "not stretched"
    kind = {"ivf": "IVF", "hnsw": "HNSW"}.get(cell.get("index", "ivf"), "")
    words = f"{kind}, {100 * cell.get('search_ratio', 1.0):g}{THIN}% searched, {taken}"
    if (tokens := cell.get("output_tokens", 1)) > 1:
        words += f", answers of {tokens} tokens"
    return f"{words}, cautious" if cell.get("cautious") else words


def _beside(suite: Suite, lines: _Group) -> list[PaperLine]:
    cell = lines[0].cell
    if cell["measure"] == "speculation" and not cell.get("search_ms"):
        return []
    return [
        row for row in suite.paper_rows if row.cell and all(cell.get(name) == value for name, value in row.cell.items())
    ]


def _paper_cold(suite: Suite, lines: _Group) -> list[Entry]:
    for row in _beside(suite, lines):
        times = ", ".join(format_number(number(row, name)) for name in ("serial_ms", "pipelined_ms"))
        return [Entry(times, row.hardware), Entry(format_number(number(row, "saving_percent")))]
    return [Entry("–"), Entry("–")]


def _paper_ratios(suite: Suite, lines: _Group) -> str:
    words = []
    for row in _beside(suite, lines):
        serial, speculative = number(row, "serial_ms"), number(row, "speculative_ms")
        if serial and speculative:
            words.append(f"{format_number(serial / speculative, 2)} × ({(row.label or '').partition(',')[0]})")
    return ", ".join(words) or "–"


def _at_most_less(rates: PairedDifference) -> str:
    if rates.difference < -_LESS:
        return "no"
    if rates.known and rates.low >= -_LESS:
        return "yes"
    return "yes, but its interval is wider"


def _seeds(groups: Sequence[_Group]) -> tuple[list[str], str]:
    return seeds_by_row([[line.seed for line in lines] for lines in groups])


def _counted(groups: Sequence[_Group]) -> str:
    served = [len(line.figures("none", "ttft_ms")) for lines in groups for line in lines]
    words = served_words(served, [line.warmup for lines in groups for line in lines], "a seed and mode")
    return f"{words}; {_seeds(groups)[1]}."
