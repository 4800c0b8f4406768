"""Answers of a real model from reused KV of documents, against full attention (suite fusion-answers)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.common.vectors import nearest_documents
from ragorder.benchmarks.fusion.selections import DocumentHeads, RandomTokens
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import TorchEngine, TorchModel, lacks_torch
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, signed
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.eval.suites.quality.compare import bootstrap_difference, mcnemar_exact
from ragorder.eval.suites.quality.metrics import SCORERS, extract_answer
from ragorder.eval.suites.quality.orders import documents_alone, marked
from ragorder.kernels.fusion.selection import Fusion
from ragorder.kernels.preprocessing.neighbours import GivenNeighbours
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from torch import Tensor

    from ragorder.kernels.engine import Completion, Request

FULL, REUSE, PLAIN = "full attention", "full reuse", "FusionRAG, online only"


class AnswersCell(SuiteCell):
    """The `documents` best ones of each question of a corpus, of at most `document_words` words, and the `shares` of
    the reused tokens that are recomputed. Preprocessing takes the `neighbours` most similar ones, as `by` says (see
    `ragorder fuse`). Answers of one token (`output_tokens`) are not scored."""

    corpus: str = "nqopen"
    documents: int = Field(5, ge=2)
    # Read from results it is a list.
    shares: Annotated[tuple[float, ...], Field(strict=False)] = (0.05, 0.15, 0.3, 0.5)
    document_words: int | None = Field(None, ge=1)
    neighbours: int = Field(4, ge=1)
    by: str = "embedding"
    output_tokens: int = Field(16, ge=1)


@dataclass(frozen=True, slots=True)
class Way:
    """`fusion`: None is full attention. `shares`: instead of the cell's, which have `more` in addition."""

    fusion: Fusion | None
    shares: Sequence[float] | None = None
    more: Sequence[float] = ()
    preprocessed: bool = False

    def shares_of(self, cell: AnswersCell) -> Sequence[float]:
        return (*self.more, *cell.shares) if self.shares is None else self.shares

    def at(self, share: float) -> Fusion | Literal["exact"]:
        return "exact" if self.fusion is None else replace(self.fusion, recompute=share)


WAYS: Mapping[str, Way] = {
    FULL: Way(None, shares=(1.0,)),
    REUSE: Way(Fusion(), shares=(0.0,)),
    PLAIN: Way(Fusion()),
    "FusionRAG": Way(Fusion(), more=(0.0,), preprocessed=True),
    "FusionRAG, two rounds": Way(Fusion(rounds=2), preprocessed=True),
    "CacheBlend": Way(Fusion(select="deviation")),
    "EPIC": Way(Fusion(select=DocumentHeads())),
    "random": Way(Fusion(select=RandomTokens())),
    "two rounds": Way(Fusion(rounds=2)),
}

FIGURES = ("kl", "em", "f1", "contains", "recomputed")


def column(figure: str, share: float) -> str:
    """The name of a figure's column, such as "kl 0.05"."""
    return f"{figure} {share:g}"


class AnswersRecord(Record):
    """One way to reuse KV. Columns: the questions' `id`, tokens of the `prompt` and of it `reused`; and for each share
    the KL divergence in nats from full attention's distribution of the first token to this one (`kl`), exact match
    (`em`), `f1`, whether the answer `contains` an accepted one, the tokens `recomputed`, and the `answer`."""

    @property
    def columns_needed(self) -> tuple[str, ...]:
        figures = (*FIGURES, "answer")
        return ("id", "prompt", "reused", *(column(figure, share) for share in self.shares for figure in figures))

    @property
    def shares(self) -> list[float]:
        return [float(name.removeprefix("kl ")) for name in self.rows if name.startswith("kl ")]

    @property
    def setting(self) -> AnswersCell:
        return AnswersCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.rows["id"])


_NO_MODEL = "answers need a model in the embedded engine: give --engine torch --model smollm2, or another one"


class FusedAnswers(Experiment):
    kind = "fused-answers"
    base = AnswersRecord
    cell = AnswersCell
    runs = True
    policies: ClassVar[Any] = tuple(WAYS)
    unit = "questions"
    one_job = True

    def obstacle(self, suite: Suite, cell: AnswersCell, policy: str) -> str | None:
        if self.options.engine != "torch" or self.options.model is None:
            return _NO_MODEL
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:

        cell, corpus, name = job.cell, job.corpus, self.options.model
        assert corpus is not None and name is not None
        model = self.kept(name, lambda: TorchModel.load(name))
        asking = self.kept((name, cell), lambda: Asking(model, corpus, cell))
        places = [place for place, each in enumerate(corpus.rankings) if len(each) >= cell.documents]
        places = [place for place in places if corpus.questions[place].answers]
        # Each seed has questions of its own.
        random.Random(0).shuffle(places)
        places = places[job.seed * job.requests : (job.seed + 1) * job.requests]
        if not places:
            reason = f"{corpus.name} has no further questions with answers and {cell.documents} documents"
            yield from (Missing(job.suite.name, cell.fields, way, f"{reason}: give fewer") for way in job.policies)
            return
        engine = {"name": "torch", "model": Path(name).name, "dtype": str(model.model.dtype).removeprefix("torch.")}
        for way, rows in asking.ask(places, {each: WAYS[each] for each in job.policies}, advance).items():
            yield {"policy": way, "engine": engine, "rows": rows}


_SYSTEM = "Answer the question with a short phrase from the documents."
# Without ids, which small models take for answers.
_DOCUMENT = "{title}\n{text}\n\n"
_TOGETHER = 12
"""Requests that share the engine's pool; in it all of their copies find room."""


class Asking:
    """Prompts whose best document is an exact prefix, while the others are reused. Raises ImportError, OSError."""

    def __init__(self, model: TorchModel, corpus: Corpus, cell: AnswersCell) -> None:
        self._model, self._corpus, self._cell = model, corpus, cell
        self._builder = PromptBuilder(_SYSTEM, document_template=_DOCUMENT, tokenizer=model.tokenizer)
        self._near: list[list[int]] | None = None

    def ask(
        self, places: Sequence[int], ways: Mapping[str, Way], advance: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, list[Any]]]:
        """The columns of each way's record, for the questions at these places of the corpus."""
        prompts = [self._prompt(place) for place in places]
        plain = {name: way for name, way in ways.items() if not way.preprocessed}
        others = {name: way for name, way in ways.items() if way.preprocessed}
        found: dict[str, dict[str, list[Any]]] = {name: {} for name in ways}
        full: list[Tensor] = []
        with self._engine(prompts) as engine:
            for place, prompt in zip(places, prompts, strict=True):
                engine.engine.clear_cache()
                _compute_alone(engine, prompt, self._cell.documents)
                served = list(_serve(engine, prompt, plain, self._cell))
                # Last, as what it computes the others would find.
                [exact] = _generate(engine, [_request(engine, prompt, "exact")])
                assert exact.logits is not None
                full.append(exact.logits)
                for name, share, done in served:
                    self._add(found[name], place, share, done or exact, full[-1])
                advance()
        if others:
            with TemporaryDirectory() as folder:
                self._preprocess(places, Path(folder))
                with self._engine(prompts, Path(folder)) as engine:
                    for place, prompt, logits in zip(places, prompts, full, strict=True):
                        _compute_alone(engine, prompt, 1)
                        for name, share, done in _serve(engine, prompt, others, self._cell):
                            assert done is not None
                            self._add(found[name], place, share, done, logits)
        return found

    def _add(self, rows: dict[str, list[Any]], place: int, share: float, done: Completion, full: Tensor) -> None:
        assert done.logits is not None
        question, scorer = self._corpus.questions[place], SCORERS["nq"]
        answer = extract_answer(done.text)
        row = {
            "kl": round(_divergence(full, done.logits), 6),
            "em": scorer.exact_match(answer, question.answers),
            "f1": round(scorer.f1(answer, question.answers), 4),
            "contains": int(scorer.occurs(question.answers, answer)),
            "recomputed": done.recomputed,
            "answer": answer,
        }
        columns = {column(name, share): value for name, value in row.items()}
        if len(rows.get("id", [])) == len(rows.get(column("kl", share), [])):
            columns |= {"id": question.id, "prompt": done.prompt_tokens, "reused": done.fused.total}
        for name, value in columns.items():
            rows.setdefault(name, []).append(value)

    def _documents(self, place: int) -> list[Document]:
        ranking = self._corpus.rankings[place][: self._cell.documents]
        return [self._document(number) for number in ranking]

    def _document(self, number: int) -> Document:
        document, most = self._corpus.documents[number], self._cell.document_words
        text = document.text if most is None else " ".join(document.text.split()[:most])
        return Document(document.id, text, metadata=document.metadata)

    def _prompt(self, place: int) -> PromptIds:
        return PromptIds.of(self._builder.build(self._corpus.questions[place].text, self._documents(place)))

    @contextmanager
    def _engine(self, prompts: Sequence[PromptIds], folder: Path | None = None) -> Iterator[TorchEngine]:
        longest = max(map(len, prompts)) + self._cell.output_tokens
        engine = TorchEngine(
            self._model,
            capacity_tokens=(_TOGETHER + 3) * (longest + 64),
            disk_path=folder,
            output_tokens=self._cell.output_tokens,
            reuse="fused",
            verify=False,
        )
        try:
            with engine.answering(self._cell.output_tokens):
                yield engine
        finally:
            engine.close()

    def _preprocess(self, places: Sequence[int], folder: Path) -> None:
        """The KV of all documents that are reused, each computed after its neighbours'."""
        from ragorder.kernels.engine_settings import EngineSettings
        from ragorder.kernels.models.model import PatchedModel
        from ragorder.kernels.preprocessing.builder import FusionBuilder, SourceDocument
        from ragorder.kernels.preprocessing.neighbours import PreprocessingSettings

        documents, near = self._corpus.documents, self._neighbours()
        wanted = dict.fromkeys(
            number for place in places for number in self._corpus.rankings[place][1 : self._cell.documents]
        )
        graph = {documents[number].id: [documents[other].id for other in near[number]] for number in wanted}
        every = dict.fromkeys([*wanted, *(other for number in wanted for other in near[number])])
        sources = [
            SourceDocument(each.id, each.text, self._builder.document_ids(each)) for each in map(self._document, every)
        ]
        settings = EngineSettings(device_tokens=16_384, verify=False)
        with FusionBuilder(
            PatchedModel(self._model.model, settings),
            folder,
            self._builder.prefix_ids,
            GivenNeighbours(graph),
            PreprocessingSettings(neighbours=self._cell.neighbours),
            settings,
        ) as builder:
            builder.plan(sources)
            for _ in builder.build():
                pass

    def _neighbours(self) -> list[list[int]]:
        """Of each document of the corpus, the most similar one first."""
        if self._near is None:
            self._near = nearest_documents(self._corpus, self._cell.by, self._cell.neighbours)
        return self._near


def _compute_alone(engine: TorchEngine, prompt: PromptIds, documents: int) -> None:
    """The first documents of a prompt, each after the system prompt alone."""
    alone = documents_alone(prompt)[:documents]
    _generate(engine, [_request(engine, each, "exact", output_tokens=1) for each in alone])


def _serve(
    engine: TorchEngine, prompt: PromptIds, ways: Mapping[str, Way], cell: AnswersCell
) -> Iterator[tuple[str, float, Completion | None]]:
    """Yield each way's completions (None: full attention's). Raises EngineError if other documents were reused."""
    _, *ends = prompt.document_ends
    asked = [(name, share, way.at(share)) for name, way in ways.items() for share in way.shares_of(cell)]
    fused = [each for each in asked if each[2] != "exact"]
    yield from ((name, share, None) for name, share, fusion in asked if fusion == "exact")
    expected = ends[0], ends[-1] - ends[0]
    for begin in range(0, len(fused), _TOGETHER):
        part = fused[begin : begin + _TOGETHER]
        served = _generate(engine, [_request(engine, prompt, fusion) for _, _, fusion in part])
        for (name, share, _), done in zip(part, served, strict=True):
            if (done.cached.total, done.fused.total) != expected:
                wrong = f"{done.cached.total} and {done.fused.total}"
                raise EngineError(f"{expected[0]} tokens should be exact and {expected[1]} reused, not {wrong}")
            yield name, share, done


def _request(
    engine: TorchEngine, prompt: PromptIds, fusion: Fusion | Literal["exact"], output_tokens: int | None = None
) -> Request:
    return replace(marked(engine.request(prompt, output_tokens)), fusion=fusion, keep_logits=True)


def _generate(engine: TorchEngine, requests: Sequence[Request]) -> list[Completion]:
    served = engine.engine.generate(requests)
    for done in served:
        if done.finish_reason in ("error", "timeout"):
            raise EngineError(done.error or done.finish_reason)
    return served


def _divergence(full: Tensor, other: Tensor) -> float:
    expected, found = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum())


_Group = RecordGroup[AnswersRecord]

_GONE = (
    "Measured, and then deleted, since none of it is nearer to full attention at the same share than what is kept: {}."
)
_KL = "KL divergence of the first token's distribution from full attention's, nats"
_SHOWN = {"kl": _KL, "contains": "Answers that contain an accepted one, %", "em": "EM", "f1": "F1"}


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(AnswersRecord, suite.name))
    models = dict.fromkeys(f"{group.engine['model']}, {group.engine['dtype']}" for group in groups)
    gone = dict.fromkeys(way for group in groups for way in group.policies if way not in WAYS)
    return Part(
        [table for group in groups for table in _tables(group)],
        words=[_GONE.format(", ".join(gone))] if gone else [],
        engine=f"the embedded engine's model: {', '.join(models)}" if models else "",
    )


def _tables(group: _Group) -> list[Table]:
    first = group.runs()[0]
    cell = first.setting
    setting = f"{cell.corpus}, {cell.documents} documents"
    shown = {name: f"{title}: {setting}" for name, title in _SHOWN.items() if name == "kl" or cell.output_tokens > 1}
    found = [_figures(group, figure, title) for figure, title in shown.items()]
    runs = [run for run in group.runs() if run.policy != FULL]
    prompt, reused = (fmean(tokens for run in runs for tokens in run.rows[name]) for name in ("prompt", "reused"))
    found[0].note = (
        f"{_questions(group)}. Prompts have {prompt:.0f} tokens; "
        f"{reused:.0f} are reused; the others, of the system prompt and the first document, are an exact prefix."
    )
    if "FusionRAG" in group.policies:
        found[0].note += (
            f" FusionRAG's documents were computed after {cell.neighbours} similar ones, those of the other ways after "
            "the system prompt alone."
        )
    if "contains" in shown and FULL in group.policies:
        found.append(_right_answers(group, shown["contains"]))
    if PLAIN not in group.policies:
        return found
    found += [_compared(group, figure, title) for figure, title in list(shown.items())[:2]]
    return found + [_by_coverage(group, way, setting) for way in group.policies if _covers(group, way)]


def _figures(group: _Group, figure: str, title: str) -> Table:
    shares = (0.0, *group.runs()[0].setting.shares, 1.0)
    table = Table(title, ["recomputed", *map(_percent, shares)])
    for way in group.policies:
        if not _covers(group, way):
            known = group.runs(way)[0].shares
            means = {each: _mean(_values(group, way, figure, each), figure) for each in known}
            table.add(way, *(means.get(each, "") for each in shares))
    return table


def _compared(group: _Group, figure: str, title: str) -> Table:
    shares = group.runs()[0].setting.shares
    table = Table(f"Less {PLAIN}, at the same share. {title}", ["recomputed", *map(_percent, shares)])
    for way in group.policies:
        if way not in (FULL, REUSE, PLAIN) and not _covers(group, way):
            seeds = _seeds(group, way, PLAIN)
            pairs = [[_values(group, each, figure, share, seeds) for each in (PLAIN, way)] for share in shares]
            table.add(way, *(_difference(plain, ours, figure) for plain, ours in pairs))
    table.note = "Paired by question, with 95 % intervals."
    return table


def _right_answers(group: _Group, title: str) -> Table:
    """What becomes of full attention's right answers."""
    shares = (0.0, *group.runs()[0].setting.shares)
    table = Table(f"Less full attention. {title}", ["recomputed", *map(_percent, shares)])
    for way in group.policies:
        if way != FULL and not _covers(group, way):
            seeds = _seeds(group, way, FULL)
            full, entries = _values(group, FULL, "contains", 1.0, seeds), dict.fromkeys(shares, Entry(""))
            for share in group.runs(way)[0].shares:
                lost, won, p = mcnemar_exact(full, _values(group, way, "contains", share, seeds))
                verdict = "no difference" if p > 0.05 else "better" if won > lost else "worse"
                words = f"{lost} lost, {won} won, p {format_number(p, 3)}"
                entries[share] = Entry(signed(100 * (won - lost) / len(full)), words, verdict)
            table.add(way, *entries.values())
    table.note = "Paired by question, McNemar's exact test at 5 %."
    return table


def _covers(group: _Group, way: str) -> bool:
    """Whether its shares are of the question's attention: a budget that the engine no longer has."""
    shares = group.runs(way)[0].shares
    return way not in (FULL, REUSE) and not {*shares} <= {0.0, *group.runs()[0].setting.shares}


def _by_coverage(group: _Group, way: str, setting: str) -> Table:
    scored = [figure for figure in ("kl", "contains") if figure == "kl" or group.runs()[0].setting.output_tokens > 1]
    headings = [each for figure in scored for each in (figure, f"less {PLAIN}")]
    table = Table(f"{way}: {setting}", ["share of the attention", "tokens recomputed, %", *headings])
    seeds = _seeds(group, way, PLAIN, REUSE, FULL)
    for share in group.runs(way)[0].shares:
        counts, reused = (_column(group, way, name, seeds) for name in (column("recomputed", share), "reused"))
        computed = sum(counts) / sum(reused)
        entries: list[str | Entry] = [_percent(share), format_number(100 * computed)]
        for figure in scored:
            ours = _values(group, way, figure, share, seeds)
            entries += [_mean(ours, figure), _difference(_between(group, figure, computed, seeds), ours, figure)]
        table.add(*entries)
    table.note = (
        f"{PLAIN} with as many tokens of all requests together, each with the same share: interpolated question by "
        "question between the two nearest shares measured."
    )
    return table


def _questions(group: _Group) -> str:
    counts = {way: sum(run.requests for run in group.runs(way)) for way in group.policies}
    most = max(counts.values())
    fewer = [f"{way} {count}" for way, count in counts.items() if count < most]
    return f"{most} questions" + (f" ({', '.join(fewer)})" if fewer else "")


def _seeds(group: _Group, *ways: str) -> list[int]:
    """Those of all of these ways."""
    return [seed for seed in group.seeds if all(seed in group.policies.get(way, {}) for way in ways)]


def _values(group: _Group, way: str, figure: str, share: float, seeds: Sequence[int] | None = None) -> list[float]:
    return _column(group, way, column(figure, share), seeds)


def _column(group: _Group, way: str, name: str, seeds: Sequence[int] | None = None) -> list[float]:
    """Of each question."""
    runs = group.policies[way]
    return [value for seed in (sorted(runs) if seeds is None else seeds) for value in runs[seed].rows[name]]


def _between(group: _Group, figure: str, share: float, seeds: Sequence[int]) -> list[float]:
    """A figure of the plain selection at a share that was not measured."""
    known = {0.0: REUSE, **dict.fromkeys(group.runs()[0].setting.shares, PLAIN), 1.0: FULL}
    low = max(each for each in known if each <= share)
    high = min((each for each in known if each > share), default=low)
    part = (share - low) / (high - low) if high > low else 0.0
    ends = (_values(group, known[each], figure, each, seeds) for each in (low, high))
    return [before + part * (after - before) for before, after in zip(*ends, strict=True)]


def _mean(values: Sequence[float], figure: str) -> str:
    return format_number(fmean(values), 4) if figure == "kl" else format_number(100 * fmean(values))


def _difference(plain: Sequence[float], ours: Sequence[float], figure: str) -> Entry:
    by, decimals, better = (1, 4, -1) if figure == "kl" else (100, 1, 1)
    difference, low, high = (by * each for each in bootstrap_difference(plain, ours))
    verdict = "no difference" if low <= 0 <= high else "better" if better * difference > 0 else "worse"
    interval = f"[{format_number(low, decimals)}, {format_number(high, decimals)}]"
    return Entry(signed(difference, decimals), interval, verdict)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
