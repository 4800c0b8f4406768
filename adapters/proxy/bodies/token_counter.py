"""Token counts of a prompt's parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Raw, Struct

from ragorder.adapters.http_server.untrusted_json import MAX_VALUES, count_values
from ragorder.adapters.proxy.bodies.body import Body, PromptPrefix, PromptSuffix, decode
from ragorder.adapters.proxy.bodies.parsed import digest_of
from ragorder.adapters.structs import readable_by_threads
from ragorder.common.counts import Estimate, KnownTokens, estimate_tokens
from ragorder.common.lru_cache import LRUCache
from ragorder.document import Document
from ragorder.prompt import PromptBuilder
from ragorder.tokens import PLACEHOLDER, split_text

_REMEMBERED = 16384
KEPT_BYTES = 1 << 26
_NULL = Raw(b"null")
# First bytes of characters in UTF-8, by script, and how many tokens such a character has in usual vocabularies, more
# than a Latin one: Cyrillic, Greek, Hebrew and Arabic; Indic scripts and Thai; Chinese, Japanese and Korean; emoji.
_SCRIPTS = (
    (range(0xCD, 0xE0), 0.15),
    (range(0xE0, 0xE2), 0.35),
    (range(0xE3, 0xEF), 0.45),
    (range(0xF0, 0xF5), 1.25),
)
_ASCII = bytes(range(128))
_NOT_OF_SCRIPT = [(bytes(each for each in range(256) if each not in first), more) for first, more in _SCRIPTS]
# Reports after which the scripts' lengths are corrected, by a factor within these limits, if it changes by this share.
_SAMPLES, _ENOUGH = 32, 8
_LEAST_SCALE, _MOST_SCALE = 0.25, 4.0
_CHANGE = 0.05
# Characters that a chat template puts around a text: at least two.
_AROUND = 2


@readable_by_threads
class _Shown(Struct):
    content: Raw = _NULL
    text: Raw = _NULL
    tool_calls: Raw = _NULL
    output: Raw = _NULL
    arguments: Raw = _NULL
    input: Raw = _NULL


class TokenCounter:
    """Counts exactly with the served model's `tokenizer` (transformers), else as the client does, or by script (four
    Latin characters a token). Thread-safe with fast tokenizers. Counts of 16,384 documents are kept by digest (3 MB),
    for each tenant: timing reveals nothing of others."""

    def __init__(self, builder: PromptBuilder, tokenizer: Any = None) -> None:
        self.exact = tokenizer is not None
        self._builder = builder
        self._tokenizer = tokenizer
        self._kept: LRUCache[int] = LRUCache(_REMEMBERED, KEPT_BYTES)
        self._scale = 1.0
        self._scales: deque[float] = deque(maxlen=_SAMPLES)

    def tagged(self, document: Document, salt: str | None, *, numbered: bool) -> int:
        if not self.exact:
            if document.tokens is not None:
                return document.tokens
            return Estimate(self._builder.count_tokens(document) + self.more(document.text))
        texts = ("tagged", document.id, document.text, str(document.metadata.get("title", "")))
        return self._once(salt, texts, lambda: self._builder.count_tokens(document))

    def run(self, documents: Sequence[str], gaps: Sequence[str], salt: str | None) -> Sequence[int | None]:
        """Return lengths of found documents; None: as long as a Latin text."""
        if not self.exact:
            return [None if text.isascii() else self._estimate(text) for text in documents]
        return [self._once(salt, ("found", text), partial(self._encode, text)) for text in documents]

    def text(self, text: str) -> int:
        return self._encode(text) if self.exact else self._estimate(text)

    def more(self, text: str) -> int:
        """Estimate a text's tokens beyond those of an equally long Latin one."""
        return round(self._scale * _more_tokens(text))

    def learn(self, latin: int, more: int, prompt_tokens: int | None) -> None:
        """Learn from a reported prompt, estimated at four characters a token (`latin`) and `more` for its scripts."""
        if self.exact or prompt_tokens is None or 2 * more <= latin:
            return
        self._scales.append(self._scale * (prompt_tokens - latin) / more)
        scales = sorted(self._scales)
        middle = scales[len(scales) // 2]
        if len(scales) >= _ENOUGH and _LEAST_SCALE <= middle <= _MOST_SCALE and abs(middle / self._scale - 1) > _CHANGE:
            self._scale = middle

    def _estimate(self, text: str) -> Estimate:
        return Estimate(estimate_tokens(text) + self.more(text))

    def suffix(self, suffix: PromptSuffix) -> int:
        """Later messages are estimated: hits do not depend on them."""
        characters = sum(map(_characters, suffix.parts)) + sum(map(_characters, suffix.messages))
        return self.text(suffix.text) + -(-characters // 4)

    def prefix(self, body: Body, prefix: PromptPrefix, salt: str | None, opening: str) -> int:
        """Count the tokens before the documents, which begin with `opening`."""
        if body.route == "completions":
            # A server adds the begin-of-sequence token before a plain prompt.
            special = len(self._tokenizer.encode("", verbose=False)) if self.exact else 0
            return special + self.text(prefix.text)
        before = self.rendered(body, prefix)
        if before is not None:
            return self.text(before)
        characters = sum(map(_characters, prefix.messages)) + sum(_characters(part, 0) for part in prefix.parts)
        tools = body.fields.get("tools", _NULL)
        characters += len(prefix.text) + (len(bytes(tools)) if decode(tools, list[Raw]) else 0)
        return -(-characters // 4)

    def rendered(self, body: Body, prefix: PromptPrefix) -> str | None:
        # Tools and tool results of protocols other than chats have a form in the template that only the server knows.
        if not self.exact or prefix.parts or (body.route != "chat" and "tools" in body.fields):
            return None
        try:
            return self._render(body, prefix)
        except Exception:
            # Templates refuse unexpected messages, each in its own way: the server will refuse them, too.
            return None

    def _render(self, body: Body, prefix: PromptPrefix) -> str:
        earlier = [message for raw in prefix.messages if (message := decode(raw, dict[str, Any])) is not None]
        messages = _as_servers_read(earlier)
        tools = decode(body.fields["tools"], list[Any]) if "tools" in body.fields else None
        turn = {"role": prefix.role, "content": prefix.text + PLACEHOLDER}
        rendered: str = self._tokenizer.apply_chat_template(
            [*messages, turn], tools=tools, tokenize=False, add_generation_prompt=True
        )
        before, slot, _ = rendered.rpartition(PLACEHOLDER)
        if not slot:
            raise ValueError("the chat template does not show the message")
        return before

    def _once(self, salt: str | None, texts: Sequence[str], count: Callable[[], int]) -> int:
        key = digest_of(salt, *texts)
        tokens = self._kept.get(key)
        if tokens is None:
            tokens = count()
            self._kept.put(key, tokens, size_of(tokens))
        return tokens

    def _encode(self, text: str) -> int:
        return sum(map(len, self._ids(text)))

    def _ids(self, text: str) -> Iterator[list[int]]:
        for piece in split_text(text):
            yield self._tokenizer.encode(piece, add_special_tokens=False, verbose=False)


def size_of(tokens: int) -> int:
    return tokens.size if isinstance(tokens, KnownTokens) else 0


def _as_servers_read(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Adapt earlier turns to templates: no nulls, calls' arguments as values, both names of reasoning."""
    room = MAX_VALUES
    messages = []
    for each in given:
        message = {"content": ""} | {name: value for name, value in each.items() if value is not None}
        messages.append(message)
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if isinstance(arguments := function["arguments"], str):
                content = arguments.encode("utf-8", "replace")
                room -= count_values(content, room)
                read = decode(content, dict[str, Any])
                function["arguments"] = arguments if read is None else read
    return messages


def _characters(raw: Raw, around: int = _AROUND) -> int:
    shown = decode(raw, _Shown)
    if shown is None:
        return 0
    calls = sum(len(bytes(call)) for call in (shown.tool_calls, shown.arguments, shown.input) if call != _NULL)
    content = shown.content if shown.output == _NULL else shown.output
    texts = [shown.text, content]
    for part in decode(content, list[Raw]) or ():
        inner = decode(part, _Shown)
        if inner is None:
            continue
        texts.append(inner.text)
        if inner.content != _NULL:
            # A tool's result, which may have parts again.
            texts.append(inner.content)
            calls += 0 if decode(inner.content, str) is not None else len(bytes(inner.content))
        calls += len(bytes(inner.input)) if inner.input != _NULL else 0
    return calls + sum(len(text) + around for raw_text in texts if (text := decode(raw_text, str)) is not None)


def _more_tokens(text: str) -> float:
    if text.isascii():
        return 0
    # Most bytes of most texts are ASCII: these are removed once, not for each script.
    encoded = text.encode("utf-8", "replace").translate(None, _ASCII)
    return sum(more * len(encoded.translate(None, others)) for others, more in _NOT_OF_SCRIPT)
