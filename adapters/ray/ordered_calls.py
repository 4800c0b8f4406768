"""Ordering of requests as objects of Ray's LLM API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from operator import methodcaller
from typing import Any

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.bodies.body import Route
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.bodies.template import DocumentTemplate
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.adapters.proxy.ordering import RequestOrderer, SentRequest
from ragorder.adapters.proxy.workers import Workers
from ragorder.errors import RagorderError
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream")]

Call = Callable[..., Awaitable[AsyncIterator[Any]]]


class MalformedDocumentsError(RagorderError, ValueError):
    """Ray's ingress answers with the status."""

    status_code = 400


class OrderedCalls:
    """Orders documents in requests to `LLMServer.chat` or `.completions`, found as in the proxy."""

    def __init__(
        self, orderer: OrdererLike, *, tokenizer: Any = None, template: DocumentTemplate | None = None
    ) -> None:
        builder = PromptBuilder("", tokenizer=tokenizer)
        tokens = TokenCounter(builder, tokenizer)
        self._parser = BodyParser(builder, tokens, template, warn=orderer.degrade, heeds_client_marks=False)
        self._orderer = RequestOrderer(orderer, exact=tokens.exact)
        self._workers = Workers(always=tokens.exact)

    async def run(self, route: Route, call: Call, request: Any, *others: Any) -> AsyncIterator[Any]:
        """Return `call`'s answers. Raises MalformedDocumentsError and `call`'s errors."""
        body = request.model_dump_json(exclude_unset=True).encode()
        try:
            sent = await self._workers.run(partial(self._order, route, body), len(body), abandoned=methodcaller("end"))
        except HTTPError as error:
            raise MalformedDocumentsError(str(error)) from None
        # Without documents the request is unchanged.
        if (ordered := sent.take_body()) != b"":
            try:
                request = type(request).model_validate_json(ordered)
            except BaseException:
                sent.end()
                raise
        try:
            answers = await call(request, *others)
        except BaseException:
            sent.end()
            raise
        return _watched(answers, sent, _EVENTS if getattr(request, "stream", False) else _JSON)

    def _order(self, route: Route, body: bytes) -> SentRequest:
        parsed: ParsedBody | None = self._parser.parse(route, body)
        return SentRequest() if parsed is None else self._orderer.order(parsed)


async def _watched(
    answers: AsyncIterator[Any], sent: SentRequest, headers: list[tuple[bytes, bytes]]
) -> AsyncIterator[Any]:
    begun = False
    try:
        async for answer in answers:
            # Events arrive singly or in lists.
            for part in answer if isinstance(answer, list) else [answer]:
                if not begun:
                    begun = True
                    sent.begin(500 if hasattr(part, "error") else 200, headers)
                sent.feed(part.encode() if isinstance(part, str) else part.model_dump_json().encode())
            yield answer
        sent.complete = True
    finally:
        sent.end()
