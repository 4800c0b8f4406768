"""Next turns of a conversation in a framework's own messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, Self, TypeVar

from ragorder.adapters.reorder import ScopeOf
from ragorder.adapters.usage import ReportedUsage
from ragorder.citations import number_label
from ragorder.conversation import Message, Repeat, message_key, name_in, segments_of
from ragorder.document import Document
from ragorder.ordering import Ordering
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike
from ragorder.trie.histories import History, Segment

D = TypeVar("D")
M = TypeVar("M")
R = TypeVar("R")

Label = Callable[[Any], str]

_INSTRUCTIONS = ("system", "developer")
_OTHER_SYSTEM = (
    "messages begin with another system prompt than the builder's, so predictions of cached tokens are wrong by the "
    "difference: give its text as PromptBuilder(system=…)"
)
_NO_MARKS = (
    "the orderer's cache resumes only at breakpoints, but this adapter sends none, so nothing is reused: send turns by "
    "OrderedClient.conversation, LangChain's CacheOrderTurn(marks=…), or PromptBuilder.turn(…).anthropic()"
)
# Characters up to which a turn takes less time than a thread switch.
_SHORT = 1 << 14


async def off_loop(work: Callable[[], R], texts: Iterable[object]) -> R:
    """Run `work`, in a thread if the texts that it tokenises are long."""
    length = sum(len(text) for text in texts if isinstance(text, str))
    return work() if length <= _SHORT else await asyncio.to_thread(work)


def plain_message(role: object, content: object, **shown: object) -> dict[str, Any]:
    """Return a message for `PromptBuilder.turn`. Values that JSON lacks become their digest or type."""
    members = {"role": str(role), "content": content} | {name: value for name, value in shown.items() if value}
    plain: dict[str, Any] = json.loads(json.dumps(members, default=_opaque))
    return plain


@dataclass(eq=False, repr=False)
class NextTurn(Generic[D]):
    """A question or a tool's result at the end of a conversation.

    `content` is the message's, in parts for a cloud with breakpoints; `new` the documents in it, in prompt order,
    `repeated` those only named, best first. Finish a turn with `confirm` or `discard`; dropped, it is discarded.
    """

    content: Any
    new: list[D]
    repeated: list[D]
    ordering: Ordering[Document]
    closing_tokens: int = 0
    begun: bool = field(default=False, init=False)
    """Whether the answer's first token has arrived."""

    @property
    def sources(self) -> list[D]:
        return [*self.new, *self.repeated]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part["text"] for part in self.content)

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.ordering.readable()

    def set_history_keys(self, message: Message, answer: Message | None = None) -> None:
        """Call it before `confirm`. Raises TypeError."""
        keys = message_key(message), "" if answer is None else message_key(answer)
        self.ordering.set_history_keys(*keys, closing_tokens=self.closing_tokens)

    def confirm(self, usage: ReportedUsage | None = None, written_tokens: int | None = None) -> None:
        (usage or ReportedUsage()).confirm(self.ordering, written_tokens=written_tokens)

    def discard(self) -> None:
        self.ordering.discard()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """After an error, count the request as served without numbers if its answer had begun, else as discarded."""
        try:
            yield
        except BaseException:
            if self.begun:
                self.ordering.confirm()
            self.ordering.discard()
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # There cannot be two turns of one request.
        return self

    def __del__(self) -> None:
        # Without effect after `confirm`.
        if (ordering := getattr(self, "ordering", None)) is not None:
            ordering.discard()


class FrameworkTurns(Generic[M, D]):
    """Maker of next turns by `PromptBuilder.turn`. Thread-safe.

    History is sent as the framework's own objects. `label` cites and names a document. After an error, which is
    counted, all documents are sent in retrieval order. `no_marks` warns of a cache that resumes only at breakpoints.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        builder: PromptBuilder | None,
        *,
        read: Callable[[M], Message],
        text: Callable[[D], str],
        metadata: Callable[[D], Mapping[str, Any]],
        label: Label | None,
        scope: ScopeOf,
        repeat: Repeat,
        reference: str,
        no_marks: str = _NO_MARKS,
    ) -> None:
        self.orderer = orderer
        self.builder = PromptBuilder("") if builder is None else builder
        self.read = read
        self.repeat = repeat
        self._reference = reference
        self._no_marks = no_marks
        self._text = text
        self._metadata = metadata
        self._label = label
        self._scope = scope
        # Raises errors in the options at once.
        self.builder.turn("", [], orderer=_AsRanked(), repeat=repeat, reference=reference)

    def label(self, item: D) -> str:
        return number_label(self._text(item)) if self._label is None else str(self._label(item))

    @property
    def system(self) -> str:
        """The system message's text, "" for none."""
        form = self.builder.message_format
        return form.system if form.system_role else ""

    def question_in(self, content: str) -> str:
        opening = self.builder.question_opening
        _, found, question = content.rpartition(opening) if opening else ("", "", content)
        return question if found else content

    def next(
        self,
        question: str,
        items: Iterable[D],
        history: Sequence[M],
        *request: Any,
        tool_call_id: str | None = None,
        is_last: bool = True,
    ) -> NextTurn[D]:
        """Return the turn after a history; only a prompt's last one is ordered. A scope function gets `request`. Never
        raises."""
        items = list(items)
        try:
            documents = list(map(self._read_document, items))
            turn = self.builder.turn(
                question,
                documents,
                history=self._after_system(history),
                orderer=self.orderer if is_last else _AsRanked(),
                scope=self._scope_of(request),
                repeat=self.repeat,
                reference=self._reference,
                tool_call_id=tool_call_id,
            )
        except Exception as error:
            return self._as_ranked(question, items, tool_call_id, error)
        self._check_marks(turn.ordering)
        own = {id(document): item for document, item in zip(documents, items, strict=True)}
        return NextTurn(
            turn.message["content"],
            [own[id(document)] for document in turn.new],
            [own[id(document)] for document in turn.repeated],
            turn.ordering,
            self.builder.message_format.closing_tokens,
        )

    def follow(self, messages: Sequence[M], *request: Any) -> NextTurn[D]:
        """Return the turn of unchanged messages. Never raises."""
        form = self.builder.message_format
        try:
            *history, last = segments_of(self._after_system(messages), form) or [Segment("", 0)]
            scope = self._scope_of(request)
            ordering: Ordering[Document] = self.orderer.order([], history=History(history, question=last), scope=scope)
        except Exception as error:
            ordering = self.orderer.fall_back([], error)
        self._check_marks(ordering)
        return NextTurn("", [], [], ordering, form.closing_tokens)

    def shown(self, item: D, *, named: bool) -> str:
        """Raises errors of the functions that read the document."""
        document = self._read_document(item)
        form = self.builder.message_format
        return form.escape(name_in(self._reference, document) if named else form.document_text(document))

    def confirm(
        self,
        turn: NextTurn[D],
        message: M,
        answer: M | None = None,
        usage: ReportedUsage | None = None,
        written_tokens: int | None = None,
    ) -> None:
        # An unreadable message is not found again, but it was served.
        with suppress(Exception):
            turn.set_history_keys(self.read(message), None if answer is None else self.read(answer))
        turn.confirm(usage, written_tokens)

    def _read_document(self, item: D) -> Document:
        return Document(self.label(item), self._text(item), metadata=self._metadata(item))

    def _check_marks(self, ordering: Ordering[Document]) -> None:
        cloud = ordering.cloud
        if self._no_marks and cloud is not None and cloud.model.rules.resume == "marks":
            self.orderer.degrade(self._no_marks)

    def _scope_of(self, request: tuple[Any, ...]) -> Any:
        return self._scope(*request) if callable(self._scope) else self._scope

    def _after_system(self, history: Sequence[M]) -> list[Message]:
        messages = list(map(self.read, history))
        first = next((place for place, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
        system = self.builder.system
        if system and first and [each.get("content") for each in messages[:first]] != [system]:
            self.orderer.degrade(_OTHER_SYSTEM)
        return messages[first:]

    def _as_ranked(self, question: str, items: list[D], tool_call_id: str | None, error: Exception) -> NextTurn[D]:
        documents = [_readable(item, self._text) for item in items]
        ordering = self.orderer.fall_back(documents, error)
        try:
            texts = list(map(self.builder.document_text, documents))
            asked = self.builder.user_message(question, [], []) if tool_call_id is None else ""
        except Exception:
            # The builder's own label function failed.
            texts, asked = [f"{document.text}\n\n" for document in documents], question
        return NextTurn("".join(texts) + asked, items, [], ordering)


class _AsRanked:
    def order(self, documents: Iterable[D], **_: Any) -> Ordering[D]:
        ranked = list(documents)
        return Ordering(ranked, range(len(ranked)))

    def predict_cached_tokens(self, documents: Iterable[D], **_: Any) -> tuple[int, int]:
        return 0, 0

    def has_lost(self, history: History, **_: Any) -> bool:
        return False


def _readable(item: Any, text: Callable[[Any], str]) -> Document:
    try:
        shown = text(item)
        return Document(number_label(shown), shown)
    except Exception:
        shown = str(item)
        return Document(number_label(shown), shown)


def _opaque(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return blake2b(value, digest_size=16).hexdigest()
    for name in ("model_dump", "to_dict"):
        if (dump := getattr(value, name, None)) is not None:
            return dump()
    return type(value).__qualname__
