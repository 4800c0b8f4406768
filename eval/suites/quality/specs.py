"""Specifications of a benchmark of answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, model_validator

from ragorder.common.jsonl import decode
from ragorder.eval.data.retrieval import Retriever
from ragorder.eval.data.trace import QuestionOrder
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.suites.quality.orders import DEFAULT_ORDERS, Order, QualityError

DatasetName = Literal["corpus", "hotpotqa", "musique", "2wikimultihopqa"]
TOP_K = 5
"""Documents a question of a corpus."""
ANSWERS = "answers.jsonl"
"""The file of answers beside the results."""

Line = dict[str, Any]
Done = Callable[[Mapping[str, Any], str], bool]

RANDOM_WEIGHTS = "random weights"

_FINGERPRINT = "fingerprint.json"
_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")
_LONGEST_HEADER = 100_000_000
_STRICT = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def _parsed(value: Any) -> Any:
    return Capacity.parse(value) if isinstance(value, str) else value


class QuestionsSpec(BaseModel):
    """Questions with known answers: `QuestionsSpec(dataset="hotpotqa", limit=100, retriever="bm25")`."""

    model_config = _STRICT

    dataset: DatasetName = "corpus"
    data: Path | None = Field(
        default=None,
        description="Folder of the questions and their documents, as in docs/corpora.md.",
        json_schema_extra={"unset": "the Hub's, converted once; corpus: the sample that comes with ragorder"},
    )
    limit: int | None = Field(default=None, ge=1, description="Only the first N questions.")
    question_order: QuestionOrder = Field(
        default="data",
        description="Order of the questions: as given; shuffled; 300 of them 1,000 times, by Zipf's law; 40 topics of "
        "five questions that share documents.",
    )
    seed: int = Field(default=0, description="Seed of the order of the questions and of policy random.")
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Documents a question.",
        json_schema_extra={"unset": "5 of a corpus, 10 with --retriever, else all"},
    )
    document_words: int | None = Field(default=None, ge=1, description="Cut documents to N words.")
    retriever: Annotated[Retriever | str | None, SkipValidation] = Field(
        default=None,
        description="Retrieve each question's documents from those of all questions, so that questions share them.",
        json_schema_extra={"unset": "those of the folder's run; a data set has each question's own"},
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.data is not None and not self.data.is_dir():
            raise ValueError("--data is a folder with documents.jsonl, questions.jsonl and a run (docs/corpora.md)")
        return self


class AnswererSpec(BaseModel):
    """The engine that answers, in this process or at `base_url`."""

    model_config = _STRICT

    engine: Literal["vllm", "torch", "openai"] = Field(
        default="vllm",
        description="vllm, torch: vLLM or the embedded engine in this process; openai: an OpenAI-compatible server.",
    )
    model: str | Path | None = Field(
        default=None,
        description="vllm, torch: the model [default: random weights, with which quality is not measured]. openai: "
        "the model of the tokenizer [default: four characters a token].",
    )
    base_url: str | None = Field(default=None, description="openai: the server, such as http://127.0.0.1:8000/v1.")
    served_model: str | None = Field(
        default=None, description="openai: the model's id there.", json_schema_extra={"unset": "the first one listed"}
    )
    api_key: str | None = Field(default=None, repr=False, description="openai: the server's API key.")
    concurrency: int = Field(default=1, ge=1, description="openai: N questions in flight.")
    capacity_tokens: Annotated[Capacity | None, BeforeValidator(_parsed)] = Field(
        default=None,
        description="The engine's cache.",
        json_schema_extra={"unset": "100000; openai: the server's /metrics, else 262144"},
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in one KV block.",
        json_schema_extra={"unset": "32; torch: 16; openai: the server's /metrics, else 16"},
    )
    output_tokens: int = Field(default=32, ge=1, description="Tokens an answer, at most.")

    def check(self) -> None:
        """Raises QualityError for options that do not fit the engine."""
        server = self.engine == "openai"
        if server and not self.base_url:
            raise QualityError("--engine openai needs --base-url, the address of the server")
        if not server and (self.base_url or self.served_model):
            raise QualityError("--base-url and --served-model require --engine openai")
        if not server and self.concurrency > 1:
            raise QualityError(
                f"--engine {self.engine} answers one question at a time: --concurrency requires --engine openai"
            )


@dataclass(frozen=True, slots=True)
class QualityBench:
    """Questions, an engine, and orders of documents (see `Order`). In a `dry_run` a stub gives the accepted answer,
    then none. Raises QualityError. `suite`, `suite_cell` (None: the specifications) and `session` are written into the
    results. `answers`: the file in which an engine in this process keeps its answers, so an interrupted run goes on."""

    questions: QuestionsSpec
    engine: AnswererSpec = field(default_factory=AnswererSpec)
    orders: tuple[str, ...] = DEFAULT_ORDERS
    dry_run: bool = False
    suite: str = "quality"
    suite_cell: Mapping[str, Any] | None = None
    session: str | None = None
    answers: Path | None = None

    def __post_init__(self) -> None:
        if not self.orders:
            raise QualityError("there is no order of documents: name one at least")
        if len(set(self.orders)) < len(self.orders):
            raise QualityError("the same order twice: name each order once")
        if not self.dry_run:
            self.engine.check()

    @property
    def fuses(self) -> bool:
        return any(Order.parse(order).fused for order in self.orders)

    @property
    def cells(self) -> list[Line]:
        """In a dry run one with the accepted answers, and one with none."""
        cell = self._cell() if self.suite_cell is None else dict(self.suite_cell)
        return [cell | {"answers": each} for each in ("accepted", "empty")] if self.dry_run else [cell]

    def _cell(self) -> Line:
        asked, engine, real = self.questions, self.engine, not self.dry_run
        model = str(engine.model) if engine.model else None if engine.engine == "openai" else RANDOM_WEIGHTS
        capacity, retriever = engine.capacity_tokens, asked.retriever
        return {
            "dataset": asked.dataset,
            "data": str(asked.data) if asked.data else None,
            "limit": asked.limit,
            "question_order": asked.question_order,
            "top_k": asked.top_k,
            "document_words": asked.document_words,
            "retriever": retriever if isinstance(retriever, str) else retriever and retriever.name,
            "engine": engine.engine if real else "stub",
            "model": engine.served_model or model if real else None,
            "base_url": engine.base_url if real else None,
            "capacity_tokens": capacity and (capacity.tokens or str(capacity)),
            "block_size": engine.block_size,
            "output_tokens": engine.output_tokens,
            "concurrency": engine.concurrency,
        }


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`parameters` None: unknown; `from_name`: read from the model's name."""

    name: str
    parameters: int | None = None
    random_weights: bool = False
    from_name: bool = False

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def model_facts(name: str, root: str | Path | None = None) -> ModelFacts:
    """`root` is the folder or Hub name that the model was loaded from (None: `name`)."""
    folder = Path(root or name)
    if folder.is_dir():
        counted = _count(folder)
        if counted or (folder / _FINGERPRINT).is_file():
            return ModelFacts(name, counted, (folder / _FINGERPRINT).is_file())
    sizes = [float(size) for text in (name, str(root or "")) for size in _BILLIONS.findall(text.rpartition("/")[2])]
    return ModelFacts(name, int(sizes[0] * 1e9), from_name=True) if sizes else ModelFacts(name)


def _count(folder: Path) -> int | None:
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = decode(file.read(length)) if length < _LONGEST_HEADER else {}
            total += sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total or None
