"""Questions of a corpus with known answers, and data sets of the Hugging Face Hub as such a corpus."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ragorder.common.extras import install_hint
from ragorder.common.files import cache_folder
from ragorder.document import Document
from ragorder.eval.data.corpora import CorpusError, load_folder
from ragorder.eval.data.retrieval import make_retriever
from ragorder.eval.data.trace import check_ranked, in_order
from ragorder.eval.running.load import Progress, silent
from ragorder.eval.suites.quality.metrics import SCORERS, Scorer
from ragorder.eval.suites.quality.orders import GradedQuestion
from ragorder.eval.suites.quality.specs import TOP_K, DatasetName, QuestionsSpec

SAMPLE = Path(__file__).with_name("sample")
"""A corpus of 120 questions whose documents were retrieved."""
_RETRIEVED = 10
_PATIENCE_S = 10.0

_Row = Mapping[str, Any]
_Paragraph = tuple[str, str, bool]
"""Title, text, and whether it supports the answer."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """`hub`: its place on the Hub, whose rows `read` turns into answers and paragraphs; `most`: the paragraphs of a
    question."""

    name: DatasetName
    hub: str = ""
    config: str | None = None
    read: Callable[[_Row], tuple[list[str], list[_Paragraph]]] = lambda row: ([], [])
    most: int = TOP_K

    @property
    def scorer(self) -> Scorer:
        return SCORERS.get(self.name, SCORERS["nq"])


def _multihop(row: _Row) -> tuple[list[str], list[_Paragraph]]:
    supporting, context = set(row["supporting_facts"]["title"]), row["context"]
    texts = (" ".join(map(str.strip, sentences)) for sentences in context["sentences"])
    pairs = zip(context["title"], texts, strict=True)
    return [row["answer"]], [(title, text, title in supporting) for title, text in pairs]


def _musique(row: _Row) -> tuple[list[str], list[_Paragraph]]:
    answers = [row["answer"], *row.get("answer_aliases", ())] if row.get("answerable", True) else []
    return answers, [(each["title"], each["paragraph_text"], each["is_supporting"]) for each in row["paragraphs"]]


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset("corpus"),
        Dataset("hotpotqa", "hotpotqa/hotpot_qa", "distractor", _multihop, 10),
        Dataset("musique", "dgslibisey/MuSiQue", None, _musique, 20),
        Dataset("2wikimultihopqa", "framolfese/2WikiMultihopQA", None, _multihop, 10),
    )
}


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """`passed_over` counts questions that cannot be asked, by reason."""

    dataset: Dataset
    questions: list[GradedQuestion]
    passed_over: Mapping[str, int]

    def with_gold(self) -> QuestionSet:
        """Return the questions for which a gold document was retrieved. Raises CorpusError without any."""
        questions = [question for question in self.questions if question.gold]
        if not questions:
            raise CorpusError(f"{self.dataset.name}: no question has a gold document among those retrieved")
        left_out = {"questions without a gold document": len(self.questions) - len(questions)}
        return replace(self, questions=questions, passed_over={**self.passed_over, **left_out})


def load_questions(spec: QuestionsSpec, progress: Progress = silent) -> QuestionSet:
    """Return the stream of `trace_of_corpus`, graded. Gold is what was retrieved of a supporting document, and has an
    answer if that is cut into parts; where none are named, every document with an answer. Raises CorpusError naming
    file and line, ImportError naming what to install."""
    dataset = DATASETS[spec.dataset]
    folder = spec.data or (_from_hub(dataset, progress) if dataset.hub else SAMPLE)
    retriever = make_retriever(spec.retriever) if isinstance(spec.retriever, str) else spec.retriever
    top_k = spec.top_k or (dataset.most if retriever is None else _RETRIEVED)
    corpus = load_folder(folder, retriever=retriever, top_k=top_k)
    if spec.top_k or not dataset.hub:
        check_ranked(corpus, top_k)
    parts = Counter(document.metadata["source"] for document in corpus.documents)
    names, scorer, questions = _Names(spec.document_words), dataset.scorer, []
    for question, ranking in zip(corpus.questions, corpus.rankings, strict=True):
        documents: dict[str, Document] = {}
        gold: dict[str, None] = {}
        for each in (corpus.documents[position] for position in ranking):
            document, source = names.document(each.metadata["title"] or each.id, each.text), each.metadata["source"]
            documents[document.id] = document
            supports = source in question.supporting if question.supporting else True
            whole = bool(question.supporting) and parts[source] == 1
            if supports and (whole or scorer.occurs(question.answers, document.text)):
                gold[document.id] = None
        answers = tuple(dict.fromkeys(question.answers))
        questions.append(GradedQuestion(question.id, question.text, answers, tuple(documents.values()), tuple(gold)))
    asked = in_order(questions, spec.question_order, spec.seed)[: spec.limit]
    kept = [question for question in asked if question.answers and question.documents]
    if not kept:
        raise CorpusError(f"{folder}: no question has answers and documents: add answers to questions.jsonl")
    left_out = len(asked) - len(kept)
    return QuestionSet(dataset, kept, {"questions without an answer": left_out} if left_out else {})


class _Names:
    """Documents by title, one for each title and text: the second text of a title is "title (2)"."""

    def __init__(self, words: int | None) -> None:
        self._words = words
        self._known: dict[tuple[str, str], Document] = {}
        self._names: set[str] = set()
        self._numbers: dict[str, int] = {}

    def document(self, title: str, text: str) -> Document:
        title, text = " ".join(title.split()) or "untitled", text.strip()
        if self._words is not None and len(words := text.split()) > self._words:
            text = " ".join(words[: self._words])
        if (title, text) not in self._known:
            metadata = {"title": title, "source": title}
            self._known[title, text] = Document(self._name(title), text, metadata=metadata)
        return self._known[title, text]

    def _name(self, title: str) -> str:
        name, number = title, self._numbers.get(title, 1)
        while name in self._names:
            number += 1
            name = f"{title} ({number})"
        self._numbers[title] = number
        self._names.add(name)
        return name


def _from_hub(dataset: Dataset, progress: Progress) -> Path:
    """Return the folder of the data set's validation split in the cache, converted first if it is not there."""
    folder = cache_folder() / "questions" / dataset.name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    advance = progress(f"{dataset.name}: converting", 1)
    with TemporaryDirectory(dir=folder.parent) as made:
        _convert(dataset, Path(made) / "whole")
        (Path(made) / "whole").rename(folder)
    advance()
    return folder


def _convert(dataset: Dataset, folder: Path) -> None:
    folder.mkdir()
    known: dict[tuple[str, str], str] = {}
    with (
        (folder / "documents.jsonl").open("w", encoding="utf-8") as documents,
        (folder / "questions.jsonl").open("w", encoding="utf-8") as questions,
        (folder / "run_own.jsonl").open("w", encoding="utf-8") as run,
    ):
        for row in _rows(dataset):
            answers, paragraphs = dataset.read(row)
            chunks: dict[str, bool] = {}
            for title, text, supports in paragraphs:
                if (title, text) not in known:
                    known[title, text] = str(len(known))
                    documents.write(json.dumps({"id": known[title, text], "title": title, "text": text}) + "\n")
                chunks[known[title, text]] = supports
            supporting = [id for id, supports in chunks.items() if supports]
            asked = {"id": row["id"], "question": row["question"], "answers": answers, "supporting": supporting}
            questions.write(json.dumps(asked) + "\n")
            run.write(json.dumps({"id": row["id"], "chunks": [*chunks]}) + "\n")


def _rows(dataset: Dataset) -> Iterator[_Row]:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"loading {dataset.name} from the Hub needs datasets: {install_hint('eval,retrieval')}, or give --data",
            name="datasets",
        ) from error
    try:
        _reach(dataset)
        yield from datasets.load_dataset(dataset.hub, dataset.config, split="validation")
    except Exception as error:
        # Errors of the many libraries below may quote addresses and tokens.
        raise CorpusError(
            f"{dataset.hub}: cannot be loaded ({type(error).__name__}): give --data (eval run: --questions), a folder "
            "as in docs/corpora.md"
        ) from error


def _reach(dataset: Dataset) -> None:
    # Without a network `datasets` retries for half a minute; this fails at once. With HF_HUB_OFFLINE=1 `datasets` only
    # reads its cache.
    hub: Any = import_module("huggingface_hub")
    try:
        hub.HfApi().dataset_info(dataset.hub, timeout=_PATIENCE_S)
    except Exception as error:
        if type(error).__name__ != "OfflineModeIsEnabled":
            raise
