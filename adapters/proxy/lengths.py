"""How long the parts of a prompt are, in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Raw, Struct

from ragorder.adapters.proxy.body import MAX_MESSAGES, Behind, Body, Front
from ragorder.adapters.proxy.reading import TooManyError, decode, decode_items
from ragorder.document import Document, estimate_tokens
from ragorder.lru_cache import LRUCache
from ragorder.prompt import PromptBuilder
from ragorder.tokens import PLACEHOLDER, split_text

__all__ = ["Lengths"]

_REMEMBERED = 16384
_NULL = Raw(b"null")
# What a chat template puts around a message is not known: at least two characters for each of its texts.
_AROUND = 2


class _Spoken(Struct):
    """Of a message, or a part of one, what a chat template shows."""

    content: Raw = _NULL
    text: Raw = _NULL
    tool_calls: Raw = _NULL


class Lengths:
    """Token counts: exact with the served model's `tokenizer` (transformers), which must then be the builder's as well;
    otherwise estimated at four characters a token, where the client says nothing better. Not for several threads at a
    time.

    The lengths of documents are kept by digest: 16,384 of them, in about 3 MB, and nothing of their texts. What one
    tenant's documents have left there does not make another's quicker; requests without a salt are one tenant's.
    """

    def __init__(self, builder: PromptBuilder, tokenizer: Any = None) -> None:
        self.exact = tokenizer is not None
        self._builder = builder
        self._tokenizer = tokenizer
        self._kept: LRUCache[int] = LRUCache(_REMEMBERED)

    def tagged(self, document: Document, salt: str | None) -> int:
        """A tagged document in the prompt."""
        if not self.exact:
            return self._builder.count_tokens(document) if document.tokens is None else document.tokens
        texts = ("tagged", document.id, document.text, str(document.metadata.get("title", "")))
        return self._once(salt, texts, lambda: self._builder.count_tokens(document))

    def found(self, text: str, salt: str | None) -> int | None:
        """A document that was found in a message; None: it is to be estimated."""
        return self._once(salt, ("found", text), lambda: self._encode(text)) if self.exact else None

    def question(self, query: str) -> int:
        """A tagged question, with all that follows it."""
        return self._builder.suffix_tokens(query)

    def text(self, text: str) -> int:
        """Any text."""
        return self._encode(text) if self.exact else estimate_tokens(text)

    def behind(self, behind: Behind) -> int:
        """What stands behind a body's documents, as far as it is text. Of the messages after their own it is estimated
        even with a tokenizer: nothing of them is found in the cache by its place, and the answer tells how long the
        whole prompt was."""
        characters = sum(map(_characters, behind.parts)) + sum(map(_characters, behind.messages))
        return self.text(behind.text) + -(-characters // 4)

    def front(self, body: Body, front: Front) -> int:
        """What stands in front of a body's documents, as far as it is text."""
        if body.route != "chat":
            # A server puts the begin-of-sequence token in front of a plain prompt.
            special = len(self._tokenizer.encode("", verbose=False)) if self.exact else 0
            return special + self.text(front.text)
        if self.exact and not front.parts:
            try:
                return self._rendered(body, front)
            except Exception:  # noqa: S110
                # Templates refuse what they do not foresee, each in its own way: the server will say so.
                pass
        characters = sum(map(_characters, front.messages)) + sum(_characters(part, 0) for part in front.parts)
        tools = body.fields.get("tools", _NULL)
        characters += len(front.text) + (len(bytes(tools)) if decode(tools, list[Raw]) else 0)
        return -(-characters // 4)

    def _rendered(self, body: Body, front: Front) -> int:
        """What the chat template makes of it."""
        messages = [message for raw in front.messages if (message := decode(raw, dict[str, Any])) is not None]
        tools = decode(body.fields["tools"], list[Any]) if "tools" in body.fields else None
        turn = {"role": front.role, "content": front.text + PLACEHOLDER}
        rendered = self._tokenizer.apply_chat_template(
            [*messages, turn], tools=tools, tokenize=False, add_generation_prompt=True
        )
        before, slot, _ = rendered.rpartition(PLACEHOLDER)
        if not slot:
            raise ValueError("the chat template does not show the message")
        return self._encode(before)

    def _once(self, salt: str | None, texts: Sequence[str], count: Callable[[], int]) -> int:
        """The count of a tenant's document, made once as long as it is kept."""
        key = _digest(("" if salt is None else f"salt {salt}", *texts))
        tokens = self._kept.get(key)
        if tokens is None:
            tokens = count()
            self._kept.put(key, tokens)
        return tokens

    def _encode(self, text: str) -> int:
        encode = self._tokenizer.encode
        return sum(len(encode(piece, add_special_tokens=False, verbose=False)) for piece in split_text(text))


def _characters(raw: Raw, around: int = _AROUND) -> int:
    """The characters of a message or a part: of its texts, and of the calls of tools in it."""
    spoken = decode(raw, _Spoken)
    if spoken is None:
        return 0
    calls = 0 if spoken.tool_calls == _NULL else len(bytes(spoken.tool_calls))
    texts = [spoken.text, spoken.content]
    try:
        parts = decode_items(spoken.content, MAX_MESSAGES) or ()
    except TooManyError:
        return calls + len(bytes(spoken.content))
    texts += [inner.text for part in parts if (inner := decode(part, _Spoken)) is not None]
    return calls + sum(len(text) + around for raw_text in texts if (text := decode(raw_text, str)) is not None)


def _digest(texts: Iterable[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode()
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.digest()
