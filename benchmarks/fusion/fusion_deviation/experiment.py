"""Deviation of reused KV from full attention's, and the places of critical tokens (FusionRAG Figures 3, 7b and 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.fusion.fusion_deviation.cells import ALONE, PREPROCESSED, DeviationCell
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.report.canvas import Picture, titled
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.fusion.fusion_deviation.measuring import Measured

COPIES = (ALONE, PREPROCESSED)
"""What documents' KV was computed after: the system prompt, or also KV of similar documents (FusionRAG 3.1)."""

_OTHER_ENGINE = "KV is compared in the embedded engine: give --engine torch, or none"


# Of a system prompt and a question.
_MORE_TOKENS = 1024


class FusionDeviation(Experiment):
    """Copies of one kind. Column `deviation`: of each prompt's documents in the second layer, relative to full
    attention's KV. Facts, over all prompts: that by layer (`layers`), by document and tenth of it (`places`), and the
    share of tokens that each selection chose there (`chosen`). Of preprocessed copies also `related`: over all
    questions the share of documents with a neighbour retrieved beside them, and of their neighbours that are."""

    kind = "fusion-deviation"
    cell = DeviationCell
    columns = ("deviation",)
    facts = ("layers", "places", "chosen", "tokens")
    runs = True
    policies: ClassVar[Any] = COPIES
    unit = "prompts"
    one_job = True

    def obstacle(self, suite: Suite, cell: DeviationCell, policy: str) -> str | None:
        if self.options.engine not in ("sim", "torch"):
            return _OTHER_ENGINE
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        cell: DeviationCell = job.cell
        assert job.corpus is not None
        corpus = job.corpus
        model = self.kept((self.options.model, corpus.name), lambda: self._load(corpus))
        engine = {"name": "torch", "model": str(self.options.model or "random weights")}
        try:
            measured = self._measure(job, corpus, model, advance)
        except ValueError as error:
            # A model whose keys cannot be moved, or neighbours that are not this corpus'.
            yield from (Missing(job.suite.name, cell.fields, kind, str(error)) for kind in job.policies)
            return
        for kind, sums in measured.items():
            rows = {"deviation": [round(value, 6) for value in sums.deviation]}
            yield {"policy": kind, "engine": engine, "facts": sums.facts, "rows": rows}

    def _measure(
        self, job: Job, corpus: Corpus, model: TorchModel, advance: Callable[[], None]
    ) -> Mapping[str, Measured]:
        from ragorder.benchmarks.fusion.fusion_deviation.measuring import Bench, CorpusPrompts, KVSequence, Measured

        cell: DeviationCell = job.cell
        prompts = CorpusPrompts(corpus, model.tokenizer, cell)
        drawn = list(prompts.draw(job.requests, job.seed))
        if not drawn:
            raise ValueError(f"no question of {corpus.name} has {cell.documents} documents: give fewer")
        longest = (max(cell.documents, cell.neighbours) + 1) * cell.document_tokens + _MORE_TOKENS
        measured = {kind: Measured(cell.documents) for kind in job.policies}
        with closing(KVSequence(model.model, longest)) as sequence:
            bench = Bench(sequence, prompts, cell)
            for prompt in drawn:
                for kind, found in bench.measure(prompt, job.policies).items():
                    measured[kind].add(*found)
                advance()
        if PREPROCESSED in measured:
            measured[PREPROCESSED].related = prompts.related()
        return measured

    def _load(self, corpus: Corpus) -> TorchModel:
        if self.options.model is not None:
            return TorchModel.load(self.options.model)
        from ragorder.kernels.random_model import make_model

        folder = Path(self.resources.enter_context(TemporaryDirectory())) / "model"
        texts = [document.text for document in corpus.documents]
        return TorchModel.load(make_model(folder, texts=texts, layers=6, hidden_size=256, vocab_size=4096))


_Group = RecordGroup[Record]
_LOOKS = {ALONE: "retrieval", PREPROCESSED: "earned", "query": "earned", "deviation": "greedy"}
_NAMES = {"query": "question's attention", "deviation": "KV deviation"}

_RANDOM = (
    "With random weights attention is almost even: deviation grows with what a document does not see, and what "
    "is selected says nothing about texts. Only a trained model shows which tokens matter, and what similar documents "
    "restore."
)

_Grid = Sequence[Sequence[float]]


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(FusionDeviation.record, suite.name))
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
    cell, first = DeviationCell.read(group.cell, "fusion-deviation"), group.runs()[0]
    table.note = (
        f"Squared, of keys and values, relative to full attention's. {first.requests} prompts × seeds "
        f"{', '.join(map(str, group.seeds))} of {cell.documents} documents of at most {cell.document_tokens} tokens"
    )
    removed = _removed(group)
    if removed is not None:
        change = f"{'removes' if removed >= 0 else 'adds'} {format_number(100 * abs(removed))} %"
        table.note += f"; preprocessing after {cell.neighbours} similar ones {change} in the second layer"
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
    ("document", lambda places: list(map(fmean, places)), "document in the prompt"),
    (
        "place in the document",
        lambda places: [fmean(each) for each in zip(*places, strict=True)],
        "tenth of the document",
    ),
)


def _each(tables: Mapping[str, _Grid], cut: Callable[[_Grid], list[float]]) -> dict[str, list[float]]:
    return {name: cut(table) for name, table in tables.items()}


def _lines(title: str, group: _Group, lines: Mapping[str, Sequence[float]], x: str, y: str) -> Picture:
    points = {name: list(enumerate(values, 1)) for name, values in lines.items()}
    alt = "; ".join(
        f"{name}: {', '.join(format_number(value, 3) for value in values)}" for name, values in lines.items()
    )
    name = titled(title, group.label)
    return draw_lines(
        name, points, x, y, alt=alt, looks=_LOOKS, words=_NAMES, adjust=lambda axes: axes.set_ylim(bottom=0)
    )
