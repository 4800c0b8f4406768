"""From the body that came to the body that goes on: its documents ordered, wherever it has any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Literal

import msgspec

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.openai.request import checked_salt
from ragorder.adapters.proxy.body import BOUNDARY, Body, ChatBody, CompletionBody, Fields, Front
from ragorder.adapters.proxy.lengths import Lengths
from ragorder.adapters.proxy.noticing import Ids, Passed, Reason
from ragorder.adapters.proxy.schema import FIELD, MAX_DOCUMENTS, read_tagged
from ragorder.adapters.proxy.scope import scope_of
from ragorder.adapters.proxy.settling import Ordered
from ragorder.adapters.proxy.template import DocumentTemplate
from ragorder.adapters.request_facts import add_facts
from ragorder.adapters.usage import AnswerLength
from ragorder.document import Document
from ragorder.lru_cache import LRUCache
from ragorder.orderer import OrdererLike
from ragorder.ordering import Ordering
from ragorder.pipelining.reordering import CachedLengths
from ragorder.prompt import PromptBuilder

__all__ = ["BodyOrderer", "ReadBody", "Route"]

Route = Literal["chat", "completions", "other"]

_BODIES = {"chat": ChatBody, "completions": CompletionBody}
_REMEMBERED = 4096
_TAG = b'"%s"' % FIELD.encode()


@dataclass(eq=False, slots=True)
class ReadBody:
    """A body whose documents were found, and wait to be ordered. `write` gives the body that goes on, by the rank of
    the document at each place. The tokens between documents are `gaps`, if there are any, `behind_tokens` those that
    follow the last, and `salt` is the tenant's. What stands in front of the documents could not be read if there is
    an `error`."""

    body: Body
    documents: list[Document]
    behind_tokens: int
    write: Callable[[Sequence[int]], bytes]
    gaps: Sequence[int] = ()
    salt: str | None = None
    scope: bytes = b""
    prefix_tokens: int = 0
    error: Exception | None = None


class BodyOrderer:
    """Orders the documents of the bodies of two routes. With a tokenizer in `lengths` that takes long enough to do it
    in another thread, one at a time.

    `number_by_place`: the id that a document shows is the number of its place, from 1, whatever id it came with.
    `on_passed` is told of each request that goes on without documents, and why.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        builder: PromptBuilder,
        lengths: Lengths,
        template: DocumentTemplate | None,
        *,
        send_facts: bool = False,
        number_by_place: bool = False,
        on_passed: Callable[[str], None] | None = None,
    ) -> None:
        self._orderer = orderer
        self._builder = builder
        self._lengths = lengths
        self._template = template
        self._send_facts = send_facts
        self._by_place = number_by_place
        self._passed = Passed(on_passed, orderer.degrade, template=template is not None)
        self._ids = Ids(orderer.degrade)
        self._answer_length = AnswerLength()
        self._fronts: LRUCache[int] = LRUCache(_REMEMBERED)

    def request(self) -> Ordered:
        """A request that is on its way."""
        return Ordered(self._answer_length)

    def read(self, route: Route, content: bytes) -> ReadBody | None:
        """The body, with its documents. None if there are none: without the field "ragorder" and without documents by
        the template, or if it cannot be read at all; it goes on as it is.

        Raises ProxyError for fields that are not what they should be, for a tagged body that is no JSON, and for a
        tagged body of another route: the server would answer without the documents.
        """
        read = self._look_into(route, content)
        if not isinstance(read, ReadBody):
            self._passed.passed(read)
            return None
        self._passed.found()
        return read

    def order(self, read: ReadBody, request: Ordered, waiting: Sequence[ReadBody] = ()) -> bytes:
        """The body that goes on. `request` has the ordering. `waiting` are those that will probably be next: those of
        other scopes are passed over."""
        orderer, body = self._orderer, read.body
        if read.error is not None:
            ordering = orderer.fall_back(read.documents, read.error)
        else:
            limits = [body.number("max_completion_tokens"), body.number("max_tokens")]
            limit = next((limit for limit in limits if limit is not None and limit >= 0), sys.maxsize)
            default = orderer.settings.suffix_tokens
            ordering = orderer.order(
                read.documents,
                waiting=[each.documents for each in waiting if each.scope == read.scope],
                scope=read.scope,
                suffix_tokens=self._answer_length.suffix_tokens(read.behind_tokens, limit, default),
                prefix_tokens=read.prefix_tokens,
            )
        request.ordering = ordering
        request.answers = _answers(body)
        if self._send_facts:
            add_facts(body.fields, self._ends(read, ordering), read.salt, read.prefix_tokens)
        request.permutation, request.predicted_tokens = ordering.permutation, ordering.cached_tokens
        return read.write(ordering.permutation)

    def predict_cached_tokens(self, read: ReadBody) -> CachedLengths:
        """What of the prompt the server would find in its cache now, and what it would compute."""
        if read.error is not None:
            return CachedLengths(0, 1)
        cached_tokens, documents_end = self._orderer.predict_cached_tokens(
            read.documents, scope=read.scope, prefix_tokens=read.prefix_tokens
        )
        return CachedLengths(cached_tokens, documents_end + read.behind_tokens - cached_tokens)

    def _look_into(self, route: Route, content: bytes) -> ReadBody | Reason:
        """The body with its documents, or why it goes on without."""
        unread: Reason = "other_route" if route == "other" else "unreadable"
        try:
            fields = msgspec.json.decode(content, type=Fields)
        except msgspec.ValidationError:
            # No object: it has no fields.
            return unread
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if _TAG in content:
                message = f"The body must be strict JSON in UTF-8, or its field {FIELD} cannot be read."
                raise ProxyError(400, message, code="invalid_json") from None
            return unread
        if route == "other":
            if FIELD in fields:
                message = f"{FIELD}: documents are put into chats (/v1/chat/completions) and completions "
                message += "(/v1/completions). This route would answer without them."
                raise ProxyError(400, message, code="no_documents_here", param=FIELD)
            return unread
        body = _BODIES[route](fields)
        if FIELD in fields:
            return self._read_tagged(body)
        return "no_documents" if self._template is None else self._find(body, content, self._template)

    def _read_tagged(self, body: Body) -> ReadBody:
        tagged = read_tagged(body.fields.pop(FIELD))
        front, salt = body.front(), _salt(body, tagged.scope)
        if salt is not None:
            body.fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        given = [each.document() for each in tagged.documents]
        shows_id = "id" in self._builder.shown
        if shows_id and not self._by_place:
            self._ids.look(salt, ((each.id, each.text) for each in given))

        def write(permutation: Sequence[int]) -> bytes:
            shown = [given[rank] for rank in permutation]
            if self._by_place:
                shown = [replace(each, id=str(place)) for place, each in enumerate(shown, 1)]
            body.append(self._builder.turn(tagged.query, shown, permutation))
            return msgspec.json.encode(body.fields)

        documents = []
        for each in given:
            # A document is known by what of it stands in the prompt.
            names = [each.id] if shows_id and not self._by_place else []
            names += [str(each.metadata.get("title", ""))] if "title" in self._builder.shown else []
            documents.append(Document("\0".join(names), each.text, self._lengths.tagged(each, salt)))
        read = ReadBody(body, documents, self._lengths.question(tagged.query), write)
        return self._with_scope(read, salt, front)

    def _find(self, body: Body, content: bytes, template: DocumentTemplate) -> ReadBody | Reason:
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
        except ProxyError:
            # The server will say so.
            return "unreadable"
        if len(run.documents) > MAX_DOCUMENTS:
            return "unreadable"
        named = [template.named(text) for text in run.documents]
        if template.shows_id and not self._by_place:
            self._ids.look(salt, ((each.id, each.rest) for each in named))

        def write(permutation: Sequence[int]) -> bytes:
            if self._by_place:
                text = run.filled([named[rank].under(str(place)) for place, rank in enumerate(permutation, 1)])
            else:
                text = run.arranged(permutation)
            if text == passage.text and not self._send_facts:
                return content
            body.put(passage, text)
            return msgspec.json.encode(body.fields)

        documents = [
            Document("", each.rest if self._by_place else text, self._lengths.found(text, salt))
            for text, each in zip(run.documents, named, strict=True)
        ]
        gaps = [self._lengths.text(gap.replace(BOUNDARY, "\n")) for gap in run.gaps] if self._send_facts else ()
        read = ReadBody(body, documents, self._lengths.behind(passage.behind(run.tail)), write, gaps)
        return self._with_scope(read, salt, passage.front(run.head))

    def _with_scope(self, read: ReadBody, salt: str | None, front: Front) -> ReadBody:
        read.salt = salt
        try:
            read.scope = scope_of(read.body, salt, front)
            read.prefix_tokens = self._front_tokens(read.scope, read.body, front)
        except Exception as error:
            read.error = error
        return read

    def _ends(self, read: ReadBody, ordering: Ordering[Document]) -> list[int]:
        """At which tokens of the prompt the documents end. None is said where lengths are only estimated."""
        if not self._lengths.exact or read.error is not None:
            return []
        lengths = [document.tokens or 0 for document in ordering.documents]
        gaps = read.gaps or [0] * (len(lengths) - 1)
        starts = accumulate(map(add, lengths, gaps), initial=read.prefix_tokens)
        return list(map(add, starts, lengths))

    def _front_tokens(self, scope: bytes, body: Body, front: Front) -> int:
        """The same in all requests of a scope, and counted in the first."""
        tokens = self._fronts.get(scope)
        if tokens is None:
            tokens = self._lengths.front(body, front)
            self._fronts.put(scope, tokens)
        return tokens


def _answers(body: Body) -> int:
    """How many answers a request asks for."""
    answers = body.number("n")
    return 1 if answers is None else answers


def _salt(body: Body, scope: str | None) -> str | None:
    """The tenant's salt, which is what both fields say. Raises ProxyError if they disagree, or it is none."""
    salt = body.string("cache_salt")
    if scope is not None and salt not in (None, scope):
        message = f"{FIELD}.scope: is sent as cache_salt, and the body has another one. Give one of them."
        raise ProxyError(400, message, code="conflicting_scope", param=f"{FIELD}.scope")
    salt = scope if salt is None else salt
    if salt is None:
        return None
    try:
        return checked_salt(salt)
    except ValueError as error:
        raise ProxyError(400, f"cache_salt: {error}", code="invalid_cache_salt", param="cache_salt") from None
