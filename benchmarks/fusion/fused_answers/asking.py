"""Questions asked of a real model, its documents' KV reused in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from ragorder.benchmarks.fusion.fused_answers.record import column
from ragorder.benchmarks.fusion.fused_answers.ways import AnswersCell, Way
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.eval.suites.quality.metrics import SCORERS, extract_answer
from ragorder.kernels.preprocessing.neighbours import GivenNeighbours, make_neighbours
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from torch import Tensor

    from ragorder.kernels.engine import Completion, Fusion, Request

__all__ = ["Asking"]

_SYSTEM = "Answer the question with a short phrase from the documents."
# Without ids, which small models take for answers.
_DOCUMENT = "{title}\n{text}\n\n"

_TOGETHER = 12
"""Requests that share the engine's pool; in it all of their copies find room."""


class Asking:
    """Prompts have the `cell.documents` best documents of a question, the best one first. In each way this one is an
    exact prefix, as in an engine that has served it before; the others are reused.

    Raises ImportError, OSError for the model of embeddings.
    """

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
        from ragorder.kernels.preprocessing.settings import PreprocessingSettings

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
            choice, documents = make_neighbours(self._cell.by), self._corpus.documents
            vectors = choice.vectors([document.text for document in documents])
            self._near = choice.nearest([document.id for document in documents], vectors, self._cell.neighbours)
        return self._near


def _compute_alone(engine: TorchEngine, prompt: PromptIds, documents: int) -> None:
    """The first documents of a prompt, each after the system prompt alone."""
    system, *ends = prompt.document_ends
    last = prompt[ends[-1] :]
    alone = [
        PromptIds([*prompt[:system], *prompt[begin:end], *last], [system, system + end - begin])
        for begin, end in pairwise(prompt.document_ends[: documents + 1])
    ]
    _generate(engine, [_request(engine, each, "exact", output_tokens=1) for each in alone])


def _serve(
    engine: TorchEngine, prompt: PromptIds, ways: Mapping[str, Way], cell: AnswersCell
) -> Iterator[tuple[str, float, Completion | None]]:
    """Of each way and share the completion; None: that of full attention. Raises EngineError if anything but the first
    document was an exact prefix, or a document was not reused."""
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
    from dataclasses import replace

    system, *ends = prompt.document_ends
    request = engine.request(prompt, output_tokens)
    return replace(request, document_ends=ends, prefix_tokens=system, fusion=fusion, keep_logits=True)


def _generate(engine: TorchEngine, requests: Sequence[Request]) -> list[Completion]:
    served = engine.engine.generate(requests)
    for done in served:
        if done.finish_reason in ("error", "timeout"):
            raise EngineError(done.error or done.finish_reason)
    return served


def _divergence(full: Tensor, other: Tensor) -> float:
    expected, found = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum())
