"""Data sets of questions, from official files or the Hugging Face Hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from ragorder.common.extras import install_hint
from ragorder.eval.data.corpora import CorpusError, load_folder
from ragorder.eval.data.retrieval import Retriever, make_retriever
from ragorder.eval.data.trace import check_ranked, in_order
from ragorder.eval.running.progress import Progress, silent
from ragorder.eval.suites.quality.base import DatasetName, GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.suites.quality.metrics import SCORERS, Scorer
from ragorder.eval.suites.quality.multihop import read_hotpotqa, read_musique, read_two_wiki
from ragorder.eval.suites.quality.natural_questions import read_natural_questions
from ragorder.eval.suites.quality.records import SourceRecord, read_records
from ragorder.eval.suites.quality.specs import TOP_K, QuestionsSpec
from ragorder.eval.suites.quality.triviaqa import read_triviaqa

__all__ = ["DATASETS", "Dataset", "QuestionSet", "load_questions"]


SAMPLE = Path(__file__).with_name("sample")
"""A corpus of 120 questions whose documents were retrieved."""
_RETRIEVED = 10
_FILE = "give --data FILE (eval run: --questions DIR)"
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """`hub`: its place on the Hub; `questions`: about how many; `container`: the field of the official file with the
    records."""

    name: DatasetName
    questions: int = 0
    read: Callable[[Iterable[SourceRecord], Reading], Iterator[GradedQuestion]] = lambda records, reading: iter(())
    hub: str = ""
    config: str | None = None
    split: str = "validation"
    container: str | None = None

    @property
    def scorer(self) -> Scorer:
        return SCORERS["nq" if self.name == "corpus" else self.name]


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset("hotpotqa", 7_405, read_hotpotqa, "hotpotqa/hotpot_qa", "distractor"),
        Dataset("musique", 2_417, read_musique, "dgslibisey/MuSiQue"),
        Dataset("2wikimultihopqa", 12_576, read_two_wiki, "framolfese/2WikiMultihopQA"),
        Dataset("triviaqa", 17_944, read_triviaqa, "mandarjoshi/trivia_qa", "rc", container="Data"),
        Dataset("nq", 7_830, read_natural_questions, "google-research-datasets/natural_questions", "dev"),
        Dataset("corpus"),
    )
}


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """`passed_over` counts unusable records and documents by reason."""

    dataset: Dataset
    questions: list[GradedQuestion]
    passed_over: Mapping[str, int]

    def with_gold(self) -> QuestionSet:
        """Those for which a gold document was retrieved. Raises CorpusError without any."""
        questions = [question for question in self.questions if question.gold]
        if not questions:
            raise CorpusError(f"{self.dataset.name}: no question has a gold document among those retrieved")
        left_out = {"questions without a gold document": len(self.questions) - len(questions)}
        return replace(self, questions=questions, passed_over={**self.passed_over, **left_out})


def load_questions(spec: QuestionsSpec, progress: Progress = silent) -> QuestionSet:
    """With a retriever, the documents of all questions are one corpus, from which `top_k` (10) are retrieved for each.
    Raises CorpusError naming file and record, ImportError naming what to install."""
    retriever = make_retriever(spec.retriever) if isinstance(spec.retriever, str) else spec.retriever
    if spec.dataset == "corpus":
        return _of_corpus(spec, retriever)
    data, evidence, aliases, limit = spec.data, spec.evidence, spec.aliases, spec.limit
    as_given = spec.question_order == "data"
    dataset = DATASETS[spec.dataset]
    dataset = replace(dataset, config=spec.config or dataset.config, split=spec.split or dataset.split)
    if data is None:
        records, where = _from_hub(dataset, streaming=limit is not None and as_given), dataset.hub
    else:
        records, where = read_records(data, dataset.container), str(data)
        evidence, aliases = evidence or _beside(data, "evidence"), aliases or _beside(data, "id_aliases.json")
    reading = Reading(
        document_words=spec.document_words,
        evidence=evidence if spec.dataset == "triviaqa" else None,
        aliases=aliases if spec.dataset == "2wikimultihopqa" else None,
    )
    wanted = limit if as_given else None
    advance = progress(f"{spec.dataset}: reading", wanted or dataset.questions)
    questions = []
    for question in islice(_distinct(dataset.read(records, reading), where), wanted):
        questions.append(question)
        advance()
    if not questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in reading.passed_over.items())
        raise CorpusError(f"{where}: no question in it can be asked ({reasons or 'it is empty'}): use another file")
    if spec.question_order == "random":
        questions = in_order(questions, "random", spec.seed)[:limit]
    if retriever is not None:
        questions = _retrieve(questions, retriever, spec.top_k or _RETRIEVED, reading)
    elif spec.top_k is not None:
        questions = [_first(question, spec.top_k) for question in questions]
    if spec.question_order in ("recurring", "topics"):
        questions = in_order(questions, spec.question_order, spec.seed)[:limit]
    return QuestionSet(dataset, questions, dict(reading.passed_over))


def _of_corpus(spec: QuestionsSpec, retriever: Retriever | None) -> QuestionSet:
    """The stream of `trace_of_corpus`. Gold is what was retrieved of a supporting document, and has an answer if that
    is cut into parts; where none are named, every document with an answer."""
    folder = spec.data or SAMPLE
    top_k = spec.top_k or (TOP_K if retriever is None else _RETRIEVED)
    corpus = load_folder(folder, retriever=retriever, top_k=top_k)
    check_ranked(corpus, top_k)
    parts = Counter(document.metadata["source"] for document in corpus.documents)
    reading, scorer, questions = Reading(document_words=spec.document_words), DATASETS["corpus"].scorer, []
    for question, ranking in zip(corpus.questions, corpus.rankings, strict=True):
        documents = QuestionDocuments()
        for each in (corpus.documents[position] for position in ranking):
            document, source = reading.document(each.metadata["title"] or each.id, each.text), each.metadata["source"]
            supports = source in question.supporting if question.supporting else True
            whole = bool(question.supporting) and parts[source] == 1
            documents.add(document, gold=supports and (whole or scorer.occurs(question.answers, document.text)))
        questions.append(documents.question(question.id, question.text, question.answers))
    asked = in_order(questions, spec.question_order, spec.seed)[: spec.limit]
    kept = [question for question in asked if question.answers and question.documents]
    if not kept:
        raise CorpusError(f"{folder}: no question has answers and documents: add answers to questions.jsonl")
    left_out = len(asked) - len(kept)
    return QuestionSet(DATASETS["corpus"], kept, {"questions without an answer": left_out} if left_out else {})


def _from_hub(dataset: Dataset, *, streaming: bool) -> Iterator[SourceRecord]:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"loading {dataset.name} from the Hub needs datasets: {install_hint('eval,retrieval')}, or {_FILE}",
            name="datasets",
        ) from error
    where = f"{dataset.hub} ({', '.join(filter(None, (dataset.config, dataset.split)))})"
    try:
        _reach(dataset)
        rows = datasets.load_dataset(dataset.hub, dataset.config, split=dataset.split, streaming=streaming)
        for number, row in enumerate(rows, 1):
            yield SourceRecord(f"{where}: record {number}", row)
    except CorpusError:
        raise
    except Exception as error:
        # Errors of the many libraries below may quote addresses and tokens.
        raise CorpusError(
            f"{where}: cannot be loaded ({type(error).__name__}): download the official file and {_FILE}"
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


def _beside(data: Path, name: str) -> Path | None:
    return next((path for path in (data.parent / name, data.parent.parent / name) if path.exists()), None)


def _distinct(questions: Iterator[GradedQuestion], where: str) -> Iterator[GradedQuestion]:
    seen = set()
    for question in questions:
        if question.id in seen:
            raise CorpusError(f"{where}: the question id {question.id!r} occurs twice: drop one of them")
        if not question.documents:
            raise CorpusError(f"{where}: question {question.id!r} has no documents to order: drop it")
        seen.add(question.id)
        yield question


def _first(question: GradedQuestion, top_k: int) -> GradedQuestion:
    documents = question.documents[:top_k]
    ids = {document.id for document in documents}
    return replace(question, documents=documents, gold=tuple(id for id in question.gold if id in ids))


def _retrieve(
    questions: list[GradedQuestion], retriever: Retriever, top_k: int, reading: Reading
) -> list[GradedQuestion]:
    corpus = list(dict.fromkeys(document.id for question in questions for document in question.documents))
    by_id = {document.id: document for question in questions for document in question.documents}
    texts = [f"{by_id[id].metadata['title']}\n{by_id[id].text}" for id in corpus]
    rankings = retriever.search(texts, [question.text for question in questions], top_k)
    retrieved = []
    for question, ranking in zip(questions, rankings, strict=True):
        ids = [corpus[position] for position in ranking]
        if not ids:
            reading.passed_over["questions for which nothing was retrieved"] += 1
            continue
        gold = tuple(id for id in question.gold if id in ids)
        retrieved.append(replace(question, documents=tuple(by_id[id] for id in ids), gold=gold))
    return retrieved
