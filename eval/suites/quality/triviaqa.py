"""TriviaQA. A page is gold if it contains an alias of the answer (distant supervision).

The official script asks web questions once for each page; here each question is asked once, with all its pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, AliasChoices, AliasGenerator, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_pascal

from ragorder.eval.suites.quality.base import GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.suites.quality.metrics import SCORERS
from ragorder.eval.suites.quality.records import Filled, Name, Rows, SourceFields, SourceRecord

__all__ = ["read_triviaqa"]

_NO_PAGE = "pages that are not in the evidence folder, or empty"
_NO_PAGES = "questions without a page"


class _TriviaFields(SourceFields):
    """Official names, `QuestionId`, or the Hub's, `question_id`."""

    model_config = ConfigDict(
        alias_generator=AliasGenerator(validation_alias=lambda name: AliasChoices(to_pascal(name), name))
    )


class _Answer(_TriviaFields):
    normalized_aliases: list[str]
    human_answers: list[str] = Field(default_factory=list)

    @field_validator("normalized_aliases")
    @classmethod
    def _known(cls, aliases: list[str]) -> list[str]:
        if not aliases:
            raise ValueError("is empty: is this the test split, which has no answers?")
        return aliases


P = TypeVar("P", bound="_Page")


class _Page(_TriviaFields):
    title: str
    rank: int | None = None


class _HubPage(_Page):
    text: str = Field(validation_alias=AliasChoices("search_context", "wiki_context"))


def _inside(name: str) -> str:
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ValueError("leads out of the evidence folder: is this file TriviaQA's?")
    return name


class _FilePage(_Page):
    filename: Annotated[Filled[str], AfterValidator(_inside)]


class _Question(_TriviaFields, Generic[P]):
    question_id: Name
    question: Filled[str]
    answer: _Answer
    search_results: Rows[P] = Field(default_factory=list)
    entity_pages: Rows[P] = Field(default_factory=list)

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.answer.normalized_aliases, *self.answer.human_answers]))

    @field_validator("search_results")
    @classmethod
    def _ranked(cls, pages: list[P]) -> list[P]:
        if any(page.rank is None for page in pages):
            raise ValueError("has a page without Rank")
        return sorted(pages, key=lambda page: page.rank or 0)


def read_triviaqa(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """qa/*.json of triviaqa-rc or triviaqa-unfiltered with evidence/, or mandarjoshi/trivia_qa: web pages by rank, then
    Wikipedia's."""
    for record in records:
        question, pages = _official(record, reading) if "QuestionId" in record else _of_hub(record)
        documents, found = QuestionDocuments(), False
        for title, text in pages:
            if not text.strip():
                reading.passed_over[_NO_PAGE] += 1
                continue
            document, found = reading.document(title, text), True
            documents.add(document, gold=SCORERS["triviaqa"].occurs(question.answers, document.text))
        if not found:
            reading.passed_over[_NO_PAGES] += 1
            continue
        yield documents.question(question.question_id, question.question, question.answers)


def _of_hub(record: SourceRecord) -> tuple[_Question[Any], Iterable[tuple[str, str]]]:
    question = record.read(_Question[_HubPage])
    return question, [(page.title, page.text) for page in (*question.search_results, *question.entity_pages)]


def _official(record: SourceRecord, reading: Reading) -> tuple[_Question[Any], Iterable[tuple[str, str]]]:
    question, evidence = record.read(_Question[_FilePage]), reading.evidence
    if evidence is None or not evidence.is_dir():
        record.fail("its pages are in files of their own: give --evidence, the folder with web/ and wikipedia/")
    web, wikipedia = (
        [(page.title, _text(record, evidence / folder / page.filename)) for page in pages]
        for folder, pages in (("web", question.search_results), ("wikipedia", question.entity_pages))
    )
    return question, [*web, *wikipedia]


def _text(record: SourceRecord, page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        record.fail(f"its page cannot be read ({error.strerror})")
