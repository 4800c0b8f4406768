"""Natural Questions, open or with the whole page.

Open, as in DPR and FiD: {"question", "answers", "ctxs": [{"title", "text", "score", "has_answer"}]}, the best passage
first; gold by `has_answer`, or else if it contains an answer. With the page: its top-level long answer candidates in
order, gold around an annotator's long answer. As in NQ-open, only short answers of at most five tokens count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Self
from urllib.parse import unquote

from pydantic import AliasChoices, AliasPath, Field, model_validator

from ragorder.eval.suites.quality.base import GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.suites.quality.metrics import SCORERS
from ragorder.eval.suites.quality.records import Filled, Name, Rows, SourceFields, SourceRecord

__all__ = ["read_natural_questions"]

_LONGEST_ANSWER = 5
_TAG = re.compile(r"<[^>]*>")


class _Passage(SourceFields):
    title: str = ""
    text: Filled[str]
    has_answer: Any = None


class _OpenFields(SourceFields):
    id: Name | None = Field(None, validation_alias=AliasChoices("id", "question_id"))
    question: Filled[str]
    answers: Filled[list[str]] = Field(validation_alias=AliasChoices("answers", "answer"))
    ctxs: Rows[_Passage]


class _Span(SourceFields):
    start: int = Field(validation_alias="start_token")
    end: int = Field(validation_alias="end_token")


class _LongAnswer(_Span):
    start: int = Field(-1, validation_alias="start_token")
    end: int = Field(-1, validation_alias="end_token")


class _Candidate(_Span):
    top_level: bool = False


class _Annotation(SourceFields):
    long_answer: _LongAnswer
    short_answers: Rows[_Span]


class _Tokens(SourceFields):
    """Columns: a page has thousands of tokens."""

    token: list[str]
    is_html: list[bool] = Field(validation_alias=AliasChoices("is_html", "html_token"))

    @model_validator(mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            return {name: [row.get(name) for row in value] for name in value[0]}
        return value

    @model_validator(mode="after")
    def _even(self) -> Self:
        if len(self.token) != len(self.is_html):
            raise ValueError("must be a list of objects, or an object of lists of one length")
        return self


class _PageFields(SourceFields):
    id: Name = Field(validation_alias=AliasChoices("example_id", "id"))
    question: Filled[str] = Field(validation_alias=AliasChoices("question_text", AliasPath("question", "text")))
    title: str = Field("", validation_alias=AliasChoices("document_title", AliasPath("document", "title")))
    url: str = Field("", validation_alias="document_url")
    text: str | None = Field(None, validation_alias="document_text")
    tokens: _Tokens | None = Field(
        None, validation_alias=AliasChoices("document_tokens", AliasPath("document", "tokens"))
    )
    annotations: Rows[_Annotation]
    candidates: Rows[_Candidate] = Field(validation_alias="long_answer_candidates")


class _Page:
    def __init__(self, record: SourceRecord, fields: _PageFields) -> None:
        if fields.text is not None:
            self._tokens = fields.text.split(" ")
            self._is_html = [bool(_TAG.fullmatch(token)) for token in self._tokens]
        elif fields.tokens is not None:
            self._tokens, self._is_html = fields.tokens.token, fields.tokens.is_html
        else:
            record.fail("its page has no tokens: download the file again")
        named = re.search(r"[?&]title=([^&]*)", fields.url)
        self.title = fields.title or (unquote(named[1]).replace("_", " ") if named else "")
        self._record = record

    def check(self, span: _Span) -> _Span:
        if not 0 <= span.start <= span.end <= len(self._tokens):
            self._record.fail(f"its tokens are not among the {len(self._tokens)} of the page: download the file again")
        return span

    def text(self, span: _Span) -> str:
        """Without tags."""
        place = slice(self.check(span).start, span.end)
        tokens = zip(self._tokens[place], self._is_html[place], strict=True)
        return " ".join(token for token, is_html in tokens if not is_html)


def read_natural_questions(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    for number, record in enumerate(records):
        if "ctxs" in record:
            yield _open_question(record.read(_OpenFields), reading, number)
        elif "positive_ctxs" in record:
            record.fail(
                "this is DPR's training format, whose passages are not ranked: give a file of retriever results"
            )
        elif "document_text" in record or "document_tokens" in record or "document" in record:
            question = _page_question(record, reading)
            if question is not None:
                yield question
        else:
            record.fail("neither 'ctxs' (retrieved passages) nor a page: NQ-open alone has no documents to order")


def _open_question(fields: _OpenFields, reading: Reading, number: int) -> GradedQuestion:
    documents, scorer = QuestionDocuments(), SCORERS["nq"]
    for passage in fields.ctxs:
        document, says = reading.document(passage.title, passage.text), passage.has_answer
        gold = says if isinstance(says, bool) else scorer.occurs(fields.answers, document.text)
        documents.add(document, gold=gold)
    return documents.question(fields.id or f"nq-{number}", fields.question, fields.answers)


def _page_question(record: SourceRecord, reading: Reading) -> GradedQuestion | None:
    fields = record.read(_PageFields)
    page = _Page(record, fields)
    short = [page.text(span) for annotation in fields.annotations for span in annotation.short_answers]
    answers = [text for text in short if 0 < len(text.split()) <= _LONGEST_ANSWER]
    long_answers = [page.check(each.long_answer) for each in fields.annotations if each.long_answer.start >= 0]
    if not answers:
        reading.passed_over["questions without a short answer"] += 1
        return None
    documents = QuestionDocuments()
    for candidate in fields.candidates:
        text = page.text(candidate) if candidate.top_level else ""
        if not text:
            continue
        within = any(candidate.start <= long.start and long.end <= candidate.end for long in long_answers)
        documents.add(reading.document(page.title, text), gold=within)
    return documents.question(fields.id, fields.question, answers)
