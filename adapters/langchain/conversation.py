"""Turns of conversations in LangChain's messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ragorder.adapters.langchain.payloads import is_other, message_usage, text_of, written_tokens
from ragorder.adapters.turns import FrameworkTurns, NextTurn, off_loop, plain_message
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike

_WORD = re.compile(r"\w")
_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "function"),
)


@dataclass(frozen=True, slots=True)
class DocumentsInside:
    """The `order` of documents in a text, by number, and the text's `pieces` around them."""

    order: tuple[int, ...]
    pieces: tuple[str, ...]

    @classmethod
    def find(cls, text: str, documents: Sequence[str]) -> Self | None:
        """Return None unless the text has each document whole, without overlaps."""
        taken: list[tuple[int, int, int]] = []
        # A short one may be a part of a longer one.
        for number in sorted(range(len(documents)), key=lambda number: -len(documents[number])):
            wanted = documents[number]
            place = text.find(wanted) if wanted.strip() else -1
            while place >= 0:
                other_end = next((end for start, end, _ in taken if start < place + len(wanted) and place < end), None)
                if other_end is None:
                    break
                place = text.find(wanted, other_end)
            if place < 0:
                return None
            taken.append((place, place + len(wanted), number))
        taken.sort()
        starts, ends = [0, *(end for _, end, _ in taken)], [*(start for start, _, _ in taken), len(text)]
        pieces = tuple(text[start:end] for start, end in zip(starts, ends, strict=True))
        return cls(tuple(number for _, _, number in taken), pieces)

    @property
    def has_own_words(self) -> bool:
        return any(map(_WORD.search, self.pieces))

    def fill(self, shown: Sequence[str]) -> str:
        """Replace the documents, with the white space after each, by `shown`."""
        rest = (each + (piece if piece.strip() else "") for each, piece in zip(shown, self.pieces[1:], strict=True))
        return self.pieces[0] + "".join(rest)


def read_message(message: BaseMessage) -> dict[str, Any]:
    role = next((name for kind, name in _ROLES if isinstance(message, kind)), message.type)
    if isinstance(message, ChatMessage):
        role = message.role
    calls, call = (getattr(message, name, None) for name in ("tool_calls", "tool_call_id"))
    return plain_message(role, message.content, tool_calls=calls, tool_call_id=call)


def artifact_documents(message: ToolMessage) -> Sequence[Document]:
    """Return the documents of a tool with response_format="content_and_artifact"."""
    artifact = message.artifact if isinstance(message.artifact, list) else []
    found = [each if isinstance(each, Document) else _loaded(each) for each in artifact]
    return [each for each in found if each is not None] if None not in found else []


@dataclass(slots=True, eq=False)
class Prepared:
    """The `messages` to send, and those `changed`, which the application stores under the same ids."""

    messages: list[BaseMessage]
    turn: NextTurn[Document]
    changed: list[BaseMessage]
    sources: list[Document]


class LangChainTurns(FrameworkTurns[BaseMessage, Document]):
    """With `parts` contents keep their parts."""

    def __init__(
        self,
        orderer: OrdererLike,
        builder: PromptBuilder | None,
        *,
        found: Callable[[ToolMessage], Sequence[Document]] = artifact_documents,
        parts: bool = False,
        **options: Any,
    ) -> None:
        if parts:
            options["no_marks"] = ""
        super().__init__(orderer, builder, read=read_message, text=_text, metadata=_metadata, **options)
        self._found = found
        self._parts = parts

    def prepare(
        self, messages: Sequence[BaseMessage], documents: Sequence[Document] | None, *request: Any, sent_before: int = 0
    ) -> Prepared:
        """Prepare a request. Never raises.

        Messages after the last answer, and after the first `sent_before`, are new: the question gets the `documents`
        (None: unchanged), and with `repeat="name"` tool results name earlier documents.
        """
        sent = list(messages)
        answers = (place for place, message in enumerate(sent) if isinstance(message, AIMessage))
        changed: list[BaseMessage] = []
        sources: list[Document] = []
        turn: NextTurn[Document] | None = None
        for place in range(max(sent_before, max(answers, default=-1) + 1), len(sent)):
            message, is_last = sent[place], place == len(sent) - 1
            turn = None
            if isinstance(message, HumanMessage) and is_last and documents is not None:
                turn = self.next(text_of(message), documents, sent[:place], *request)
            elif isinstance(message, ToolMessage) and (found := self._documents_of(message)):
                if (inside := self._inside(message, found)) is None:
                    # The text does not contain the documents whole: it is sent unchanged.
                    sources += found
                    continue
                alone, call = not inside.has_own_words, message.tool_call_id
                turn = self.next("", found, sent[:place], *request, tool_call_id=call, is_last=is_last and alone)
                if not alone:
                    sources += turn.sources
                    sent[place], turn = self._named_inside(message, found, inside, turn), None
                    changed += [sent[place]] if sent[place] is not message else []
            if turn is not None:
                content = _beside_others(message, turn.content if self._parts else turn.text)
                sent[place] = message.model_copy(update={"content": content})
                changed.append(sent[place])
                sources += turn.sources
        return Prepared(sent, self.follow(sent, *request) if turn is None else turn, changed, sources)

    async def aprepare(
        self, messages: Sequence[BaseMessage], documents: Sequence[Document] | None, *request: Any, sent_before: int = 0
    ) -> Prepared:
        """`prepare`, off the event loop for long texts."""
        texts = [text for message in messages for text in _texts_in(getattr(message, "content", None))]
        texts += [getattr(document, "page_content", "") for document in documents or ()]
        work = partial(self.prepare, messages, documents, *request, sent_before=sent_before)
        return await off_loop(work, texts)

    def answered(self, request: Prepared, answer: BaseMessage) -> None:
        usage = message_usage(answer)
        if usage is None:
            # From LangChain's own cache.
            request.turn.discard()
        else:
            self.confirm(request.turn, request.messages[-1], answer, usage, written_tokens(answer))

    def questions(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        return [
            message.model_copy(update={"content": self.question_in(text_of(message))})
            if isinstance(message, HumanMessage)
            else message
            for message in messages
        ]

    def _inside(self, message: ToolMessage, found: Sequence[Document]) -> DocumentsInside | None:
        try:
            return DocumentsInside.find(text_of(message), list(map(_text, found)))
        except Exception as error:
            self.orderer.fall_back((), error)
            return None

    def _named_inside(
        self, message: ToolMessage, found: Sequence[Document], inside: DocumentsInside, turn: NextTurn[Document]
    ) -> ToolMessage:
        named = set(map(id, turn.repeated))
        try:
            shown = [self.shown(found[place], named=id(found[place]) in named) for place in inside.order]
        except Exception as error:
            self.orderer.fall_back((), error)
            return message
        return message.model_copy(update={"content": _beside_others(message, inside.fill(shown))})

    def _documents_of(self, message: ToolMessage) -> Sequence[Document]:
        if self.repeat == "send":
            return ()
        try:
            return list(self._found(message))
        except Exception as error:
            self.orderer.fall_back((), error)
            return ()


def _beside_others(message: BaseMessage, content: Any) -> Any:
    others = [] if isinstance(message.content, str) else [part for part in message.content if is_other(part)]
    if not others:
        return content
    return [*([{"type": "text", "text": content}] if isinstance(content, str) else content), *others]


def _texts_in(content: Any) -> list[Any]:
    if not isinstance(content, list):
        return [content]
    return [part.get("text") if isinstance(part, Mapping) else part for part in content]


def _loaded(artifact: Any) -> Document | None:
    if not isinstance(artifact, Mapping) or not isinstance(artifact.get("page_content"), str):
        return None
    members = {name: artifact.get(name) for name in ("id", "metadata")}
    return Document(artifact["page_content"], **{name: value for name, value in members.items() if value})


def _text(document: Document) -> str:
    return document.page_content


def _metadata(document: Document) -> Mapping[str, Any]:
    return document.metadata or {}
