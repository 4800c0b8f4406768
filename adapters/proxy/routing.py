"""Requests that are given their topic and nothing else: `ragorder serve --route`."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.adapters.http_server.headers import Headers
from ragorder.adapters.proxy.parsed import ParsedBody
from ragorder.adapters.proxy.sent import SentRequest
from ragorder.orderer import OrdererLike
from ragorder.pipelining.reordering import CachedLengths

__all__ = ["TopicHeader", "TopicRouter"]


class TopicHeader:
    """The header of this name, with the topic of a request's documents; without a name none."""

    def __init__(self, orderer: OrdererLike, name: str | None) -> None:
        self._orderer = orderer
        self._name = None if name is None else name.lower().encode("ascii")

    def of(self, parsed: ParsedBody) -> Headers:
        if self._name is None:
            return []
        topic = self.topic(parsed)
        return [] if topic is None else [(self._name, topic.encode("ascii"))]

    def topic(self, parsed: ParsedBody) -> str | None:
        """The topic, which is counted."""
        return None if parsed.error is not None else self._orderer.topic(parsed.documents, scope=parsed.scope)


class TopicRouter:
    """Adds the topic; the proxies behind the router order the documents."""

    def __init__(self, header: TopicHeader) -> None:
        self._header = header

    def predict_cached_tokens(self, parsed: ParsedBody) -> CachedLengths:
        """Unknown here."""
        return CachedLengths(0, 1)

    def order(self, parsed: ParsedBody, upcoming: Sequence[ParsedBody] = ()) -> SentRequest:
        return SentRequest(self._header.of(parsed))
