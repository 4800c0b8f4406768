"""Token counter that keeps the tokens, which identify KV blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec import Raw

from ragorder.adapters.proxy.bodies.body import BOUNDARY, Body, PromptPrefix, decode
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.common.counts import KnownTokens
from ragorder.document import Document
from ragorder.prompt import PromptBuilder

_NULL = Raw(b"null")
# Characters of the following text by which a boundary of tokens is found, and what they are if texts differ there.
_OPENING, _USUAL = 4, "A"
# Fields that change what the template shows, in ways that only the server knows.
_RESHAPING = frozenset(Body.shapes_prefix) - {"tools", "tool_choice"}


class FollowedTokens(TokenCounter):
    """Token counter whose lengths are `KnownTokens` if these are the same in every prompt: the tokenizer must begin a
    new token after the text, and after that between two documents.

    Only for `models`: an adapter has other KV for the same tokens.
    """

    def __init__(self, builder: PromptBuilder, tokenizer: Any, models: Collection[str]) -> None:
        super().__init__(builder, tokenizer)
        self._models = models

    def run(self, documents: Sequence[str], gaps: Sequence[str], salt: str | None) -> Sequence[int | None]:
        if len(set(gaps)) != 1 or BOUNDARY in gaps[0]:
            return super().run(documents, gaps, salt)
        gap, opening = gaps[0], _common_start(documents)
        texts = ("run", gap, opening)
        return [self._once(salt, (*texts, each), partial(self._known, each + gap, opening)) for each in documents]

    def tagged(self, document: Document, salt: str | None, *, numbered: bool) -> int:
        if numbered:
            return super().tagged(document, salt, numbered=True)
        text = self._builder.document_text(document)
        return self._once(salt, ("tagged", text), lambda: self._known(text, text[:_OPENING]))

    def prefix(self, body: Body, prefix: PromptPrefix, salt: str | None, opening: str) -> int:
        model = decode(body.fields.get("model", _NULL), str)
        before = None
        if (model is None or model in self._models) and _RESHAPING.isdisjoint(body.fields):
            before = self.rendered(body, prefix)
        known = None if before is None else self._known(before, opening[:_OPENING])
        if isinstance(known, KnownTokens):
            return KnownTokens(known.ids, salt)
        return super().prefix(body, prefix, salt, opening)

    def _known(self, text: str, opening: str) -> int:
        first = list(chain(*self._ids(opening or _USUAL)))
        ids = list(chain(*self._ids(text + (opening or _USUAL))))
        end = len(ids) - len(first)
        return KnownTokens(ids[:end]) if ids[end:] == first else self._encode(text)


def _common_start(documents: Sequence[str]) -> str:
    first, last = min(documents)[:_OPENING], max(documents)[:_OPENING]
    return next((first[:end] for end in range(len(first), 0, -1) if last.startswith(first[:end])), "")
