"""HotpotQA (distractor), 2WikiMultiHopQA and MuSiQue, whose paragraphs come shuffled: their order is no ranking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field

from ragorder.eval.suites.quality.base import GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.suites.quality.records import (
    Filled,
    Name,
    Rows,
    SourceFields,
    SourceRecord,
    pairs,
    read_records,
)

__all__ = ["read_hotpotqa", "read_musique", "read_two_wiki"]


class _Paragraph(SourceFields):
    title: str
    sentences: list[str]


class _Fact(SourceFields):
    title: str


class _MultihopFields(SourceFields):
    id: Name = Field(validation_alias=AliasChoices("_id", "id"))
    question: Filled[str]
    answer: Filled[str]
    answer_id: Name = ""
    context: Annotated[list[_Paragraph], pairs("title", "sentences")]
    supporting_facts: Annotated[list[_Fact], pairs("title", "sent_id")]


class _AliasFields(SourceFields):
    id: Name = Field(validation_alias="Q_id")
    aliases: list[str]
    demonyms: list[str]


class _MuSiQueParagraph(SourceFields):
    title: str
    paragraph_text: str
    is_supporting: bool


class _MuSiQueFields(SourceFields):
    id: Name
    question: Filled[str]
    answer: Filled[str]
    answer_aliases: list[str] = Field(default_factory=list)
    paragraphs: Rows[_MuSiQueParagraph]


def read_hotpotqa(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """hotpot_dev_distractor_v1.json, or hotpotqa/hotpot_qa."""
    for record in records:
        yield _question(record.read(_MultihopFields), reading)


def read_two_wiki(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """dev.json, or framolfese/2WikiMultihopQA; with id_aliases.json as in version 1.1 of the official script."""
    aliases = _aliases(reading.aliases) if reading.aliases else {}
    for record in records:
        fields = record.read(_MultihopFields)
        yield _question(fields, reading, aliases.get(fields.answer_id, ()))


def _question(fields: _MultihopFields, reading: Reading, aliases: Iterable[str] = ()) -> GradedQuestion:
    supporting = {fact.title for fact in fields.supporting_facts}
    documents = QuestionDocuments()
    for paragraph in fields.context:
        document = reading.document(paragraph.title, " ".join(map(str.strip, paragraph.sentences)))
        documents.add(document, gold=paragraph.title in supporting)
    return documents.question(fields.id, fields.question, (fields.answer, *aliases))


def _aliases(path: Path) -> dict[str, list[str]]:
    read = (record.read(_AliasFields) for record in read_records(path))
    return {fields.id: [*fields.aliases, *fields.demonyms] for fields in read}


def read_musique(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """musique_ans_v1.0_dev.jsonl, or dgslibisey/MuSiQue. Unanswerable questions of musique_full are skipped."""
    for record in records:
        if record.fields.get("answerable") is False:
            reading.passed_over["questions without an answer"] += 1
            continue
        fields, documents = record.read(_MuSiQueFields), QuestionDocuments()
        for paragraph in fields.paragraphs:
            documents.add(reading.document(paragraph.title, paragraph.paragraph_text), gold=paragraph.is_supporting)
        yield documents.question(fields.id, fields.question, (fields.answer, *fields.answer_aliases))
