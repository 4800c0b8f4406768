"""Parsing of request bodies: documents, scope and lengths."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import (
    MAX_VALUES,
    NOT_JSON,
    HiddenSurrogates,
    TooManyValuesError,
    count_values,
    hide_surrogates,
)
from ragorder.adapters.proxy.access import RenamedIds, UnorderedRequests
from ragorder.adapters.proxy.bodies.body import (
    BOUNDARY,
    Body,
    CompletionBody,
    Fields,
    Passage,
    PromptPrefix,
    PromptSuffix,
    Route,
    decode,
)
from ragorder.adapters.proxy.bodies.conversation import ChatBody, CohereBody, MessagesBody, ResponsesBody
from ragorder.adapters.proxy.bodies.marks import Left, MarkedBy, Marking, chunks_of, has_head
from ragorder.adapters.proxy.bodies.native import NativeDocuments, documents_in_parts, native_documents
from ragorder.adapters.proxy.bodies.parsed import BodyMarks, ParsedBody, PassReason, digest_of, salt_of, scope_of
from ragorder.adapters.proxy.bodies.presets import PromptRecogniser
from ragorder.adapters.proxy.bodies.schema import FIELD, MAX_DOCUMENTS, read_tagged
from ragorder.adapters.proxy.bodies.template import DocumentRun, DocumentTemplate, are_places, numbered_by_place
from ragorder.adapters.proxy.bodies.token_counter import KEPT_BYTES, TokenCounter, size_of
from ragorder.adapters.proxy.bodies.turns import RepeatedDocuments, SentTurns, TurnKeys
from ragorder.adapters.proxy.ordering import ranks_value
from ragorder.adapters.structs import readable_by_threads
from ragorder.common.counts import Estimate, estimate_tokens
from ragorder.common.lru_cache import LRUCache
from ragorder.document import Document
from ragorder.prompt import PromptBuilder
from ragorder.trie.histories import Segment

if TYPE_CHECKING:
    from ragorder.adapters.cloud_orderers import CloudOrderers

_BODIES = {body.route: body for body in (ChatBody, CohereBody, CompletionBody, MessagesBody, ResponsesBody)}
_PREFIXES = 4096
BodyT = TypeVar("BodyT", bound=Body)
_TAG = b'"%s"' % FIELD.encode()


class PromptLearner(Protocol):
    def add(self, tenant: str | None, texts: Sequence[str]) -> None:
        """Take the messages' texts of a request without known documents. Must not block."""


@readable_by_threads
class _Tag(Struct):
    ragorder: Raw = Raw(b"")


class BodyParser:
    """Options as for `make_app`; `marks` and `heeds_client_marks` as for `Marking`. `warn` gets each complaint once."""

    def __init__(
        self,
        builder: PromptBuilder,
        tokens: TokenCounter,
        template: DocumentTemplate | Sequence[DocumentTemplate] | None,
        *,
        warn: Callable[[str], None],
        finds_native: bool = False,
        stable_tools: bool = False,
        recogniser: PromptRecogniser | None = None,
        learner: PromptLearner | None = None,
        send_facts: bool = False,
        number_by_place: bool = False,
        repeated: RepeatedDocuments | None = None,
        marks: Collection[Route] = (),
        clouds: CloudOrderers | None = None,
        heeds_client_marks: bool = True,
        on_passed: Callable[[str], None] | None = None,
    ) -> None:
        self._builder = builder
        self._tokens = tokens
        self._templates = [template] if isinstance(template, DocumentTemplate) else template or []
        self._finds_native = finds_native
        self._stable_tools = stable_tools
        self._recogniser = recogniser
        self._prompts = learner
        self._send_facts = send_facts
        self._by_place = number_by_place
        self._repeated = repeated
        self._marking = Marking(marks, clouds, heeds_client=heeds_client_marks)
        self._unordered = UnorderedRequests(
            on_passed,
            warn,
            template=bool(self._templates),
            hint=None if recogniser is None else recogniser.hint,
        )
        self._ids = RenamedIds(warn, by_place=number_by_place)
        self._prefixes: LRUCache[int] = LRUCache(_PREFIXES, KEPT_BYTES)
        self._turns = SentTurns()

    def parse(self, route: Route, content: bytes) -> ParsedBody | None:
        """Return None for an unreadable body, or one without documents. Raises HTTPError for malformed fields."""
        parsed = self._look_into(route, content)
        if not isinstance(parsed, ParsedBody):
            self.passed(parsed)
            return None
        if parsed.left is None:
            self._unordered.found()
        else:
            self._unordered.passed(parsed.left)
        return parsed

    def passed(self, reason: PassReason) -> None:
        self._unordered.passed(reason)

    def _look_into(self, route: Route, content: bytes) -> ParsedBody | PassReason:
        try:
            opened = _open(route, content)
        except msgspec.ValidationError:
            # Not an object: it has no fields.
            return _unread(route)
        except NOT_JSON:
            hidden = hide_surrogates(content)
            if hidden is None and _TAG in content:
                message = f"The body must be JSON in UTF-8, or its field {FIELD} cannot be read."
                raise HTTPError(400, message, code="invalid_json") from None
            if hidden is None:
                return _unread(route)
            found = self._look_into(route, hidden.content)
            return _with_surrogates(found, hidden) if isinstance(found, ParsedBody) else found
        if isinstance(opened, str):
            return opened
        fields, values = opened
        body = _BODIES[route](fields)
        body.values = values
        if self._stable_tools:
            body.sort_tools()
        found = self._read(body, route, content)
        if isinstance(found, ParsedBody) or not body.is_changed:
            return found
        return ParsedBody(body, [], 0, partial(_unordered, body), left=found, values=body.values)

    def _read(self, body: Body, route: Route, content: bytes) -> ParsedBody | PassReason:
        fields = body.fields
        by = self._marking.of(route, decode(fields.get("model", Raw(b"null")), str), content)
        body.takes_cache_key = body.takes_cache_key or by.keyed
        if FIELD in fields:
            return self._read_tagged(body, by)
        try:
            return self._read_untagged(body, content, by)
        except HTTPError:
            # The server will refuse the malformed field.
            return "unreadable"

    def _read_untagged(self, body: Body, content: bytes, by: MarkedBy) -> ParsedBody | PassReason:
        # Their ends in the prompt are not known.
        if self._finds_native and not self._send_facts and (native := _native(body, native_documents)) is not None:
            return self._order_native(body, content, native, by)
        found: ParsedBody | PassReason = "no_documents"
        for template in self._templates:
            if (native := self._in_parts(body, template, by)) is not None:
                return self._order_native(body, content, native, by)
            reason = found
            found = self._find(body, content, template, by)
            if found == "no_documents":
                found = reason
            elif found not in ("one_document", "not_numbered"):
                return found
        self._recognise(body, content, by)
        return found

    def _in_parts(self, body: Body, template: DocumentTemplate, by: MarkedBy) -> NativeDocuments | None:
        """Return None with breakpoints, or numbers in texts, which would not move."""
        is_plain = by == MarkedBy() and self._repeated is None and not self._by_place and not self._send_facts
        if not is_plain or template.shows_number or not isinstance(body, ChatBody):
            return None
        return _native(body, partial(documents_in_parts, template=template))

    def _recognise(self, body: Body, content: bytes, by: MarkedBy) -> None:
        if self._recogniser is None or by.left is not None:
            return
        with suppress(Exception):
            texts = [each.text for each in body.passages() if each.role != "assistant"]
            is_known = self._recogniser.look(texts, lambda template: self._find(body, content, template, by))
            if self._prompts is not None and not is_known:
                own = [each.replace(BOUNDARY, "\n") for each in texts]
                self._prompts.add(salt_of(body, None), own)

    def _read_tagged(self, body: Body, by: MarkedBy) -> ParsedBody:
        tagged = read_tagged(body.fields.pop(FIELD))
        prefix, salt = body.prefix(), salt_of(body, tagged.scope)
        if salt is not None:
            body.fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        given = [each.document() for each in tagged.documents]
        shows_id, numbered = "id" in self._builder.shown, are_places([each.id for each in given])
        if shows_id:
            self._ids.look(salt, ((each.id, each.text) for each in given), are_places=numbered)
        numbered = numbered and self._by_place and _can_be_mapped(given)

        marks = _body_marks(body, None, by, ends=())

        def render(permutation: Sequence[int], marked: Sequence[int]) -> bytes:
            shown = [given[rank] for rank in permutation]
            if numbered:
                shown = [replace(each, id=str(place)) for place, each in enumerate(shown, 1)]
            turn = self._builder.user_message(tagged.query, shown, permutation)
            pieces = self._pieces(shown, turn) if marks is not None else None
            if pieces is not None and marks is not None and isinstance(body, ChatBody):
                body.mark_around(None, marks.form, front=0 in marked)
                body.append_chunks(chunks_of(pieces, marked), marks.form)
            else:
                body.append(turn)
            return msgspec.json.encode(body.fields)

        documents = []
        for each in given:
            # A document's key is what the prompt shows of it.
            names = [each.id] if shows_id and not numbered else []
            names += [str(each.metadata.get("title", ""))] if "title" in self._builder.shown else []
            names += [self._builder.label_of(each)] if "label" in self._builder.shown else []
            documents.append(Document("\0".join(names), each.text, self._tokens.tagged(each, salt, numbered=numbered)))
        facts = {"marks": marks, "orderer": by.orderer, "left": _left(by, marks)}
        return self._parsed(body, documents, self._builder.suffix_tokens(tagged.query), render, salt, prefix, **facts)

    def _pieces(self, documents: Sequence[Document], turn: str) -> list[str] | None:
        texts = [self._builder.document_text(each) for each in documents]
        if not texts or not turn.startswith("".join(texts)):
            return None
        pieces = [""] * (2 * len(texts))
        pieces[1::2] = texts
        return [*pieces, turn[sum(map(len, texts)) :]]

    def _find(self, body: Body, content: bytes, template: DocumentTemplate, by: MarkedBy) -> ParsedBody | PassReason:
        named = None
        if self._repeated is not None and isinstance(body, ChatBody):
            named = self._repeated.name(body)
        found = _first_run(body, template)
        if by.left is not None and not isinstance(found, str):
            found = by.left
        if isinstance(found, str) and named is None:
            return found
        salt = body.string("cache_salt")
        if isinstance(found, str):
            none = partial(_unordered, body)
            return self._parsed(body, [], 0, none, salt, body.prefix(), named=named or (), left=by.left)
        passage, run = found
        if len(run.documents) > MAX_DOCUMENTS:
            return "unreadable"
        parts = [template.split(text) for text in run.documents]
        numbered = numbered_by_place(parts, from_0=template.shows_number)
        if template.shows_number and (numbered is None or not _can_be_mapped(parts)):
            return "not_numbered"
        if template.shows_id:
            split = parts if numbered is None else numbered
            self._ids.look(salt, ((each.id, each.rest) for each in split), are_places=numbered is not None)
        if not template.shows_number and not (self._by_place and _can_be_mapped(parts)):
            numbered = None
        first = 1 if numbered is None else int(numbered[0].id)

        ends = body.turn_ends(by.form) if by.form is not None and isinstance(body, ChatBody) else ()
        marks = _body_marks(body, passage, by, ends, has_head=has_head(run.pieces))
        left = _left(by, marks)
        if left is not None and named is None:
            return left
        is_changed = self._send_facts or named is not None or body.wants_cache_key() or body.is_changed

        def render(permutation: Sequence[int], marked: Sequence[int]) -> bytes:
            if numbered is not None:
                texts = [numbered[rank].with_id(str(place)) for place, rank in enumerate(permutation, first)]
            else:
                texts = [run.documents[rank] for rank in permutation]
            pieces = run.pieces_with(texts)
            text = "".join(pieces)
            if parsed.error is None and body.is_turn(passage):
                turn = TurnKeys(parsed.scope, run.pieces[::2], [each.key for each in documents])
                self._turns.remember(turn.of(range(len(documents))), turn.of(permutation), permutation)
            if marks is not None and isinstance(body, ChatBody):
                form = marks.form
                body.put_chunks(passage, chunks_of(pieces, marked, own_head=form.own_head), form)
                body.mark_around(passage, form, front=0 in marked and not has_head(pieces), ends=ends)
            elif text != passage.text:
                body.put(passage, text)
            elif not is_changed:
                return content
            return msgspec.json.encode(body.fields)

        # A document's key: a position number is not part of it.
        known = run.documents if numbered is None else [each.rest for each in numbered]
        # The tokens of a number change with its place.
        lengths = self._tokens.run(run.documents, run.gaps if numbered is None else (), salt)
        documents = [Document("", own, length) for own, length in zip(known, lengths, strict=True)]
        gaps = [self._tokens.text(gap.replace(BOUNDARY, "\n")) for gap in run.gaps] if self._send_facts else ()
        suffix = passage.suffix(run.tail)
        question = self._segments(suffix)
        # The sum of its parts: each is rounded up to whole tokens, so the whole could be shorter.
        suffix_tokens = sum(each.tokens for each in question)
        facts: dict[str, Any] = {"gaps": gaps, "marks": marks, "orderer": by.orderer, "left": left}
        facts["named"] = named or ()
        facts["question"] = question if isinstance(body, ChatBody) else ()
        parsed = self._parsed(body, documents, suffix_tokens, render, salt, passage.prefix(run.head), **facts)
        learn = self._learner(run.documents, parsed.prefix_tokens, suffix.text, suffix_tokens)
        if learn is not None:
            parsed = replace(parsed, on_prompt=learn)
        if not _is_history(parsed, passage):
            return parsed
        turn = TurnKeys(parsed.scope, run.pieces[::2], [each.key for each in documents])
        return replace(parsed, sent=partial(self._turns.sent, turn.of(range(len(documents))), len(documents)))

    def _order_native(
        self, body: Body, content: bytes, native: NativeDocuments, by: MarkedBy
    ) -> ParsedBody | PassReason:
        passage = native.passage
        ends = body.turn_ends(by.form) if by.form is not None and isinstance(body, ChatBody) else ()
        marks = None if passage is None else _body_marks(body, passage, by, ends)
        if (left := _left(by, marks)) is not None:
            return left
        if len(native.items) > MAX_DOCUMENTS:
            return "unreadable"
        salt = body.string("cache_salt")
        is_changed = marks is not None or body.wants_cache_key() or body.is_changed

        def render(permutation: Sequence[int], marked: Sequence[int]) -> bytes:
            if passage is not None and parsed.error is None:
                own, sent = (digest_of(parsed.scope, text) for text in (passage.text, native.text(permutation)))
                self._turns.remember(own, sent, permutation)
            if list(permutation) == list(range(len(permutation))) and not is_changed:
                return content
            form = None if marks is None else marks.form
            native.put(native.marked(permutation, marked, form), permutation)
            if form is not None and isinstance(body, ChatBody):
                body.mark_around(passage, form, front=0 in marked, ends=ends)
            return msgspec.json.encode(body.fields)

        held = body.fields.get(native.field, Raw(b"null"))
        if native.field:
            # The list is no part of its own prefix.
            body.fields[native.field] = Raw(b"null")
        documents = [
            Document("", digest_of(bytes(item)).hex(), length)
            for item, length in zip(native.items, native.lengths, strict=True)
        ]
        question = self._segments(native.suffix)
        suffix_tokens = sum(each.tokens for each in question)
        facts = {"marks": marks, "orderer": by.orderer, "question": question, "translator": native.translator}
        parsed = self._parsed(body, documents, suffix_tokens, render, salt, native.prefix, **facts)
        if native.field:
            body.fields[native.field] = held
        if passage is None or not _is_history(parsed, passage):
            return parsed
        own = digest_of(parsed.scope, passage.text)
        return replace(parsed, sent=partial(self._turns.sent, own, len(documents)))

    def _parsed(
        self,
        body: Body,
        documents: list[Document],
        suffix_tokens: int,
        render: Callable[[Sequence[int], Sequence[int]], bytes],
        salt: str | None,
        prefix: PromptPrefix,
        **facts: Any,
    ) -> ParsedBody:
        """`facts` are further fields: a later copy would cost as much as a document's digest."""
        scope, prefix_tokens, failure = b"", 0, None
        try:
            scope = scope_of(body, salt, prefix)
            prefix_tokens = self._prefix_tokens(scope, body, prefix, salt, documents)
        except Exception as error:
            failure = error
        facts |= {"salt": salt, "scope": scope, "prefix_tokens": prefix_tokens, "error": failure}
        return ParsedBody(body, documents, suffix_tokens, render, values=body.values, **facts)

    def _learner(
        self, texts: Sequence[str], prefix_tokens: int, question: str, suffix_tokens: int
    ) -> Callable[[int | None], None] | None:
        """Return what learns scripts' lengths from reported tokens, or None for Latin documents."""
        more = self._tokens.more("".join(texts))
        if not more:
            return None
        asked = self._tokens.more(question)
        latin = prefix_tokens + sum(map(estimate_tokens, texts)) + suffix_tokens - asked
        return partial(self._tokens.learn, latin, more + asked)

    def _segments(self, suffix: PromptSuffix) -> list[Segment]:
        follows = [suffix._replace(messages=()), *(PromptSuffix(messages=[each]) for each in suffix.messages)]
        return [
            Segment(
                digest_of(each.text, *map(bytes, each.parts), *map(bytes, each.messages)).hex(),
                Estimate(self._tokens.suffix(each)),
            )
            for each in follows
        ]

    def _prefix_tokens(
        self, scope: bytes, body: Body, prefix: PromptPrefix, salt: str | None, documents: Sequence[Document]
    ) -> int:
        tokens = self._prefixes.get(scope)
        if tokens is None:
            tokens = self._tokens.prefix(body, prefix, salt, documents[0].text if documents else "")
            self._prefixes.put(scope, tokens, size_of(tokens))
        return tokens


def _is_history(parsed: ParsedBody, passage: Passage) -> bool:
    return parsed.error is None and parsed.body.is_history(passage)


def _unordered(body: Body, permutation: Sequence[int], marked: Sequence[int]) -> bytes:
    return msgspec.json.encode(body.fields)


def _native(body: BodyT, find: Callable[[BodyT], NativeDocuments | None]) -> NativeDocuments | None:
    try:
        return find(body)
    except HTTPError:
        # The server will refuse the malformed field.
        return None


def _open(route: Route, content: bytes) -> tuple[Fields, int] | PassReason:
    """Raises NOT_JSON, and HTTPError for a tag in a body that is not read."""
    if route == "other":
        if _is_tagged(content):
            message = f"{FIELD}: documents are supported in chats (/v1/chat/completions), completions "
            message += "(/v1/completions), /v1/responses and /v1/messages; this route would answer without them."
            raise HTTPError(400, message, code="no_documents_here", param=FIELD)
        return "other_route"
    try:
        values = count_values(content, MAX_VALUES)
    except TooManyValuesError:
        if _is_tagged(content):
            message = f"The body has more than {MAX_VALUES:,} JSON values (members of objects, items of lists), the "
            message += f"limit for a body with {FIELD}: send fewer."
            raise HTTPError(400, message, code="too_many_values", param=FIELD) from None
        return "too_many_values"
    return msgspec.json.decode(content, type=Fields), values


def _is_tagged(content: bytes) -> bool:
    return msgspec.json.decode(content, type=_Tag).ragorder != Raw(b"")


def _unread(route: Route) -> PassReason:
    return "other_route" if route == "other" else "unreadable"


def _with_surrogates(parsed: ParsedBody, hidden: HiddenSurrogates) -> ParsedBody:
    def render(permutation: Sequence[int], marked: Sequence[int]) -> bytes:
        return hidden.show(parsed.render(permutation, marked))

    return replace(parsed, render=render)


def _body_marks(
    body: Body, passage: Passage | None, by: MarkedBy, ends: Sequence[int], *, has_head: bool = False
) -> BodyMarks | None:
    if by.form is None or not isinstance(body, ChatBody) or not (passage is None or body.can_be_divided(passage)):
        return None
    return BodyMarks(by.form, len(ends), has_head or body.takes_front_mark(passage, by.form))


def _left(by: MarkedBy, marks: BodyMarks | None) -> Left | None:
    return "no_marks" if by.left is None and by.form is not None and marks is None else by.left


def _can_be_mapped(documents: Sequence[object]) -> bool:
    return ranks_value(range(len(documents))) is not None


def _first_run(body: Body, template: DocumentTemplate) -> tuple[Passage, DocumentRun] | PassReason:
    reason: PassReason = "no_documents"
    for passage in body.passages():
        if not template.reads(passage.role):
            continue
        run = template.find(passage.text)
        if run is not None:
            return passage, run
        count = len(list(islice(template.spans(passage.text), 2)))
        if count:
            reason = "not_numbered" if count > 1 and template.shows_number else "one_document"
    return reason
