"""Haystack: ranker in cache order, and turns of chats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Self

from ragorder.common.extras import needs

with needs("haystack", "ragorder.adapters.haystack"):
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.dataclasses import ChatMessage
    from haystack.utils import deserialize_callable, serialize_callable

from ragorder.adapters.reorder import Key, Reorder, Tokens
from ragorder.adapters.turns import FrameworkTurns, Label, off_loop, plain_message
from ragorder.adapters.usage import ReportedUsage, read_usage
from ragorder.conversation import REFERENCE, Repeat
from ragorder.orderer import Orderer
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike
from ragorder.settings import Settings

__all__ = ["CacheOrderChatPromptBuilder", "CacheOrderFeedback", "CacheOrderRanker", "ChatTurn"]

_ID, _META = attrgetter("id"), attrgetter("meta")
_FUNCTIONS = ("key", "tokens")
_PROMPT = ("system", "document_template", "question_template", "state_ranking")


@component
class CacheOrderRanker:
    """Ranker for the engine's prefix cache, directly before the prompt builder. Thread-safe.

        pipeline.add_component("cache_order", CacheOrderRanker(orderer))

    - `orderer`, or `settings` for a new one (default: from the environment).
    - `top_k`: the most documents, duplicates included.
    - `scope`: the tenant.
    - `key`: a document's identity besides its content (default: its id).
    - `tokens`: its length in the prompt.

    Errors in `key` and `tokens` are counted and leave retrieval order. Orderings count as served at once. `from_dict`
    makes a new orderer and needs functions of a module. Raises ValueError, pydantic.ValidationError for settings.
    """

    def __init__(
        self,
        orderer: OrdererLike | None = None,
        *,
        settings: dict[str, Any] | None = None,
        top_k: int | None = None,
        scope: str | None = None,
        key: Key | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        _check(top_k)
        orderer = _either(orderer, settings)
        self.top_k = top_k
        self.scope = scope
        self._reorder = Reorder(orderer, text=_text, own_id=_ID, metadata=_META, key=key, tokens=tokens)

    @property
    def orderer(self) -> OrdererLike:
        return self._reorder.orderer

    def to_dict(self) -> dict[str, Any]:
        functions = {name: getattr(self._reorder, name) for name in _FUNCTIONS}
        return default_to_dict(
            self,
            settings=self.orderer.settings.model_dump(mode="json"),
            top_k=self.top_k,
            scope=self.scope,
            **{name: function and serialize_callable(function) for name, function in functions.items()},
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        parameters = data.get("init_parameters", {})
        functions = {name: deserialize_callable(parameters[name]) for name in _FUNCTIONS if parameters.get(name)}
        return default_from_dict(cls, data | {"init_parameters": parameters | functions})

    @component.output_types(documents=list[Document])
    def run(
        self, documents: list[Document], top_k: int | None = None, scope: str | None = None, query: str | None = None
    ) -> dict[str, list[Document]]:
        """`top_k` and `scope` override the ranker's; `query` is ignored. Raises ValueError."""
        _check(top_k)
        best = documents[: top_k or self.top_k]
        ordered, ordering = self._reorder.within(self.scope if scope is None else scope, best)
        ordering.confirm()
        return {"documents": ordered}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, documents: list[Document], top_k: int | None = None, scope: str | None = None, query: str | None = None
    ) -> dict[str, list[Document]]:
        # Ordering takes a fraction of a millisecond, without waiting.
        return self.run(documents, top_k, scope)


class ChatTurn:
    """A turn, from the prompt builder to the feedback. Loaded from a snapshot, it reports nothing."""

    def __init__(
        self, prompt: list[ChatMessage], confirm: Callable[[ChatMessage | None, ReportedUsage | None], None] | None
    ) -> None:
        self.prompt = prompt
        self._confirm = confirm

    def confirm(self, reply: ChatMessage | None = None) -> None:
        if self._confirm is not None:
            self._confirm(reply, None if reply is None else read_usage(reply.meta.get("usage")))

    def to_dict(self) -> dict[str, Any]:
        return {"prompt": [message.to_dict() for message in self.prompt]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls([ChatMessage.from_dict(message) for message in data["prompt"]], None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Pipelines copy values between components.
        return self


@component
class CacheOrderChatPromptBuilder:
    """Builder of a chat's next turn, instead of ChatPromptBuilder: documents follow the unchanged history. Thread-safe.

        pipeline.add_component("prompt", CacheOrderChatPromptBuilder(orderer, builder=PromptBuilder("Answer briefly.")))
        pipeline.connect("prompt.prompt", "llm.messages")

    - `orderer`, `settings`, `scope`: as for `CacheOrderRanker`.
    - `builder`, or `prompt` with the arguments of a new `PromptBuilder`; it has the system prompt.
    - `repeat`, `reference`: as for `PromptBuilder.turn`.
    - `label`: cites and names a Document (default: `number_label` of its content).
    - `feedback`: `turn` goes to a `CacheOrderFeedback`; without it turns count as served at once.

    Errors in `label` are counted and leave retrieval order. `from_dict` makes a new orderer and a builder without a
    tokenizer, and needs a `label` of a module. Raises as `CacheOrderRanker`.
    """

    def __init__(
        self,
        orderer: OrdererLike | None = None,
        *,
        settings: dict[str, Any] | None = None,
        builder: PromptBuilder | None = None,
        prompt: dict[str, Any] | None = None,
        repeat: Repeat = "name",
        reference: str = REFERENCE,
        label: Label | None = None,
        scope: str | None = None,
        feedback: bool = False,
    ) -> None:
        if builder is not None and prompt is not None:
            raise ValueError("give either a builder or prompt, not both")
        self.orderer = _either(orderer, settings)
        self.scope = scope
        self.feedback = feedback
        self._naming: dict[str, Any] = {"repeat": repeat, "reference": reference}
        self._label = label
        self._turns: FrameworkTurns[ChatMessage, Document] = FrameworkTurns(
            self.orderer,
            builder if builder is not None else PromptBuilder(**{"system": ""} | (prompt or {})),
            read=_read,
            text=_text,
            metadata=_META,
            label=label,
            scope=lambda scope: scope,
            **self._naming,
        )

    def label(self, document: Document) -> str:
        """Return a document's label, as `cited(reply.text, documents, builder.label)` calls it."""
        return self._turns.label(document)

    def to_dict(self) -> dict[str, Any]:
        arguments = self._turns.builder.__getstate__()
        return default_to_dict(
            self,
            settings=self.orderer.settings.model_dump(mode="json"),
            prompt={name: arguments[name] for name in _PROMPT},
            label=self._label and serialize_callable(self._label),
            scope=self.scope,
            feedback=self.feedback,
            **self._naming,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        parameters = dict(data.get("init_parameters", {}))
        if parameters.get("label"):
            parameters["label"] = deserialize_callable(parameters["label"])
        return default_from_dict(cls, data | {"init_parameters": parameters})

    @component.output_types(prompt=list[ChatMessage], documents=list[Document], turn=ChatTurn)
    def run(
        self,
        question: str,
        documents: list[Document] | None = None,
        history: list[ChatMessage] | None = None,
        scope: str | None = None,
    ) -> dict[str, Any]:
        """Return the `prompt` to send (with the answer, the next history), and the `documents`: sent ones in prompt
        order, then named ones. `scope` overrides the builder's."""
        before = list(history or ())
        if self._turns.system and not (before and before[0].role == "system"):
            before.insert(0, ChatMessage.from_system(self._turns.system))
        turn = self._turns.next(question, documents or (), before, self.scope if scope is None else scope)
        prompt = [*before, ChatMessage.from_user(turn.text)]
        made = ChatTurn(prompt, partial(self._turns.confirm, turn, prompt[-1]))
        if not self.feedback:
            made.confirm()
        return {"prompt": prompt, "documents": turn.sources, "turn": made}

    @component.output_types(prompt=list[ChatMessage], documents=list[Document], turn=ChatTurn)
    async def run_async(
        self,
        question: str,
        documents: list[Document] | None = None,
        history: list[ChatMessage] | None = None,
        scope: str | None = None,
    ) -> dict[str, Any]:
        shown = (getattr(each, "content", None) for each in documents or ())
        texts = [question, *shown, *(text for each in history or () for text in each.texts)]
        return await off_loop(partial(self.run, question, documents, history, scope), texts)


@component
class CacheOrderFeedback:
    """Component that reports a reply to the orderer, and returns the next turn's history.

        pipeline.connect("llm.replies", "feedback.replies")
        pipeline.connect("prompt.turn", "feedback.turn")

    Of several replies the first one counts.
    """

    @component.output_types(history=list[ChatMessage], replies=list[ChatMessage])
    def run(self, replies: list[ChatMessage], turn: ChatTurn) -> dict[str, Any]:
        if replies:
            turn.confirm(replies[0])
        return {"history": [*turn.prompt, *replies[:1]], "replies": replies}

    @component.output_types(history=list[ChatMessage], replies=list[ChatMessage])
    async def run_async(self, replies: list[ChatMessage], turn: ChatTurn) -> dict[str, Any]:
        return self.run(replies, turn)


def _read(message: ChatMessage) -> dict[str, Any]:
    content: Any = "\n".join(message.texts)
    results = message.tool_call_results
    call = None
    if results:
        content, call = results[0].result, results[0].origin.id
    others = [*results[1:], *message.images, *message.files]
    if others:
        content = [{"type": "text", "text": content}, *others]
    return plain_message(message.role.value, content, tool_calls=message.tool_calls, tool_call_id=call)


def _check(top_k: int | None) -> None:
    if top_k is not None and top_k <= 0:
        raise ValueError(f"top_k is {top_k}: give 1 or more")


def _either(orderer: OrdererLike | None, settings: dict[str, Any] | None) -> OrdererLike:
    if orderer is not None and settings is not None:
        raise ValueError("give either an orderer or settings, not both")
    return Orderer(Settings(**settings or {})) if orderer is None else orderer


def _text(document: Document) -> str:
    return document.content or ""
