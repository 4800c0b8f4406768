"""Prompts with stable parts first, for the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple

from ragorder.citations import number_label
from ragorder.common.counts import estimate_tokens
from ragorder.common.lru_cache import LRUCache
from ragorder.conversation import (
    REFERENCE,
    Message,
    MessageFormat,
    Repeat,
    Turn,
    opening_of,
    read_history,
    segments_of,
)
from ragorder.document import Document, content_key
from ragorder.ordering import Ordering
from ragorder.protocols import OrdersTurns
from ragorder.scope.request import USUAL, Lengths
from ragorder.tokens import PromptFrame, SegmentTokenizer, repair_unicode, special_token_escaper, split_text
from ragorder.trie.histories import Segment

if TYPE_CHECKING:
    from ragorder.clouds.parts import PromptParts

_FIELDS = {"document_template": {"id", "label", "text", "title"}, "question_template": {"query"}}
_KEPT_BYTES = 64 << 20
_KEPT_COUNTS = 16_384
_KEPT_QUESTIONS = 1024
_QUESTIONS_BYTES = 32 << 20
_RANKING = "Documents from most to least relevant: "
# Bytes of an entry besides its tokens.
_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class Span:
    """A document's tokens in the prompt; `end` is exclusive."""

    id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in engines' formats.

    `token_ids` are exact (None without a tokenizer); engines tokenise `text` or `messages` themselves. `anthropic()`,
    `openai()` and `bedrock()` have one content part per document, with the breakpoints of `Orderer.for_cloud`.
    """

    text: str
    messages: list[dict[str, str]]
    token_ids: list[int] | None
    spans: list[Span]
    _content: tuple[Any, ...] = field(default=("", [], ""), repr=False, compare=False)
    _marked: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def parts(self) -> PromptParts:
        from ragorder.clouds.parts import PromptParts

        return PromptParts(*self._content, **self._marked)

    def anthropic(self) -> dict[str, Any]:
        """Return arguments for `client.messages.create(model=…, max_tokens=…, **prompt.anthropic())`."""
        return self.parts.anthropic()

    def openai(self) -> dict[str, Any]:
        """Return arguments for `client.chat.completions.create(model=…, **prompt.openai())`."""
        # Without breakpoints the contents are strings, because DeepSeek refuses parts.
        return self.parts.openai() if self._marked.get("explicit") else {"messages": self.messages}

    def bedrock(self) -> dict[str, Any]:
        """Return arguments for `client.converse(modelId=…, **prompt.bedrock())`."""
        return self.parts.bedrock()


class _Segment(NamedTuple):
    tokens: int
    ids: bytes = b""
    padding: int = 0


class PromptBuilder:
    """Builds prompts from system prompt, documents and question.

        builder = PromptBuilder("Answer briefly.", tokenizer=AutoTokenizer.from_pretrained(model))
        prompt = builder.build("When are orders shipped?", orderer.order(documents))

    - `document_template` has {text} and optionally {id}, {title} (metadata) and {label}, but no rank
    - `label` returns the {label} by which an answer cites a document
    - `question_template` has {query}, and everything else that varies between requests
    - `tokenizer` (transformers) is the served model's; its chat template frames the prompt
    - `state_ranking` adds the retrieval ranking, by id, after the documents
    - `align_to` (the engine's block size) pads system prompt and documents to whole blocks
    - `cached_documents`: documents whose tokens are kept, in at most 64 MiB

    Special tokens in documents and questions are escaped, and refused in templates; a history is sent unchanged.
    """

    def __init__(
        self,
        system: str = "Answer the question from the documents below.",
        *,
        document_template: str = "[{id}]\n{text}\n\n",
        question_template: str = "Question: {query}",
        tokenizer: Any = None,
        state_ranking: bool = False,
        align_to: int | None = None,
        cached_documents: int = 4096,
        label: Callable[[Document], str] = number_label,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        _check_template("document_template", document_template, "text")
        _check_template("question_template", question_template, "query")
        if align_to is not None and (tokenizer is None or align_to < 1):
            raise ValueError("align_to needs a tokenizer and a positive number of tokens")
        self.system = system = repair_unicode(system)
        self._document_template = document_template
        self._question_template = question_template
        self._state_ranking = state_ranking
        self._label = label
        self._align_to = align_to
        self._tokenizer = SegmentTokenizer(tokenizer) if tokenizer is not None else None
        self._escape = special_token_escaper(self._tokenizer.special_tokens() if self._tokenizer else None)
        for name in _FIELDS:
            _check_escaped(name, self._arguments[name], self._escape)
        frame = (
            self._tokenizer.frame(system) if self._tokenizer else PromptFrame(f"{system}\n\n", "\n", system_role=True)
        )
        self._head, self._tail, self._system_role = frame
        self.shown = frozenset(_fields(document_template))
        self._cache: LRUCache[_Segment] = LRUCache(cached_documents, _KEPT_BYTES)
        self._questions: LRUCache[bytes] = LRUCache(_KEPT_QUESTIONS, _QUESTIONS_BYTES)
        newline = self._tokenizer.encode("\n") if self._tokenizer and align_to else [0]
        if not newline:
            raise ValueError("align_to: the tokenizer has no token for a newline to pad with")
        self._filler = newline[-1]
        ids, padding = self._encode(self._head)
        self._head, self._head_ids = self._head + "\n" * padding, tuple(ids)

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        PromptBuilder.__init__(self, **arguments)

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the first document; estimated without a tokenizer."""
        return len(self._head_ids) if self._tokenizer else estimate_tokens(self._head)

    def document_tokens(self, document: Document) -> int:
        """Return a document's tokens in the prompt, with header, for `Orderer(tokens=…)`."""
        return self._segment(document).tokens

    def count_tokens(self, document: Document) -> int:
        """Return `document_tokens` uncached, so that timing reveals no documents seen before.

        Each 32,768 characters of a long text add an error of 1 or 2 tokens.
        """
        tokens = self._count(self._render(document))
        return tokens + -tokens % self._align_to if self._align_to else tokens

    @property
    def prefix_ids(self) -> Sequence[int]:
        return self._head_ids

    def document_ids(self, document: Document) -> Sequence[int]:
        return array("q", self._segment(document).ids)

    def build(self, query: str, documents: Ordering[Document] | Sequence[Document]) -> Prompt:
        ordered = documents.documents if isinstance(documents, Ordering) else list(documents)
        ranking = documents.permutation if isinstance(documents, Ordering) else range(len(ordered))
        question = self._question(query, ordered, ranking)
        token_ids: list[int] | None = None
        spans = []
        if self._tokenizer:
            token_ids = list(self._head_ids)
            for document in ordered:
                ids = self.document_ids(document)
                spans.append(Span(document.id, len(token_ids), len(token_ids) + len(ids)))
                token_ids += ids
            token_ids += self._question_ids(question)
        texts = list(map(self.document_text, ordered))
        turn = self._escape("".join(texts) + question)
        content, marked = (self.system, texts, question), self._marked(documents)
        return Prompt(self._head + turn + self._tail, self._messages(turn), token_ids, spans, content, marked)

    def _marked(self, documents: Ordering[Document] | Sequence[Document]) -> dict[str, Any]:
        cloud = documents.cloud if isinstance(documents, Ordering) else None
        if cloud is None:
            return {"escape": self._escape}
        rules = cloud.model.rules
        explicit = rules.resume == "marks"
        return {"marks": cloud.breakpoints, "ttl": rules.ttl, "explicit": explicit, "escape": self._escape}

    def turn(
        self,
        question: str,
        documents: Iterable[Document],
        *,
        history: Iterable[Message] = (),
        orderer: OrdersTurns,
        scope: Hashable = None,
        repeat: Repeat = "name",
        reference: str = REFERENCE,
        tool_call_id: str | None = None,
        waiting: Sequence[Iterable[Document]] = (),
        lengths: Lengths = USUAL,
        rebase: Iterable[Document] | None = None,
    ) -> Turn:
        """Return the next turn of a conversation: the history's messages unchanged, then a new one.

        Documents of the first turn are ordered; later ones keep retrieval order, unless the engine holds them in
        another. A document unchanged in the history is named by `reference` ({id}, {title}), unless `repeat` is "send".
        With `tool_call_id` the message is that tool's result, without a question.

        `rebase`: documents of earlier turns. If the engine has evicted the conversation, and it saves computation, they
        and this turn's are ordered together before the first question, and named where they were; store the new
        messages.
        """
        from ragorder.turns import make_turn

        naming: dict[str, Any] = {"repeat": repeat, "reference": reference, "tool_call_id": tool_call_id}
        options: dict[str, Any] = {"scope": scope, "waiting": waiting, "lengths": lengths}
        return make_turn(self.message_format, question, documents, history, orderer, rebase=rebase, **naming, **options)

    def segments(self, history: Iterable[Message]) -> list[Segment]:
        """Return the segments of a `History`. Raises as `turn`."""
        return segments_of(read_history(history, self.message_format)[0], self.message_format)

    @cached_property
    def message_format(self) -> MessageFormat:
        closing = self._tokenizer.between_turns(self.system if self._system_role else "") if self._tokenizer else ""
        openings = [opening_of(self._document_template), self.question_opening]
        if self._state_ranking:
            openings.append(_RANKING)
        return MessageFormat(
            system=self.system,
            system_role=self._system_role,
            document_text=self.document_text,
            header=self._header,
            question=lambda query, documents: self._question(query, documents, range(len(documents))),
            escape=self._escape,
            count=self._count,
            openings=tuple(openings),
            turn_tokens=self._count(self._tail),
            closing_tokens=self._count(closing),
            estimated=self._tokenizer is None,
            message_tokens=LRUCache(_KEPT_COUNTS),
        )

    def _header(self, document: Document) -> str:
        header = []
        for literal, name, *_ in Formatter().parse(self._document_template):
            header.append(literal)
            if name == "text":
                break
            if name == "label":
                header.append(self.label_of(document))
            elif name is not None:
                header.append(document.id if name == "id" else str(document.metadata.get("title", "")))
        return "".join(header)

    def _count(self, text: str) -> int:
        if self._tokenizer is None:
            return estimate_tokens(text)
        return sum(len(self._tokenizer.encode(piece)) for piece in split_text(text))

    def document_text(self, document: Document) -> str:
        text = self._render(document)
        return text if self._align_to is None else text + "\n" * self._segment(document).padding

    def user_message(self, query: str, documents: Sequence[Document], ranking: Sequence[int]) -> str:
        texts = map(self.document_text, documents)
        # Escaped again as a whole, because two adjacent documents must not form a special token.
        return self._escape("".join(texts) + self._question(query, documents, ranking))

    @property
    def question_opening(self) -> str:
        return opening_of(self._question_template)

    def label_of(self, document: Document) -> str:
        return str(self._label(document))

    def _messages(self, turn: str) -> list[dict[str, str]]:
        if not self.system:
            return [{"role": "user", "content": turn}]
        if not self._system_role:
            return [{"role": "user", "content": f"{self.system}\n\n{turn}"}]
        return [{"role": "system", "content": self.system}, {"role": "user", "content": turn}]

    def suffix_tokens(self, query: str) -> int:
        question = self._question(query, (), ())
        return len(self._question_ids(question)) if self._tokenizer else estimate_tokens(question + self._tail)

    def keep_question(self, query: str) -> None:
        """Tokenise a question now, in any thread, so that `suffix_tokens` and `build` need not on an event loop.

        Without effect with `state_ranking`.
        """
        if self._tokenizer is not None and not self._state_ranking:
            question = self._question(query, (), ())
            ids = array("i", self._question_ids(question)).tobytes()
            self._questions.put(content_key("", question), ids, len(ids) + _ENTRY_BYTES)

    def _question_ids(self, question: str) -> Sequence[int]:
        assert self._tokenizer is not None
        kept = self._questions.get(content_key("", question)) if len(self._questions) else None
        return self._tokenizer.encode(question + self._tail) if kept is None else array("i", kept)

    def _render(self, document: Document) -> str:
        title = str(document.metadata.get("title", ""))
        label = self.label_of(document) if "label" in self.shown else ""
        template = self._document_template
        return self._escape(template.format(id=document.id, text=document.text, title=title, label=label))

    def _segment(self, document: Document) -> _Segment:
        key = document.key
        if "title" in self.shown:
            key = content_key(str(document.metadata.get("title", "")), key)
        if "label" in self.shown:
            key = content_key(self.label_of(document), key)
        segment = self._cache.get(key)
        if segment is None:
            text = self._render(document)
            ids, padding = self._encode(text)
            tokens = len(ids) if self._tokenizer else estimate_tokens(text)
            segment = _Segment(tokens, array("q", ids).tobytes(), padding)
            self._cache.put(key, segment, len(segment.ids) + _ENTRY_BYTES)
        return segment

    def _question(self, query: str, ordered: Sequence[Document], ranking: Sequence[int]) -> str:
        question = self._question_template.format(query=query)
        if self._state_ranking and ordered:
            best_first = [document.id for _, document in sorted(zip(ranking, ordered, strict=True), key=itemgetter(0))]
            question = f"{_RANKING}{', '.join(best_first)}\n\n{question}"
        # Chat templates trim the end of a turn.
        return self._escape(question).rstrip()

    def _encode(self, text: str) -> tuple[list[int], int]:
        if self._tokenizer is None:
            return [], 0
        ids = self._tokenizer.encode(text)
        missing = -len(ids) % self._align_to if self._align_to else 0
        return ids + [self._filler] * missing, missing


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(template) if field is not None}


def _check_template(name: str, template: str, required: str) -> None:
    try:
        fields = _fields(template)
        template.format(**dict.fromkeys(_FIELDS[name] | fields, "text"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}; write a literal brace twice") from None
    if required not in fields or not fields <= _FIELDS[name]:
        allowed = ", ".join(f"{{{field}}}" for field in sorted(_FIELDS[name]))
        raise ValueError(f"{name} must contain {{{required}}} and may use only {allowed}: {template!r}")


def _check_escaped(name: str, template: str, escape: Callable[[str], str]) -> None:
    text = template.format(**dict.fromkeys(_FIELDS[name], "\0"))
    escaped = escape(text)
    if escaped != repair_unicode(text):
        raise ValueError(
            f"{name} has a special token, which is escaped like those in documents: use other markup. It "
            f"would be sent as {escaped.replace(chr(0), '…')!r}"
        )
