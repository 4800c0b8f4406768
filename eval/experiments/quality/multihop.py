"""HotpotQA (distractor), 2WikiMultiHopQA and MuSiQue, whose paragraphs come shuffled: their order is no ranking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ragorder.eval.experiments.quality.base import GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.experiments.quality.records import SourceRecord, read_records

__all__ = ["read_hotpotqa", "read_musique", "read_two_wiki"]


def read_hotpotqa(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """hotpot_dev_distractor_v1.json, or hotpotqa/hotpot_qa."""
    for record in records:
        yield _paragraphs(record, reading, (record.string("answer"),))


def read_two_wiki(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """dev.json, or framolfese/2WikiMultihopQA; with id_aliases.json as in version 1.1 of the official script."""
    aliases = _aliases(reading.aliases) if reading.aliases else {}
    for record in records:
        more = aliases.get(record.name("answer_id"), ()) if "answer_id" in record else ()
        yield _paragraphs(record, reading, (record.string("answer"), *more))


def _paragraphs(record: SourceRecord, reading: Reading, answers: tuple[str, ...]) -> GradedQuestion:
    supporting = {fact.text("title") for fact in record.pairs("supporting_facts", "title", "sent_id")}
    documents = QuestionDocuments()
    for paragraph in record.pairs("context", "title", "sentences"):
        title = paragraph.text("title")
        document = reading.document(title, " ".join(map(str.strip, paragraph.strings("sentences"))))
        documents.add(document, gold=title in supporting)
    return documents.question(record.name("_id", "id"), record.string("question"), answers)


def _aliases(path: Path) -> dict[str, list[str]]:
    return {
        record.name("Q_id"): [*record.strings("aliases"), *record.strings("demonyms")] for record in read_records(path)
    }


def read_musique(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """musique_ans_v1.0_dev.jsonl, or dgslibisey/MuSiQue. Unanswerable questions of musique_full are skipped."""
    for record in records:
        if record.fields.get("answerable") is False:
            reading.passed_over["questions without an answer"] += 1
            continue
        documents = QuestionDocuments()
        for paragraph in record.records("paragraphs"):
            supports = paragraph.fields.get("is_supporting")
            if not isinstance(supports, bool):
                paragraph.fail("'is_supporting' must be true or false")
            documents.add(reading.document(paragraph.text("title"), paragraph.text("paragraph_text")), gold=supports)
        aliases = record.strings("answer_aliases") if "answer_aliases" in record else []
        yield documents.question(record.name("id"), record.string("question"), (record.string("answer"), *aliases))
