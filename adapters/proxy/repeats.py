"""Documents that still stand in an earlier message: named instead of sent again."""

from __future__ import annotations

from collections.abc import Iterable
from string import Formatter

from ragorder.adapters.proxy.body import Passage
from ragorder.adapters.proxy.conversation import ChatBody
from ragorder.adapters.proxy.digest import digest_of
from ragorder.adapters.proxy.template import DocumentTemplate, TemplateError

__all__ = ["REFERENCE", "RepeatedDocuments"]

REFERENCE = "[{id}] is above."
_TURNS = ("function", "tool", "user")


class RepeatedDocuments:
    """Names documents of a user's or tool's message that stand in a message in front of it, in the same words and under
    the same id, of which that is the last version. What is sent depends on the messages alone, so an earlier turn is
    sent as it was before.

    `reference` has {id} in the place of the document. Raises TemplateError without one, or for a template without {id}.
    """

    def __init__(self, template: DocumentTemplate, reference: str = REFERENCE) -> None:
        if not template.shows_id:
            raise TemplateError("a document is named by its id: the template needs {id}")
        try:
            fields = {field for _, field, form, conversion in Formatter().parse(reference) if field is not None}
            reference.format(id="")
        except (ValueError, LookupError, AttributeError):
            fields = set()
        if fields != {"id"}:
            raise TemplateError("the text that names a document has {id}, and no other field")
        if template.has_one(reference.format(id="1")):
            raise TemplateError("the text that names a document must not look like one")
        self._template = template
        self._reference = reference

    def name(self, body: ChatBody) -> list[int] | None:
        """Ranks of those named in the last passage with documents; None if nothing was changed. Raises HTTPError."""
        standing: dict[str, bytes] = {}
        changes: list[tuple[Passage, str]] = []
        ranks: list[int] = []
        for passage in body.passages():
            if passage.role == "assistant":
                continue
            spans = list(self._template.spans(passage.text))
            if not spans:
                continue
            texts = [passage.text[start:end] for start, end in spans]
            known = [(self._template.split_at_id(text).id, digest_of(text)) for text in texts]
            ranks = []
            if passage.role in _TURNS:
                ranks = [rank for rank, (id, digest) in enumerate(known) if standing.get(id) == digest]
            if ranks:
                changes.append((passage, self._named(passage.text, [spans[rank] for rank in ranks])))
            standing.update(known)
        body.put_all(changes)
        return ranks if changes else None

    def _named(self, text: str, spans: Iterable[tuple[int, int]]) -> str:
        pieces, end = [], 0
        for start, stop in spans:
            id = self._template.split_at_id(text[start:stop]).id
            pieces += [text[end:start], self._reference.format(id=id)]
            end = stop
        return "".join([*pieces, text[end:]])
