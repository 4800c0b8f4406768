"""Making of a conversation's next turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ragorder._repeats import check_reference, name_in, openings_behind, stands_in
from ragorder.clouds import PromptParts, openai_content
from ragorder.conversation import (
    Message,
    MessageFormat,
    OrdersTurns,
    Repeat,
    Turn,
    digest_of,
    read_history,
    segments_of,
    texts_of,
)
from ragorder.document import Document, Estimate
from ragorder.ordering import Ordering
from ragorder.rebase import Standing, lay_out_anew, read_earlier
from ragorder.trie.histories import History, Segment

__all__ = ["make_turn"]

_BEARERS = ("user", "tool", "system", "developer", "function")


def make_turn(
    form: MessageFormat,
    question: str,
    documents: Iterable[Document],
    history: Iterable[Message],
    orderer: OrdersTurns,
    *,
    repeat: Repeat,
    reference: str,
    tool_call_id: str | None,
    rebase: Iterable[Document] | None = None,
    **options: Any,
) -> Turn:
    """As `PromptBuilder.turn`; `options` are those of the orderer."""
    if repeat not in ("name", "send"):
        raise ValueError(f"repeat must be 'name' or 'send', got {repeat!r}")
    if rebase is not None and repeat != "name":
        raise ValueError("rebase names the documents of all turns: it needs repeat='name'")
    check_reference(reference)
    earlier = None if rebase is None else read_earlier(rebase)
    given = list(documents)
    messages, front = read_history(history, form)
    if tool_call_id is not None and not messages:
        raise ValueError("a tool's result follows its call: give history=[…, the assistant's message with the call]")
    text = form.question(question, given) if tool_call_id is None else ""
    maker = _TurnMaker(form, orderer, reference, tool_call_id, options, front, messages)
    return maker.make(text, given, earlier, names=repeat == "name")


@dataclass(frozen=True, slots=True)
class _Place:
    """Documents, and the messages before and after them."""

    documents: list[Document]
    history: History


@dataclass(frozen=True, slots=True)
class _TurnMaker:
    form: MessageFormat
    orderer: OrdersTurns
    reference: str
    tool_call_id: str | None
    options: dict[str, Any]
    front: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    def make(self, text: str, given: list[Document], earlier: list[Document] | None, *, names: bool) -> Turn:
        """`text` is the question, `given` the turn's documents, `earlier` those of former turns, if these may be laid
        out again."""
        form = self.form
        named: list[Document] = self._standing(given) if names and self.messages else []
        held = set(map(id, named))
        asked = self._names(named) + text
        new = [each for each in given if id(each) not in held]
        if new:
            question = Segment(digest_of(asked), self._length(asked))
        else:
            # As in a conversation that was laid out again.
            (question,) = segments_of([self._message(form.escape(asked))], form)
        place = _Place(new, History(segments_of(self.messages, form), question))
        if earlier is not None and self.orderer.has_lost(place.history, scope=self.options.get("scope")):
            turn = self._lay_out_anew(text, given, earlier, place)
            if turn is not None:
                return turn
        ordering = self._order(place)
        try:
            content = self._content(ordering, asked)
            if not self.messages and self._system:
                content = _behind(self._system, content)
            messages = [*self.front, *self.messages, self._message(content)]
            return Turn(messages, ordering, named, False, form.closing_tokens, len(self.front))
        except BaseException:
            ordering.discard()
            raise

    def _lay_out_anew(self, text: str, given: list[Document], earlier: list[Document], appended: _Place) -> Turn | None:
        """None if less has to be computed as it is."""
        form = self.form
        openings = openings_behind(form, self.reference)
        asked, before = (list(map(self._as_standing, documents)) for documents in (given, earlier))
        layout = lay_out_anew(self.messages, asked, before, system=self._system, openings=openings)
        if layout is None:
            return None
        first, *others = [*layout.messages, self._message(form.escape(self._names(given) + text))]
        rest = first["content"]
        follows = [Segment(digest_of(rest), self._length(rest)), *segments_of(others, form)]
        place = _Place(layout.documents, History(question=follows))
        if self._computed_tokens(place) >= self._computed_tokens(appended):
            return None
        ordering = self._order(place)
        try:
            content = form.escape("".join(map(form.document_text, ordering.documents)) + rest)
            if not content.endswith(rest):
                # A document's end and the question's beginning form a special token.
                ordering.discard()
                return None
            messages = [*self.front, {**first, "content": f"{self._system}{content}"}, *others]
            return Turn(messages, ordering, given, True, form.closing_tokens, len(self.front), len(self.front))
        except BaseException:
            ordering.discard()
            raise

    @property
    def _system(self) -> str:
        """What stands in the first message for a system prompt that has none of its own."""
        form = self.form
        return f"{form.system}\n\n" if form.system and not form.system_role else ""

    def _content(self, ordering: Ordering[Document], asked: str) -> str | list[dict[str, Any]]:
        """As parts where a cache resumes behind one of them."""
        form, texts = self.form, list(map(self.form.document_text, ordering.documents))
        if ordering.cloud is None or ordering.cloud.model.rules.resume != "marks":
            return form.escape("".join(texts) + asked)
        return openai_content(PromptParts("", texts, asked, escape=form.escape).texts()) or ""

    def _message(self, content: str | list[dict[str, Any]]) -> dict[str, Any]:
        if self.tool_call_id is None:
            return {"role": "user", "content": content}
        return {"role": "tool", "tool_call_id": self.tool_call_id, "content": content}

    def _order(self, place: _Place) -> Ordering[Document]:
        return self.orderer.order(place.documents, history=place.history, **self.options)

    def _computed_tokens(self, place: _Place) -> int:
        cached_tokens, end = self.orderer.predict_cached_tokens(
            place.documents, scope=self.options.get("scope"), history=place.history
        )
        return end - cached_tokens

    def _length(self, text: str) -> int:
        tokens = self.form.count(text) + self.form.turn_tokens
        return Estimate(tokens) if self.form.estimated else tokens

    def _names(self, documents: Iterable[Document]) -> str:
        return "".join(name_in(self.reference, each) for each in documents)

    def _standing(self, given: Sequence[Document]) -> list[Document]:
        bearers = [message for message in self.messages if message.get("role") in _BEARERS]
        texts = [text for message in bearers for text in texts_of(message)]
        openings = openings_behind(self.form, self.reference)
        return [each for each in given if stands_in(self.form, each, self.reference, texts, openings)]

    def _as_standing(self, document: Document) -> Standing:
        form = self.form
        texts = form.document_text(document), form.header(document), name_in(self.reference, document)
        return Standing(document, *map(form.escape, texts))


def _behind(text: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return text + content
    return [content[0] | {"text": text + content[0]["text"]}, *content[1:]] if content else openai_content([text])
