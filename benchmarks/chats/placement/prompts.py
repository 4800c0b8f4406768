"""Prompts that differ in where their documents stand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ragorder.document import Document
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import NumberedPrompts

__all__ = ["PLACES", "PlacedPrompts"]

PLACES = ("in front", "labelled", "numbered by place", "numbered by rank", "behind a date", "behind the question")

_HEADER_TOKENS = 4
_DATE_TOKENS = 8
# Where the token ids of headers and dates begin; those of documents, system prompt and questions are elsewhere.
_HEADERS, _DATES = -2_000_000_000, -3_000_000_000


class PlacedPrompts:
    """Prompts without a model, with their documents at one of `PLACES`. A header has 4 tokens, a date 8, a question 20
    and the system prompt 64."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._plain = NumberedPrompts()
        self._labels: dict[str, int] = {}
        self.prefix_tokens = self._plain.prefix_tokens
        self._headers = place in ("labelled", "numbered by place", "numbered by rank")

    def document_tokens(self, document: Document) -> int:
        return document.token_count + _HEADER_TOKENS * self._headers

    def suffix_tokens(self, request: TraceRequest) -> int:
        return self._plain.suffix_tokens(request)

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> array[int]:
        system, question = self._around(number, request)
        shown = array("q")
        for place, document in enumerate(documents):
            if self._headers:
                shown.extend(_run(_HEADERS, self._header(place, document, request), _HEADER_TOKENS))
            shown += self._alone(number, request, document)
        if self._place == "behind a date":
            system.extend(_run(_DATES, number, _DATE_TOKENS))
        parts = (system, question, shown) if self._place == "behind the question" else (system, shown, question)
        return sum(parts, array("q"))

    def _header(self, place: int, document: Document, request: TraceRequest) -> int:
        if self._place == "labelled":
            return self._labels.setdefault(document.key, len(self._labels))
        return place if self._place == "numbered by place" else request.documents.index(document)

    def _around(self, number: int, request: TraceRequest) -> tuple[array[int], array[int]]:
        ids = self._plain.token_ids(number, request, ())
        return ids[: self.prefix_tokens], ids[self.prefix_tokens :]

    def _alone(self, number: int, request: TraceRequest, document: Document) -> array[int]:
        ids = self._plain.token_ids(number, request, (document,))
        return ids[self.prefix_tokens : self.prefix_tokens + document.token_count]


def _run(first: int, number: int, tokens: int) -> range:
    return range(first + number * tokens, first + (number + 1) * tokens)
