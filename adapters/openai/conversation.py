"""Conversations of a client, whose turns only add messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ragorder import Document, Ordering, Turn
from ragorder.adapters.openai.call import Call, CallSetup
from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.adapters.openai.reply import Answer
from ragorder.conversation import REFERENCE, Message, Repeat, message_key
from ragorder.scope.request import Lengths

_TOOLS = ("tools", "functions")
# Shared by all conversations.
_INSTRUCTIONS = ("system", "developer")

A = TypeVar("A")
S = TypeVar("S")


@dataclass(eq=False, repr=False)
class _TurnCall(Call):
    conversation: Conversation[Any, Any] = field(kw_only=True)
    history: list[Message] = field(kw_only=True)

    def _order(self) -> Ordering[Document]:
        # Each attempt is a turn after the same history.
        chat = self.conversation
        self.turn = self.setup.builder.turn(
            self.query,
            self.documents,
            history=self.history,
            orderer=self.setup.orderer,
            scope=self.scope,
            repeat=chat.repeat,
            reference=chat.reference,
            rebase=chat.earlier(self.history),
            waiting=self.waiting,
            lengths=Lengths(suffix=self.setup.ordered.suffix_tokens(self.query, self.options)),
        )
        return self.turn.ordering

    def _request(self, ordering: Ordering[Document]) -> PromptRequest:
        body = self.turn.openai()
        return PromptRequest(body.pop("messages"), None, self.scope, self.options, extra_body=body)

    def _answered(self, answer: Answer) -> None:
        self.conversation.extend(self.turn, self.turn.answered(answer.text))

    def _topic(self) -> str | None:
        return self.conversation.topic(self.documents, self.history)


class Conversation(Generic[A, S]):
    """A conversation, from `OrderedClient.conversation`; one turn at a time.

        chat = rag.conversation(messages=stored)
        answer = chat.ask("When are orders shipped?", documents)
        stored = chat.messages

    `messages` is everything sent and answered; a failed turn does not change it. `turn` has the last turn's `new` and
    `repeated` documents.
    """

    def __init__(
        self,
        setup: CallSetup,
        generate: Callable[[Call], A],
        stream: Callable[[Call], S],
        messages: Iterable[Message] = (),
        scope: Hashable = None,
        repeat: Repeat = "name",
        reference: str = REFERENCE,
        rebase: Iterable[Document] | None = None,
    ) -> None:
        self.messages: list[Message] = list(messages)
        self.scope = scope
        self.repeat = repeat
        self.reference = reference
        self.rebase: Sequence[Document] | None = None
        if rebase is not None:
            from ragorder.turns import read_earlier

            self.rebase = read_earlier(rebase)
        # Keyed by the messages that contain them, while these are sent.
        self._sent: dict[str, Sequence[Document]] = {}
        self._turn: Turn | None = None
        self._setup = setup
        self._generate = generate
        self._stream = stream
        self._asked: tuple[str, Sequence[Document]] | None = None
        # Whether `turn` answers it.
        self._answered = False
        self._topic: str | None = None
        # Raises errors in the messages at once.
        setup.builder.segments(self.messages)

    @property
    def turn(self) -> Turn:
        """Last answered turn. Raises ValueError before the first answer."""
        if self._turn is None:
            raise ValueError("there is no turn yet: ask a question first")
        return self._turn

    def ask(self, question: str, documents: Sequence[Document] = (), **options: Any) -> A:
        """Return the `Answer`, a new turn. Options and errors as for `OrderedClient.generate`, without tools."""
        return self._generate(self._call(question, documents, options, hands_out=False))

    def stream(self, question: str, documents: Sequence[Document] = (), **options: Any) -> S:
        """Stream the answer, which is a turn once it is complete."""
        return self._stream(self._call(question, documents, options, hands_out=True))

    def regenerate(self, **options: Any) -> A:
        """Replace the answer to the last question. Raises ValueError before the first question."""
        if self._asked is None:
            raise ValueError("there is nothing to regenerate: ask a question first")
        history, (question, documents) = list(self.messages), self._asked
        if self._answered:
            places = (place for place in reversed(range(len(history))) if history[place] == self.turn.message)
            del history[next(places, len(history)) :]
        return self._generate(self._call(question, documents, options, history, hands_out=False))

    def branch(self) -> Conversation[A, S]:
        branch = copy(self)
        branch.messages, branch._sent = list(self.messages), dict(self._sent)
        branch._turn, branch._asked, branch._answered = None, None, False
        return branch

    def extend(self, turn: Turn, messages: Sequence[Message]) -> None:
        self._turn, self.messages = turn, list(messages)
        self._answered = True
        if self.rebase is not None:
            content = turn.bearer["content"]
            # Parts are for clouds, which never rebase.
            known = self._sent | ({content: turn.new} if isinstance(content, str) else {})
            self._sent = {content: known[content] for content in _contents(messages) if known.get(content)}

    def earlier(self, history: Sequence[Message]) -> list[Document] | None:
        if self.rebase is None:
            return None
        sent = (self._sent.get(content, ()) for content in _contents(history))
        return [*self.rebase, *(each for documents in sent for each in documents)]

    def topic(self, documents: Sequence[Document], history: Sequence[Message]) -> str | None:
        """Return one topic for all turns, since one engine has the history: the first message's, else the first
        documents'."""
        if self._topic is None:
            opening = next((message for message in history if message.get("role") not in _INSTRUCTIONS), None)
            if opening is not None:
                # A topic, too: nobody can test messages against it.
                key = message_key(opening)
                documents = [Document(key, key)]
            self._topic = self._setup.orderer.topic(documents, scope=self.scope)
        return self._topic

    def _call(
        self,
        question: str,
        documents: Sequence[Document],
        options: dict[str, Any],
        history: list[Message] | None = None,
        *,
        hands_out: bool,
    ) -> Call:
        for name in _TOOLS:
            if options.get(name) is not None:
                raise ValueError(f"{name}: a conversation has text answers only; use PromptBuilder.turn with tools")
        waiting = options.pop("waiting", ())
        call = _TurnCall(
            self._setup,
            question,
            documents,
            self.scope,
            waiting,
            options,
            hands_out,
            conversation=self,
            history=list(self.messages) if history is None else history,
        )
        self._asked, self._answered = (question, call.documents), self._answered and history is not None
        return call


def _contents(messages: Iterable[Message]) -> list[str]:
    return [content for message in messages if isinstance(content := message.get("content"), str)]
