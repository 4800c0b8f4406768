"""The data sets, from files in their official format or from the Hugging Face Hub."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.eval.data.corpora.base import CorpusError
from ragorder.eval.data.retrieval import Retriever
from ragorder.eval.experiments.quality.base import QualityError, Question, Reading
from ragorder.eval.experiments.quality.metrics import SCORERS, Scorer
from ragorder.eval.experiments.quality.multihop import read_hotpotqa, read_musique, read_two_wiki
from ragorder.eval.experiments.quality.natural_questions import read_natural_questions
from ragorder.eval.experiments.quality.records import Record, read_records
from ragorder.eval.experiments.quality.triviaqa import read_triviaqa

if TYPE_CHECKING:
    from ragorder.eval.running.progress import Progress

__all__ = ["DATASETS", "Dataset", "QuestionSet", "load_questions"]


_FILE = "give --data FILE (eval run: --questions DIR)"
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set: how its records are read and scored, and where it is on the Hub. `container` is the field of a file
    that holds its records, if they stand in one. `questions` are about how many it has, for a progress bar."""

    name: str
    questions: int
    read: Callable[[Iterable[Record], Reading], Iterator[Question]]
    hub: str
    config: str | None = None
    split: str = "validation"
    container: str | None = None

    @property
    def scorer(self) -> Scorer:
        return SCORERS[self.name]


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset("hotpotqa", 7_405, read_hotpotqa, "hotpotqa/hotpot_qa", "distractor"),
        Dataset("musique", 2_417, read_musique, "dgslibisey/MuSiQue"),
        Dataset("2wikimultihopqa", 12_576, read_two_wiki, "framolfese/2WikiMultihopQA"),
        Dataset("triviaqa", 17_944, read_triviaqa, "mandarjoshi/trivia_qa", "rc", container="Data"),
        Dataset("nq", 7_830, read_natural_questions, "google-research-datasets/natural_questions", "dev"),
    )
}
"""The data sets by name."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions of one data set, in the order in which they are asked. `passed_over` counts what of the data could not
    be used, by reason."""

    dataset: Dataset
    questions: list[Question]
    passed_over: Mapping[str, int]


def load_questions(
    name: str,
    data: Path | None = None,
    *,
    config: str | None = None,
    split: str | None = None,
    evidence: Path | None = None,
    aliases: Path | None = None,
    limit: int | None = None,
    order: str = "data",
    seed: int = 0,
    top_k: int | None = None,
    document_words: int | None = None,
    retriever: Retriever | None = None,
    progress: Progress | None = None,
) -> QuestionSet:
    """The questions of a data set in `order` "data" or "random" (drawn with `seed`), the first `limit` of them, each
    with its first `top_k` documents, of at most `document_words` words each.

    `data` is an official file; without it the Hub's `config` and `split` are loaded by the package `datasets`.
    `evidence` (TriviaQA's folder) and `aliases` (2WikiMultiHopQA's id_aliases.json) are looked for beside `data` if
    they are not given. With a `retriever` the documents of all these questions are one corpus, from which `top_k`
    (by default 10) are retrieved for each question: then questions share documents, and their order is a ranking.

    Raises QualityError for a data set or a combination that there is not, CorpusError naming file and record for data
    that cannot be read, ImportError naming what to install.
    """
    if name not in DATASETS:
        raise QualityError(f"unknown data set {name!r}: choose from {', '.join(DATASETS)}")
    if order not in ("data", "random"):
        raise QualityError(f"unknown order {order!r} of the questions: choose data or random")
    for option, value in (("limit", limit), ("top-k", top_k), ("document-words", document_words)):
        if value is not None and value < 1:
            raise QualityError(f"--{option} must be at least 1, got {value}")
    if data is not None and (config or split):
        raise QualityError("--config and --split choose from the Hub's data: leave them out with --data")
    if evidence is not None and name != "triviaqa":
        raise QualityError("--evidence is the folder of TriviaQA's pages: leave it out")
    if aliases is not None and name != "2wikimultihopqa":
        raise QualityError("--aliases is 2WikiMultiHopQA's id_aliases.json: leave it out")
    dataset = DATASETS[name]
    dataset = replace(dataset, config=config or dataset.config, split=split or dataset.split)
    if data is None:
        streamed = limit is not None and order == "data"
        records, where = _from_hub(dataset, streaming=streamed), dataset.hub
    else:
        records, where = read_records(data, dataset.container), str(data)
        evidence, aliases = evidence or _beside(data, "evidence"), aliases or _beside(data, "id_aliases.json")
    reading = Reading(
        document_words=document_words,
        evidence=evidence if name == "triviaqa" else None,
        aliases=aliases if name == "2wikimultihopqa" else None,
    )
    read = _distinct(dataset.read(records, reading), where)
    wanted = limit if order == "data" else None
    advance = progress(f"{name}: reading", wanted or dataset.questions) if progress else None
    questions = []
    for question in islice(read, wanted):
        questions.append(question)
        if advance:
            advance()
    if not questions:
        raise CorpusError(f"{where}: no question in it can be asked ({_reasons(reading)}): use another file")
    if order == "random":
        random.Random(seed).shuffle(questions)
        questions = questions[:limit]
    if retriever is not None:
        questions = _retrieve(questions, retriever, top_k or 10, reading)
    elif top_k is not None:
        questions = [_first(question, top_k) for question in questions]
    return QuestionSet(dataset, questions, dict(reading.passed_over))


def _from_hub(dataset: Dataset, *, streaming: bool) -> Iterator[Record]:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"loading {dataset.name} from the Hub needs datasets: pip install 'ragorder[quality]', or {_FILE}",
            name="datasets",
        ) from error
    where = f"{dataset.hub} ({', '.join(filter(None, (dataset.config, dataset.split)))})"
    try:
        _reach(dataset)
        rows = datasets.load_dataset(dataset.hub, dataset.config, split=dataset.split, streaming=streaming)
        for number, row in enumerate(rows, 1):
            yield Record(f"{where}: record {number}", row)
    except CorpusError:
        raise
    except Exception as error:
        # The package raises errors of many libraries, whose texts may quote addresses and tokens.
        raise CorpusError(
            f"{where}: cannot be loaded ({type(error).__name__}): download the official file and {_FILE}"
        ) from error


def _reach(dataset: Dataset) -> None:
    """Raises whatever the Hub's client raises. Without a network `datasets` tries again for half a minute before it
    says so; this asks once. With HF_HUB_OFFLINE=1 `datasets` looks into its cache alone, without a network request."""
    hub: Any = import_module("huggingface_hub")
    try:
        hub.HfApi().dataset_info(dataset.hub, timeout=_PATIENCE_S)
    except Exception as error:
        if type(error).__name__ != "OfflineModeIsEnabled":
            raise


def _beside(data: Path, name: str) -> Path | None:
    """A file or folder of the official distribution: beside the data, or beside its folder."""
    return next((path for path in (data.parent / name, data.parent.parent / name) if path.exists()), None)


def _distinct(questions: Iterator[Question], where: str) -> Iterator[Question]:
    seen = set()
    for question in questions:
        if question.id in seen:
            raise CorpusError(f"{where}: the question id {question.id!r} occurs twice: drop one of them")
        if not question.documents:
            raise CorpusError(f"{where}: question {question.id!r} has no documents to order: drop it")
        seen.add(question.id)
        yield question


def _first(question: Question, top_k: int) -> Question:
    documents = question.documents[:top_k]
    ids = {document.id for document in documents}
    return replace(question, documents=documents, gold=tuple(id for id in question.gold if id in ids))


def _retrieve(questions: list[Question], retriever: Retriever, top_k: int, reading: Reading) -> list[Question]:
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


def _reasons(reading: Reading) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reading.passed_over.items()) or "it is empty"
