"""Natural Questions, open or with the whole page.

Open, as in DPR and FiD: {"question", "answers", "ctxs": [{"title", "text", "score", "has_answer"}]}, the best passage
first; gold by `has_answer`, or else if it contains an answer. With the page: its top-level long answer candidates in
order, gold around an annotator's long answer. As in NQ-open, only short answers of at most five tokens count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

from ragorder.eval.experiments.quality.base import GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.experiments.quality.metrics import SCORERS
from ragorder.eval.experiments.quality.records import SourceRecord

__all__ = ["read_natural_questions"]

_LONGEST_ANSWER = 5
_TAG = re.compile(r"<[^>]*>")


def read_natural_questions(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    for number, record in enumerate(records):
        if "ctxs" in record:
            yield _open_question(record, reading, number)
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


def _open_question(record: SourceRecord, reading: Reading, number: int) -> GradedQuestion:
    answers = record.strings("answers" if "answers" in record else "answer")
    if not answers:
        record.fail("'answers' is empty: leave this record out")
    documents, scorer = QuestionDocuments(), SCORERS["nq"]
    for passage in record.records("ctxs"):
        title, text = passage.text("title") if "title" in passage else "", passage.string("text")
        says = passage.fields.get("has_answer")
        document = reading.document(title, text)
        documents.add(document, gold=says if isinstance(says, bool) else scorer.occurs(answers, document.text))
    id = record.name("id", "question_id") if "id" in record or "question_id" in record else f"nq-{number}"
    return documents.question(id, record.string("question"), answers)


class _Page(NamedTuple):
    title: str
    tokens: list[str]
    is_html: list[bool]

    def text(self, start: int, end: int) -> str:
        return " ".join(
            token for token, html in zip(self.tokens[start:end], self.is_html[start:end], strict=True) if not html
        )


class _Span(NamedTuple):
    start: int
    end: int


def _page_question(record: SourceRecord, reading: Reading) -> GradedQuestion | None:
    page = _page(record)
    annotations = record.records("annotations")
    answers: list[str] = []
    long_answers = []
    for annotation in annotations:
        for short_answer in annotation.records("short_answers"):
            text = page.text(*_span(short_answer, page))
            if 0 < len(text.split()) <= _LONGEST_ANSWER:
                answers.append(text)
        long_answer = annotation.record("long_answer")
        if long_answer.fields.get("start_token", -1) >= 0:
            long_answers.append(_span(long_answer, page))
    if not answers:
        reading.passed_over["questions without a short answer"] += 1
        return None
    documents = QuestionDocuments()
    for candidate in record.records("long_answer_candidates"):
        if not candidate.fields.get("top_level"):
            continue
        span = _span(candidate, page)
        text = page.text(*span)
        if not text:
            continue
        within = any(span.start <= long.start and long.end <= span.end for long in long_answers)
        documents.add(reading.document(page.title, text), gold=within)
    question = record.fields.get("question")
    text = record.record("question").string("text") if isinstance(question, dict) else record.string("question_text")
    return documents.question(record.name("example_id", "id"), text, answers)


def _page(record: SourceRecord) -> _Page:
    if "document_text" in record:
        tokens = record.text("document_text").split(" ")
        return _Page(_title(record), tokens, [bool(_TAG.fullmatch(token)) for token in tokens])
    if "document_tokens" in record:
        listed = record.records("document_tokens")
        return _Page(
            _title(record), [each.text("token") for each in listed], [bool(each.value("html_token")) for each in listed]
        )
    document = record.record("document")
    listed = document.records("tokens")
    return _Page(
        document.text("title"),
        [each.text("token") for each in listed],
        [bool(each.value("is_html")) for each in listed],
    )


def _title(record: SourceRecord) -> str:
    if "document_title" in record:
        return record.text("document_title")
    match = re.search(r"[?&]title=([^&]*)", record.text("document_url")) if "document_url" in record else None
    return unquote(match[1]).replace("_", " ") if match else ""


def _span(record: SourceRecord, page: _Page) -> _Span:
    start, end = record.value("start_token"), record.value("end_token")
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= len(page.tokens)):
        record.fail(f"its tokens are not among the {len(page.tokens)} of the page: download the file again")
    return _Span(start, end)
