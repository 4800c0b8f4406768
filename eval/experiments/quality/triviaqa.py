"""TriviaQA. A page is gold if it contains an alias of the answer (distant supervision).

The official script asks web questions once for each page; here each question is asked once, with all its pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ragorder.eval.experiments.quality.base import GradedQuestion, QuestionDocuments, Reading
from ragorder.eval.experiments.quality.metrics import SCORERS
from ragorder.eval.experiments.quality.records import SourceRecord

__all__ = ["read_triviaqa"]

_NO_PAGE = "pages that are not in the evidence folder, or empty"
_NO_PAGES = "questions without a page"


def read_triviaqa(records: Iterable[SourceRecord], reading: Reading) -> Iterator[GradedQuestion]:
    """qa/*.json of triviaqa-rc or triviaqa-unfiltered with evidence/, or mandarjoshi/trivia_qa: web pages by rank, then
    Wikipedia's."""
    for record in records:
        official = "QuestionId" in record
        answers = _official_answers(record) if official else _hub_answers(record)
        documents, found = QuestionDocuments(), False
        for title, text in _official_pages(record, reading) if official else _hub_pages(record):
            if not text.strip():
                reading.passed_over[_NO_PAGE] += 1
                continue
            document, found = reading.document(title, text), True
            documents.add(document, gold=SCORERS["triviaqa"].occurs(answers, document.text))
        if not found:
            reading.passed_over[_NO_PAGES] += 1
            continue
        yield documents.question(
            record.name("QuestionId", "question_id"), record.string("Question", "question"), answers
        )


def _official_answers(record: SourceRecord) -> tuple[str, ...]:
    answer = record.record("Answer")
    human = answer.strings("HumanAnswers") if "HumanAnswers" in answer else []
    return _some(answer, [*answer.strings("NormalizedAliases"), *human], "NormalizedAliases")


def _hub_answers(record: SourceRecord) -> tuple[str, ...]:
    answer = record.record("answer")
    return _some(answer, answer.strings("normalized_aliases"), "normalized_aliases")


def _some(answer: SourceRecord, accepted: list[str], field: str) -> tuple[str, ...]:
    if not accepted:
        answer.fail(f"{field!r} is empty: is this the test split, which has no answers?")
    return tuple(dict.fromkeys(accepted))


def _official_pages(record: SourceRecord, reading: Reading) -> Iterator[tuple[str, str]]:
    evidence = reading.evidence
    if evidence is None or not evidence.is_dir():
        record.fail("its pages are in files of their own: give --evidence, the folder with web/ and wikipedia/")
    results = record.records("SearchResults") if "SearchResults" in record else []
    for page in sorted(results, key=_rank):
        yield page.text("Title"), _page(evidence / "web", page)
    for page in record.records("EntityPages") if "EntityPages" in record else []:
        yield page.text("Title"), _page(evidence / "wikipedia", page)


def _page(folder: Path, page: SourceRecord) -> str:
    name = page.string("Filename")
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts:
        page.fail("'Filename' leads out of the evidence folder: is this file TriviaQA's?")
    try:
        return folder.joinpath(*parts).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        page.fail(f"its page cannot be read ({error.strerror})")


def _hub_pages(record: SourceRecord) -> Iterator[tuple[str, str]]:
    for page in sorted(record.records("search_results"), key=_rank):
        yield page.text("title"), page.text("search_context")
    for page in record.records("entity_pages"):
        yield page.text("title"), page.text("wiki_context")


def _rank(page: SourceRecord) -> int:
    rank = page.fields.get("Rank", page.fields.get("rank"))
    if isinstance(rank, bool) or not isinstance(rank, int):
        page.fail("'Rank' must be an integer")
    return rank
