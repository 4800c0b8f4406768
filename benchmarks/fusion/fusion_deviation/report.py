"""Tables and pictures of KV deviation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ragorder.benchmarks.fusion.fusion_deviation.cells import ALONE, PREPROCESSED
from ragorder.benchmarks.fusion.fusion_deviation.record import DeviationRecord
from ragorder.eval.report.canvas import Picture, draw, label_ends, style, titled
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_Group = RecordGroup[DeviationRecord]
_LOOKS = {ALONE: "retrieval", PREPROCESSED: "earned", "query": "earned", "deviation": "greedy"}
_NAMES = {"query": "question's attention", "deviation": "KV deviation"}
_RANDOM = (
    "With random weights attention is almost even: deviation grows with what a document does not see, and what "
    "is selected says nothing about texts. Only a trained model shows which tokens matter, and what similar documents "
    "restore."
)
_Grid = Sequence[Sequence[float]]


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(DeviationRecord, suite.name))
    models = dict.fromkeys(str(group.engine["model"]) for group in groups)
    return Part(
        list(map(_table, groups)),
        words=[_RANDOM] if "random weights" in models else [],
        engine=f"the embedded engine's model: {', '.join(models)}" if models else "",
        pictures=lambda: [picture for group in groups for picture in _pictures(group)],
    )


def _table(group: _Group) -> Table:
    headings = ["documents' KV computed", "second layer, %", "last layer, %", "first document, %", "last document, %"]
    table = Table(titled("Deviation from full attention", group.label), headings)
    for kind in group.policies:
        layers, places = _mean_row(group, kind, "layers"), _places(group, kind)
        shown = (layers[1], layers[-1], fmean(places[0]), fmean(places[-1]))
        table.add(kind, *(format_number(100 * share, 2) for share in shown))
    cell, first = group.runs()[0].setting, group.runs()[0]
    table.note = (
        f"Squared, of keys and values, relative to full attention's. {first.requests} prompts × seeds "
        f"{', '.join(map(str, group.seeds))} of {cell.documents} documents of at most {cell.document_tokens} tokens"
    )
    removed = _removed(group)
    if removed is not None:
        change = f"{'removes' if removed >= 0 else 'adds'} {format_number(100 * abs(removed))} %"
        table.note += f"; preprocessing behind {cell.neighbours} similar ones {change} in the second layer"
    related = next((run.facts["related"] for run in group.runs(PREPROCESSED) if "related" in run.facts), None)
    if related is not None:
        any_of_them, of_them = (format_number(100 * share) for share in related)
        table.note += (
            f"; of the documents retrieved for all questions, {any_of_them} % have one of their {cell.neighbours} most "
            f"similar ones among the others retrieved, and {of_them} % of these are (Figure 7a: more than 80 % at ten)"
        )
    table.note += "."
    return table


def _removed(group: _Group) -> float | None:
    alone, preprocessed = (group.values(kind, "deviation") for kind in (ALONE, PREPROCESSED))
    return 1 - float(preprocessed.mean() / alone.mean()) if len(alone) and len(preprocessed) else None


def _mean_row(group: _Group, kind: str, fact: str) -> list[float]:
    return [fmean(each) for each in zip(*(run.facts[fact] for run in group.runs(kind)), strict=True)]


def _places(group: _Group, kind: str, select: str | None = None) -> list[list[float]]:
    """By document and tenth of it, of all seeds."""
    tables = [run.facts["places"] if select is None else run.facts["chosen"][select] for run in group.runs(kind)]
    return [[fmean(cell) for cell in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]


def _by_document(places: _Grid) -> list[float]:
    return [fmean(row) for row in places]


def _by_tenth(places: _Grid) -> list[float]:
    return [fmean(column) for column in zip(*places, strict=True)]


def _pictures(group: _Group) -> list[Picture]:
    kinds = {kind: _places(group, kind) for kind in group.policies}
    layers = {kind: _mean_row(group, kind, "layers") for kind in group.policies}
    found = [
        _lines("Deviation by layer", group, layers, "layer", "relative squared deviation"),
        *(
            _lines(f"Deviation by {word}", group, _each(kinds, cut), axis, "second layer's relative deviation")
            for word, cut, axis in _CUTS
        ),
    ]
    shown = ALONE if ALONE in kinds else next(iter(kinds))
    selected = {select: _places(group, shown, select) for select in _NAMES}
    found += [
        _lines(f"Critical tokens by {word}", group, _each(selected, cut), axis, "share of tokens selected")
        for word, cut, axis in _CUTS
    ]
    return found


_CUTS: Sequence[tuple[str, Callable[[_Grid], list[float]], str]] = (
    ("document", _by_document, "document in the prompt"),
    ("place in the document", _by_tenth, "tenth of the document"),
)


def _each(tables: Mapping[str, _Grid], cut: Callable[[_Grid], list[float]]) -> dict[str, list[float]]:
    return {name: cut(table) for name, table in tables.items()}


def _lines(title: str, group: _Group, lines: Mapping[str, Sequence[float]], x: str, y: str) -> Picture:
    def paint(axes: Any) -> None:
        ends = []
        for name, values in lines.items():
            looks = style(_LOOKS[name])
            places = range(1, len(values) + 1)
            axes.plot(places, values, looks.dashes, marker=looks.marker, markersize=4, color=looks.colour)
            ends.append((len(values), values[-1], _NAMES.get(name, name), looks))
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        label_ends(axes, ends)

    alt = "; ".join(
        f"{name}: {', '.join(format_number(value, 3) for value in values)}" for name, values in lines.items()
    )
    return draw(paint, title=titled(title, group.label), alt=alt)
