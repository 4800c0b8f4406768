"""Measurements as tables, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from ragorder.eval.experiments.embedded.prefill import PLAIN
from ragorder.eval.experiments.embedded.results import BASELINES, Clock, Line, Verdict, judge, median, values_of
from ragorder.eval.experiments.embedded.shapes import ONE_THREAD
from ragorder.eval.running.measures import percentile

__all__ = ["Sheet", "make_sheets"]

_TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: the first column has names, the others numbers, with their intervals in a line of their own."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str

    def table(self) -> Table:
        """For a terminal."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=self.title, caption=self.caption)
        for place, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
        for row in self.rows:
            table.add_row(*(cell.replace("[", "\\[") for cell in row))
        return table

    def markdown(self) -> str:
        """For a document."""
        lines = [self.headings, ["---", *["--:"] * (len(self.headings) - 1)], *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |".replace("\n", " ") for line in lines)
        return f"**{self.title}**\n\n{body}\n\n{self.caption}\n"


def make_sheets(lines: Sequence[Line]) -> Iterator[Sheet]:
    """One for each measure, all seeds together. Raises ImportError naming the extra to install."""
    measures: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        measures.setdefault(line["cell"]["measure"], {}).setdefault(line["policy"], []).append(line)
    for measure, arms in measures.items():
        yield _serving_sheet(arms) if measure == "serving" else _prefill_sheet(measure, arms)


_TITLES = {
    "cached": "Time to the first token, by how many documents are cached",
    "overhead": "Time to the first token with nothing cached, and that of plain transformers",
    "tiers": "Time to the first token, by where all documents are cached",
}


def _prefill_sheet(measure: str, arms: Mapping[str, Sequence[Line]]) -> Sheet:
    cell = next(iter(arms.values()))[0]["cell"]
    baseline = arms.get(BASELINES[measure])
    clocks: Sequence[Clock] = ("wall_ms", "cpu_ms") if cell["hardware"] == ONE_THREAD else ("wall_ms",)
    headings = ["cached" if measure != "overhead" else "served by", "tokens"]
    for clock in clocks:
        headings += ["wall ms" if clock == "wall_ms" else "CPU ms", "times shorter"]
    rows = []
    for arm, lines in arms.items():
        tokens = {sum(row) for line in lines for row in zip(*(line["rows"][tier] for tier in _TIERS), strict=True)}
        row = [_arm(measure, arm, cell), ", ".join(f"{each:,.0f}" for each in sorted(tokens))]
        verdicts: list[str] = []
        for clock in clocks:
            values = [value for of_seed in values_of(lines, clock) for value in of_seed]
            row.append("{}\n[{}, {}]".format(*map(_ms, median(values))))
            verdict = None if baseline in (None, lines) else judge(baseline or (), lines, clock)
            row.append("–" if verdict is None else _ratio(verdict))
            verdicts += [verdict.met] if verdict is not None and verdict.met else []
        rows.append([*row, " / ".join(dict.fromkeys(verdicts)) or "–"])
    documents = f"{cell['documents']} documents of {cell['document_tokens']} tokens behind {cell['system_tokens']}"
    caption = (
        f"Shape {cell['shape']}, {cell['hardware']}; {documents}, a question of {cell['question_tokens']}, blocks of "
        f"{cell['block_size']}. Medians of {cell['repeats']} turns x seeds {_seeds(arms)}, with 95 % intervals."
    )
    return Sheet(_TITLES[measure], [*headings, "required"], rows, caption)


def _arm(measure: str, arm: str, cell: Mapping[str, Any]) -> str:
    if measure == "overhead":
        return arm if arm == PLAIN else "the engine"
    if not arm.isdigit():
        return arm
    return "the system prompt" if arm == "0" else f"and {arm} of {cell['documents']} documents"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(verdict: Verdict) -> str:
    return f"{verdict.ratio:.2f}\n[{verdict.low:.2f}, {verdict.high:.2f}]"


def _serving_sheet(arms: Mapping[str, Sequence[Line]]) -> Sheet:
    cell = next(iter(arms.values()))[0]["cell"]
    baselines = {"no cache": arms.get(BASELINES["serving"]), "device, lru": arms.get("device, lru")}
    headings = ["cache", "hits", "device", "host", "TTFT ms, p50", "p95", "mean"]
    headings += [f"times shorter than {name}" for name, lines in baselines.items() if lines is not None]
    rows = []
    for arm, lines in arms.items():
        columns = {
            name: [value for of_seed in values_of(lines, name) for value in of_seed] for name in lines[0]["rows"]
        }
        times, prompt_tokens = columns["wall_ms"], sum(columns["prompt_tokens"])
        row = [arm, _percent(sum(columns["hits"]), sum(columns["retrieved"]))]
        row += [_percent(sum(columns[tier]), prompt_tokens) for tier in ("device", "host")]
        row += [f"{percentile(times, share):,.1f}" for share in (50, 95)] + [f"{fmean(times):,.1f}"]
        for baseline in baselines.values():
            if baseline is not None:
                row.append("–" if lines is baseline else _ratio(judge(baseline, lines, statistic="mean")))
        rows.append(row)
    top_k = "" if cell["top_k"] is None else f", top {cell['top_k']}"
    caption = (
        f"Shape {cell['shape']}, {cell['hardware']}; {cell['requests']} requests x seeds {_seeds(arms)}{top_k}, the "
        f"first {cell['warmup']} left out, one at a time; device {cell['device']}, blocks of {cell['block_size']}. "
        "Hits: of the documents; device and host: of the prompt tokens. Means compared, with 95 % intervals."
    )
    return Sheet(f"Workload {cell['workload']} by size of the cache", headings, rows, caption)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(1, whole):.1f} %"


def _seeds(arms: Mapping[str, Sequence[Line]]) -> str:
    return ", ".join(map(str, sorted({line["seed"] for lines in arms.values() for line in lines})))
