"""Parsing of request bodies: documents, scope and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.openai.endpoint import checked_salt
from ragorder.adapters.proxy.body import BOUNDARY, Body, ChatBody, CompletionBody, Fields, PromptPrefix
from ragorder.adapters.proxy.diagnostics import PassReason, RenamedIds, UnorderedRequests
from ragorder.adapters.proxy.digest import digest_of
from ragorder.adapters.proxy.schema import FIELD, MAX_DOCUMENTS, read_tagged
from ragorder.adapters.proxy.template import DocumentTemplate
from ragorder.adapters.proxy.token_counter import TokenCounter
from ragorder.document import Document
from ragorder.lru_cache import LRUCache
from ragorder.prompt import PromptBuilder

__all__ = ["BodyParser", "ParsedBody", "Route", "scope_of"]

Route = Literal["chat", "completions", "other"]

_BODIES = {"chat": ChatBody, "completions": CompletionBody}
_REMEMBERED = 4096
_TAG = b'"%s"' % FIELD.encode()
# Besides the messages, what a server puts in front of the documents, or chooses how to.
_SHAPES_PREFIX = (
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "functions",
    "mm_processor_kwargs",
    "reasoning_effort",
    "tool_choice",
    "tools",
)


@dataclass(frozen=True, eq=False, slots=True)
class ParsedBody:
    """A body with documents. Lengths are in tokens.

    `render` gives the body to send, by the rank of the document at each place; `suffix_tokens` follow the last
    document, `gaps` lie between them. `error`: the prefix could not be read.
    """

    body: Body
    documents: list[Document]
    suffix_tokens: int
    render: Callable[[Sequence[int]], bytes]
    gaps: Sequence[int] = ()
    salt: str | None = None
    scope: bytes = b""
    prefix_tokens: int = 0
    error: Exception | None = None


class BodyParser:
    """See `make_app`. `warn` gets each complaint once."""

    def __init__(
        self,
        builder: PromptBuilder,
        tokens: TokenCounter,
        template: DocumentTemplate | None,
        *,
        warn: Callable[[str], None],
        send_facts: bool = False,
        number_by_place: bool = False,
        on_passed: Callable[[str], None] | None = None,
    ) -> None:
        self._builder = builder
        self._tokens = tokens
        self._template = template
        self._send_facts = send_facts
        self._by_place = number_by_place
        self._unordered = UnorderedRequests(on_passed, warn, template=template is not None)
        self._ids = RenamedIds(warn)
        self._prefixes: LRUCache[int] = LRUCache(_REMEMBERED)

    def parse(self, route: Route, content: bytes) -> ParsedBody | None:
        """None for a body without documents, or an unreadable one. Raises HTTPError for malformed fields."""
        parsed = self._look_into(route, content)
        if not isinstance(parsed, ParsedBody):
            self._unordered.passed(parsed)
            return None
        self._unordered.found()
        return parsed

    def _look_into(self, route: Route, content: bytes) -> ParsedBody | PassReason:
        unread: PassReason = "other_route" if route == "other" else "unreadable"
        try:
            fields = msgspec.json.decode(content, type=Fields)
        except msgspec.ValidationError:
            # Not an object: it has no fields.
            return unread
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if _TAG in content:
                message = f"The body must be strict JSON in UTF-8, or its field {FIELD} cannot be read."
                raise HTTPError(400, message, code="invalid_json") from None
            return unread
        if route == "other":
            if FIELD in fields:
                message = f"{FIELD}: documents are supported in chats (/v1/chat/completions) and completions "
                message += "(/v1/completions); this route would answer without them."
                raise HTTPError(400, message, code="no_documents_here", param=FIELD)
            return unread
        body = _BODIES[route](fields)
        if FIELD in fields:
            return self._read_tagged(body)
        return "no_documents" if self._template is None else self._find(body, content, self._template)

    def _read_tagged(self, body: Body) -> ParsedBody:
        tagged = read_tagged(body.fields.pop(FIELD))
        prefix, salt = body.prefix(), _salt(body, tagged.scope)
        if salt is not None:
            body.fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        given = [each.document() for each in tagged.documents]
        shows_id = "id" in self._builder.shown
        if shows_id and not self._by_place:
            self._ids.look(salt, ((each.id, each.text) for each in given))

        def render(permutation: Sequence[int]) -> bytes:
            shown = [given[rank] for rank in permutation]
            if self._by_place:
                shown = [replace(each, id=str(place)) for place, each in enumerate(shown, 1)]
            body.append(self._builder.user_message(tagged.query, shown, permutation))
            return msgspec.json.encode(body.fields)

        documents = []
        for each in given:
            # A document's key is what the prompt shows of it.
            names = [each.id] if shows_id and not self._by_place else []
            names += [str(each.metadata.get("title", ""))] if "title" in self._builder.shown else []
            documents.append(Document("\0".join(names), each.text, self._tokens.tagged(each, salt)))
        return self._parsed(body, documents, self._tokens.question(tagged.query), render, salt, prefix)

    def _find(self, body: Body, content: bytes, template: DocumentTemplate) -> ParsedBody | PassReason:
        has_one = False
        for passage in body.passages():
            run = template.find(passage.text)
            if run is not None:
                break
            has_one = has_one or template.has_one(passage.text)
        else:
            return "one_document" if has_one else "no_documents"
        try:
            salt = body.string("cache_salt")
        except HTTPError:
            # The server will refuse it.
            return "unreadable"
        if len(run.documents) > MAX_DOCUMENTS:
            return "unreadable"
        parts = [template.split_at_id(text) for text in run.documents]
        if template.shows_id and not self._by_place:
            self._ids.look(salt, ((each.id, each.rest) for each in parts))

        def render(permutation: Sequence[int]) -> bytes:
            if self._by_place:
                text = run.filled([parts[rank].with_id(str(place)) for place, rank in enumerate(permutation, 1)])
            else:
                text = run.arranged(permutation)
            if text == passage.text and not self._send_facts:
                return content
            body.put(passage, text)
            return msgspec.json.encode(body.fields)

        documents = [
            Document("", each.rest if self._by_place else text, self._tokens.found(text, salt))
            for text, each in zip(run.documents, parts, strict=True)
        ]
        gaps = [self._tokens.text(gap.replace(BOUNDARY, "\n")) for gap in run.gaps] if self._send_facts else ()
        suffix_tokens = self._tokens.suffix(passage.suffix(run.tail))
        return self._parsed(body, documents, suffix_tokens, render, salt, passage.prefix(run.head), gaps)

    def _parsed(
        self,
        body: Body,
        documents: list[Document],
        suffix_tokens: int,
        render: Callable[[Sequence[int]], bytes],
        salt: str | None,
        prefix: PromptPrefix,
        gaps: Sequence[int] = (),
    ) -> ParsedBody:
        scope, prefix_tokens, failure = b"", 0, None
        try:
            scope = scope_of(body, salt, prefix)
            prefix_tokens = self._prefix_tokens(scope, body, prefix)
        except Exception as error:
            failure = error
        return ParsedBody(body, documents, suffix_tokens, render, gaps, salt, scope, prefix_tokens, failure)

    def _prefix_tokens(self, scope: bytes, body: Body, prefix: PromptPrefix) -> int:
        tokens = self._prefixes.get(scope)
        if tokens is None:
            tokens = self._tokens.prefix(body, prefix)
            self._prefixes.put(scope, tokens)
        return tokens


def scope_of(body: Body, salt: str | None, prefix: PromptPrefix) -> bytes:
    """Of model, tenant and everything in front of the documents."""
    fields = (body.fields.get(name) for name in ("model", *_SHAPES_PREFIX))
    return digest_of(
        body.route,
        salt,
        *(None if field is None else bytes(field) for field in fields),
        str(len(prefix.messages)),
        *map(bytes, prefix.messages),
        prefix.role,
        *map(bytes, prefix.parts),
        prefix.text,
    )


def _salt(body: Body, scope: str | None) -> str | None:
    """The tenant's salt, from either field."""
    salt = body.string("cache_salt")
    if scope is not None and salt not in (None, scope):
        message = f"{FIELD}.scope: is sent as cache_salt, but the body has a different one: give one of them."
        raise HTTPError(400, message, code="conflicting_scope", param=f"{FIELD}.scope")
    salt = scope if salt is None else salt
    if salt is None:
        return None
    try:
        return checked_salt(salt)
    except ValueError as error:
        raise HTTPError(400, f"cache_salt: {error}", code="invalid_cache_salt", param="cache_salt") from None
