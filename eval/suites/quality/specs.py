"""Specifications of a benchmark of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, model_validator

from ragorder.eval.data.retrieval import Retriever
from ragorder.eval.data.trace import QuestionOrder
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.suites.quality.base import DatasetName, QualityError
from ragorder.eval.suites.quality.models import RANDOM_WEIGHTS
from ragorder.eval.suites.quality.orders import DEFAULT_ORDERS, Order

__all__ = ["ANSWERS", "TOP_K", "AnswererSpec", "Done", "Line", "QualityBench", "QuestionsSpec"]

TOP_K = 5
"""Documents a question of a corpus."""
ANSWERS = "answers.jsonl"
"""The file beside the results in which engines in this process keep their answers."""

Line = dict[str, Any]
Done = Callable[[Mapping[str, Any], str], bool]

_STRICT = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def _parsed(value: Any) -> Any:
    return Capacity.parse(value) if isinstance(value, str) else value


class QuestionsSpec(BaseModel):
    """Questions of a data set: `QuestionsSpec(dataset="hotpotqa", limit=100, retriever="bm25")`."""

    model_config = _STRICT

    dataset: DatasetName = "corpus"
    data: Path | None = Field(
        default=None,
        description="The data set's official file, plain or .gz; corpus: a folder as in docs/corpora.md.",
        json_schema_extra={"unset": "the Hub's; corpus: the sample that comes with ragorder"},
    )
    config: str | None = Field(default=None, description="Hub: another configuration, such as unfiltered (TriviaQA).")
    split: str | None = Field(
        default=None, description="Hub: another split.", json_schema_extra={"unset": "validation"}
    )
    evidence: Path | None = Field(
        default=None,
        description="triviaqa: the folder with web/ and wikipedia/.",
        json_schema_extra={"unset": "evidence/ beside the data"},
    )
    aliases: Path | None = Field(
        default=None,
        description="2wikimultihopqa: id_aliases.json.",
        json_schema_extra={"unset": "the one beside the data, if it exists"},
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
        json_schema_extra={"unset": "all; 10 with --retriever, 5 of a corpus"},
    )
    document_words: int | None = Field(default=None, ge=1, description="Cut documents to N words.")
    retriever: Annotated[Retriever | str | None, SkipValidation] = Field(
        default=None,
        description="Retrieve each question's documents from those of all questions, so that questions share them.",
        json_schema_extra={"unset": "each question has its own, in the order of the data; corpus: those of its run"},
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.dataset == "corpus" and self.data is not None and not self.data.is_dir():
            raise ValueError("a corpus is a folder with documents.jsonl, questions.jsonl and a run: name it in --data")
        if self.dataset != "corpus" and self.data is not None and self.data.is_dir():
            raise ValueError(f"--data is a file of {self.dataset}, not a folder: name the file, or the data set corpus")
        if self.data is not None and (self.config or self.split):
            raise ValueError("--config and --split choose from the Hub's data: leave them out with --data")
        if self.evidence is not None and self.dataset != "triviaqa":
            raise ValueError("--evidence is the folder of TriviaQA's pages: leave it out")
        if self.aliases is not None and self.dataset != "2wikimultihopqa":
            raise ValueError("--aliases is 2WikiMultiHopQA's id_aliases.json: leave it out")
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
    then none. Raises QualityError.

    `suite`, `suite_cell` (None: the specifications) and `session` are written into the results. `answers` is the file
    in which an engine in this process keeps what it has answered, so that an interrupted run goes on.
    """

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
        """The cells of the results: in a dry run one with the accepted answers, and one with none."""
        cell = self._cell() if self.suite_cell is None else dict(self.suite_cell)
        return [cell | {"answers": each} for each in ("accepted", "empty")] if self.dry_run else [cell]

    def _cell(self) -> Line:
        asked, engine, real = self.questions, self.engine, not self.dry_run
        model = str(engine.model) if engine.model else None if engine.engine == "openai" else RANDOM_WEIGHTS
        capacity, retriever = engine.capacity_tokens, asked.retriever
        return {
            "dataset": asked.dataset,
            "data": str(asked.data) if asked.data else None,
            "config": asked.config,
            "split": asked.split,
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
