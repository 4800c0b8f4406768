"""Ordering of requests, and feedback from their answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import add

from ragorder.adapters.http_server.headers import Headers, without
from ragorder.adapters.marks import marked_documents
from ragorder.adapters.proxy.access import UnsharedRequests
from ragorder.adapters.proxy.bodies.body import encode
from ragorder.adapters.proxy.bodies.parsed import AnswerTranslator, ParsedBody
from ragorder.adapters.proxy.bodies.schema import NAMED, PERMUTATION, PREDICTED
from ragorder.adapters.proxy.usage import StreamReader, WholeReader, reader_for
from ragorder.adapters.request_facts import add_facts
from ragorder.adapters.usage import AnswerLength, read_usage
from ragorder.document import Document
from ragorder.ordering import Ordering
from ragorder.pipelining.reordering import CachedLengths
from ragorder.protocols import OrdererLike
from ragorder.scope.request import Lengths
from ragorder.trie.histories import History, Segment

_LONGEST = 1024


def ranks_value(ranks: Sequence[int]) -> bytes | None:
    value = ",".join(map(str, ranks)).encode()
    return value if len(value) <= _LONGEST else None


class SentRequest:
    """A request sent with `added` headers, otherwise unchanged."""

    complete = False
    """Whether the whole answer was forwarded."""

    def __init__(self, added: Headers | None = None) -> None:
        self.added = added or []

    def take_body(self, received: bytes = b"") -> bytes:
        """Return the body to send, once: it is not kept while the answer arrives."""
        return received

    def request_headers(self, received: Headers) -> Headers:
        for name, _ in self.added:
            received = without(received, name)
        return [*received, *self.added]

    def headers(self) -> Headers:
        return []

    translator: AnswerTranslator | None = None
    on_prompt: Callable[[int | None], None] | None = None

    def begin(self, status: int, headers: Headers) -> None: ...

    def feed(self, chunk: bytes) -> None:
        """Read a chunk of the answer, as the server sent it."""

    def end(self) -> None:
        """End the request, after the answer. Idempotent."""


class TopicRouter:
    """Adds topics, for ordering proxies after the router."""

    def __init__(self, orderer: OrdererLike, header: str | None) -> None:
        self._orderer = orderer
        self._header = header

    def predict_cached_tokens(self, parsed: ParsedBody) -> CachedLengths:
        return CachedLengths(0, 1)

    def order(self, parsed: ParsedBody, upcoming: Sequence[ParsedBody] = ()) -> SentRequest:
        return SentRequest(_topic_header(self._header, _topic_of(self._orderer, parsed)))


def _topic_of(orderer: OrdererLike, parsed: ParsedBody) -> str | None:
    return None if parsed.error is not None else orderer.topic(parsed.documents, scope=parsed.scope)


def _topic_header(name: str | None, topic: str | None) -> Headers:
    return [] if name is None or topic is None else [(name.lower().encode("ascii"), topic.encode("ascii"))]


_logger = logging.getLogger("ragorder")

OnSent = Callable[..., None]
"""Gets documents, the permutation about to be sent, `scope` and `lengths`. Must not raise."""


class OrderedRequest(SentRequest):
    """`end` confirms with the reported counts if the answer was `complete`, without them if it broke off after its
    first token, and otherwise discards. With several `choices` the cached length is unknown. A `permutation` was sent
    instead of the ordering's, which is discarded. `named` documents are not sent."""

    def __init__(
        self,
        body: bytes,
        ordering: Ordering[Document] | None,
        choices: int,
        answer_length: AnswerLength,
        on_tbt: Callable[[float], None] | None = None,
        added: Headers | None = None,
        permutation: Sequence[int] | None = None,
        named: Sequence[int] = (),
    ) -> None:
        super().__init__(added)
        self.permutation: Sequence[int] = permutation or ()
        self.named = named
        self.predicted_tokens = 0
        if ordering is not None and permutation is None:
            self.permutation, self.predicted_tokens = ordering.permutation, ordering.cached_tokens
        for each in () if ordering is None else (ordering, *ordering.twins):
            # The body has their texts, and the answer may take long.
            each.documents = []
        self._body = body
        self._ordering = ordering
        self._choices = choices
        self._answer_length = answer_length
        self._on_tbt = on_tbt
        self._reader: WholeReader | StreamReader | None = None
        self._is_readable = False

    def take_body(self, received: bytes = b"") -> bytes:
        body, self._body = self._body, b""
        return body

    def request_headers(self, received: Headers) -> Headers:
        received = super().request_headers(received)
        return [*without(received, b"accept-encoding"), (b"accept-encoding", b"identity")]

    def headers(self) -> Headers:
        names = [(PERMUTATION, self.permutation), (NAMED, self.named)]
        headers = [(name, value) for name, ranks in names if ranks and (value := ranks_value(ranks)) is not None]
        return [*headers, (PREDICTED, b"%d" % self.predicted_tokens)] if self.permutation else headers

    def begin(self, status: int, headers: Headers) -> None:
        if self._ordering is not None and 200 <= status < 300:
            self._reader = reader_for(headers)

    def feed(self, chunk: bytes) -> None:
        """End the request at the last event: its client may send the next one at once."""
        if self._reader is not None:
            self._reader.feed(chunk)
            if self._reader.served:
                self.readable()
            if self._reader.done:
                self.complete = True
                self.end()

    def readable(self) -> None:
        """Note that the request's prefix can be reused. Idempotent."""
        if self._ordering is not None and not self._is_readable:
            self._is_readable = True
            self._ordering.readable()

    def end(self) -> None:
        ordering, reader = self._ordering, self._reader
        if ordering is None:
            return
        self._ordering = self._reader = None
        try:
            self._finish(ordering, reader)
        except Exception as error:
            # The error's message may quote a prompt.
            _logger.error("the feedback from a request is lost: %s", type(error).__name__)

    def _finish(self, ordering: Ordering[Document], reader: WholeReader | StreamReader | None) -> None:
        if reader is None or not reader.served:
            ordering.discard()
            return
        if not self.complete:
            # The prompt was computed and stays cached, although the answer broke off.
            ordering.confirm()
            return
        report = reader.report()
        usage = read_usage(report)
        if self.on_prompt is not None:
            self.on_prompt(usage.prompt_tokens)
        total_tokens = None
        if self._choices == 1:
            self._answer_length.learn(usage.completion_tokens)
            if usage.prompt_tokens is not None and usage.completion_tokens is not None:
                total_tokens = usage.prompt_tokens + usage.completion_tokens
        written_tokens = None
        if ordering.cloud is not None:
            from ragorder.clouds import read_cloud_usage

            written_tokens = read_cloud_usage(report).written_tokens
        ordering.confirm(
            usage.cached_tokens, total_tokens, prompt_tokens=usage.prompt_tokens, written_tokens=written_tokens
        )
        if self._on_tbt is not None and self._choices == 1 and (tbt_s := reader.tbt_s()) is not None:
            self._on_tbt(tbt_s)


class RequestOrderer:
    """Options as for `make_app`; `exact` lengths are a tokenizer's."""

    def __init__(
        self,
        orderer: OrdererLike,
        *,
        send_facts: bool = False,
        exact: bool = False,
        on_tbt: Callable[[float], None] | None = None,
        on_sent: OnSent | None = None,
        topic_header: str | None = None,
    ) -> None:
        self._orderer = orderer
        self._topic_header = topic_header
        self._send_facts = send_facts
        self._exact = exact
        self._answer_length = AnswerLength()
        self._on_tbt = on_tbt
        self._on_sent = on_sent
        self._unshared = UnsharedRequests(orderer.degrade)

    def predict_cached_tokens(self, parsed: ParsedBody) -> CachedLengths:
        if parsed.error is not None or parsed.left is not None:
            return CachedLengths(0, 1)
        follows = self._follows(parsed)
        cached_tokens, end = self._of(parsed).predict_cached_tokens(
            parsed.documents,
            scope=parsed.scope,
            lengths=Lengths(parsed.prefix_tokens),
            history=_history(follows),
        )
        computed_tokens = end + (0 if follows else parsed.suffix_tokens) - cached_tokens
        return CachedLengths(cached_tokens, computed_tokens, parsed.prefix_tokens)

    def order(self, parsed: ParsedBody, upcoming: Sequence[ParsedBody] = ()) -> OrderedRequest:
        if parsed.left is not None:
            content = parsed.render(range(len(parsed.documents)), ())
            return OrderedRequest(content, None, 1, self._answer_length, named=parsed.named)
        orderer, body, suffix_tokens = self._of(parsed), parsed.body, 0
        # An earlier turn keeps its sent order.
        sent = None if parsed.sent is None else parsed.sent()
        if parsed.error is not None:
            ordering = orderer.fall_back(parsed.documents, parsed.error)
        else:
            limits = [body.number(name) for name in body.limits]
            limit = next((limit for limit in limits if limit is not None and limit >= 0), sys.maxsize)
            default = orderer.settings.suffix_tokens
            suffix_tokens = self._answer_length.suffix_tokens(parsed.suffix_tokens, limit, default)
            follows = self._follows(parsed)
            own_tokens = suffix_tokens - sum(each.tokens for each in follows[:-1])
            order = partial(
                orderer.order,
                parsed.documents,
                waiting=[each.documents for each in upcoming if each.scope == parsed.scope and each.left is None],
                scope=parsed.scope,
                lengths=Lengths(parsed.prefix_tokens, own_tokens),
            )
            ordering = order(history=_history(follows, sent))
            if parsed.sent is not None and sent is None:
                # If that is unknown, use the orderer's order if the engine should have all of it cached, as another
                # process has sent it; else the client's own.
                sent = range(len(parsed.documents))
                if ordering.prefix_documents == len(sent):
                    sent = ordering.permutation
                elif list(sent) != list(ordering.permutation):
                    ordering.discard()
                    ordering = order(history=_history(follows, sent))
            if orderer is self._orderer:
                self._look(parsed, ordering)
        try:
            permutation = ordering.permutation if sent is None else sent
            if is_kept := list(permutation) != list(ordering.permutation):
                # An earlier turn keeps its order after an error as well.
                ordering.discard()
            if self._send_facts:
                ends = self._ends(parsed, permutation)
                expected = ((), 0) if is_kept else (ordering.expected_uses, ordering.exact_documents)
                add_facts(body.fields, ends, parsed.salt, parsed.prefix_tokens, *expected)
            wants_key = body.wants_cache_key()
            # Asked once, because each time counts.
            topic = _topic_of(self._orderer, parsed) if wants_key or self._topic_header is not None else None
            if wants_key and topic is not None:
                body.fields["prompt_cache_key"] = encode(topic)
            choices = body.number("n")
            content = parsed.render(permutation, () if is_kept else _marked(parsed, ordering))
            if self._on_sent is not None and orderer is self._orderer and not ordering.fallback:
                self._on_sent(
                    parsed.documents,
                    permutation,
                    scope=parsed.scope,
                    lengths=Lengths(parsed.prefix_tokens, suffix_tokens),
                )
            ordered = OrderedRequest(
                content,
                ordering,
                1 if choices is None else choices,
                self._answer_length,
                self._on_tbt,
                _topic_header(self._topic_header, topic),
                permutation if is_kept else None,
                parsed.named,
            )
            ordered.on_prompt = parsed.on_prompt
            ordered.translator = None if parsed.translator is None else parsed.translator(permutation)
            return ordered
        except BaseException:
            ordering.discard()
            raise

    def _look(self, parsed: ParsedBody, ordering: Ordering[Document]) -> None:
        # A warning must not fail the request.
        with suppress(Exception):
            keys = (each.key for each in parsed.documents)
            self._unshared.look(parsed.salt, parsed.scope, keys, shares=ordering.cached_tokens > 0)

    def _follows(self, parsed: ParsedBody) -> Sequence[Segment]:
        """Return none if breakpoints at ends of turns cover the segments."""
        return parsed.question if parsed.orderer is None and parsed.marks is None else ()

    def _of(self, parsed: ParsedBody) -> OrdererLike:
        return self._orderer if parsed.orderer is None else parsed.orderer

    def _ends(self, parsed: ParsedBody, permutation: Sequence[int]) -> list[int]:
        if not self._exact or parsed.error is not None:
            return []
        lengths = [parsed.documents[rank].tokens or 0 for rank in permutation]
        gaps = parsed.gaps or [0] * (len(lengths) - 1)
        starts = accumulate(map(add, lengths, gaps), initial=parsed.prefix_tokens)
        return list(map(add, starts, lengths))


def _marked(parsed: ParsedBody, ordering: Ordering[Document]) -> Sequence[int]:
    """Return breakpoints; those at ends of turns have priority."""
    marks, cloud = parsed.marks, ordering.cloud
    if marks is None:
        return ()
    if cloud is None:
        return marked_documents(ordering)
    room = max(0, marks.form.most - marks.turns)
    places = [mark for mark in cloud.breakpoints if mark or marks.has_front]
    # Priority: the breakpoint of the cached prefix, then breakpoints of new text, last first, then earlier ones.
    resumed = cloud.resumed
    places.sort(key=lambda mark: (mark != resumed, mark < resumed, mark if mark < resumed else -mark))
    kept = sorted(places[:room])
    cloud.keep_marks(kept)
    return kept


def _history(follows: Sequence[Segment], sent: Sequence[int] | None = None) -> History | None:
    return History(question=follows or None, sent=sent) if follows or sent is not None else None
