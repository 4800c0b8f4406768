"""Ingress with mirrors: chooses and orders for the best replica."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Send

from ragorder.adapters.http_server.errors import ErrorMiddleware
from ragorder.adapters.http_server.headers import end_to_end
from ragorder.adapters.http_server.memory import MemoryBudget, MemoryShare
from ragorder.adapters.http_server.request_body import RequestBody
from ragorder.adapters.proxy.access import APIKeyMiddleware, HostMiddleware
from ragorder.adapters.proxy.app import BODIES_LIMIT, BODY_LIMIT, PROBES, health
from ragorder.adapters.proxy.ordering import RequestOrderer, SentRequest
from ragorder.adapters.proxy.parsing import BodyParser, ParsedBody
from ragorder.adapters.proxy.reverse_proxy import Head, ReverseProxy, forward_answer, with_length
from ragorder.adapters.proxy.template import DocumentTemplate
from ragorder.adapters.proxy.token_counter import TokenCounter
from ragorder.adapters.proxy.upstream import Timeouts, error_content
from ragorder.adapters.proxy.workers import Workers
from ragorder.adapters.ray.answer import ReplicaAnswer, ReplicaLostError, as_http_errors
from ragorder.adapters.ray.ingress import AppResponse
from ragorder.adapters.ray.mirrors import ReplicaChoice, ReplicaMirrors
from ragorder.adapters.ray.replica import ReplicaRequest
from ragorder.adapters.ray.transport import REFUSED, TRIES
from ragorder.orderer import OrdererLike
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["BestIngress", "BestReplicaProxy"]


class BestReplicaProxy(ReverseProxy):
    """Proxy that has Ray choose each request's replica by `ReplicaMirrors`, orders the request for it, and sends it
    there, or to another replica if that is lost before the answer has begun. Raises HTTPError."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        mirrors: ReplicaMirrors,
        parser: BodyParser,
        *,
        read_s: float,
        dropped: Collection[bytes] = (),
        **limits: Any,
    ) -> None:
        super().__init__(parser, **limits)
        self._dropped = dropped
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._mirrors = mirrors
        self._read_s = read_s

    async def _exchange(self, head: Head, request_body: RequestBody, send: Send, share: MemoryShare) -> None:
        body = await request_body.read()
        # Ordering changes the parsed body.
        tried: list[str] = []
        while not await self._answered(head, body, await self._read(head, body, share), send, tried):
            pass

    async def _read(self, head: Head, body: bytes, share: MemoryShare) -> ParsedBody | None:
        parsed, kept = None, 0
        if head.route is not None:
            parsed, kept = await self._workers.run(partial(self._parse, head.route, body), len(body))
        # The body is kept until an answer has begun: another replica may need it.
        share.resize(len(body) + kept)
        return parsed

    async def _answered(self, head: Head, body: bytes, parsed: ParsedBody | None, send: Send, tried: list[str]) -> bool:
        """Return False if the replica was lost, and another should get the request."""
        choice = ReplicaChoice(self._mirrors, parsed, tuple(tried))
        async with AsyncExitStack() as until_answered:
            with as_http_errors():
                selection = await until_answered.enter_async_context(self._replicas.choose_replica(choice))
            orderer = until_answered.enter_context(self._mirrors.in_flight(selection.replica_id))
            tried.append(selection.replica_id)
            sent = await self._ordered(orderer, parsed, len(body))
            until_answered.callback(sent.end)
            asked = self._request(head, sent, body)
            answer = ReplicaAnswer(self._replicas.dispatch(selection, asked), self._read_s)
            may_repeat = asked.repeatable and len(tried) < TRIES
            try:
                response = await answer.begin()
            except ReplicaLostError:
                if may_repeat:
                    return False
                raise
            until_answered.push_async_callback(response.aclose)
            if may_repeat and response.status_code in REFUSED:
                return False
            await forward_answer(response.status_code, response.headers.raw, response.aiter_raw(), send, sent)
            return True

    async def _ordered(self, orderer: RequestOrderer, parsed: ParsedBody | None, length: int) -> SentRequest:
        if parsed is None:
            return SentRequest()
        # If the client disconnects meanwhile, the documents may be ordered only afterwards.
        return await self._workers.run(partial(orderer.order, parsed), length, abandoned=methodcaller("end"))

    def _request(self, head: Head, sent: SentRequest, received: bytes) -> ReplicaRequest:
        body = sent.take_body(received)
        headers = end_to_end(head.headers, b"host", b"expect", *self._dropped)
        headers = sent.request_headers(with_length(headers, body) if body else headers)
        return ReplicaRequest(head.method, head.target, headers, body)


class BestIngress:
    """Ingress with a mirror of each replica's cache: run one process of it."""

    def __init__(
        self, replicas: DeploymentHandle, make_orderer: Callable[[], OrdererLike], options: Mapping[str, Any]
    ) -> None:
        self._app = _make_app(replicas, make_orderer, **options)

    async def __call__(self, request: Request) -> Response:
        return AppResponse(self._app)


def _make_app(
    replicas: DeploymentHandle,
    make_orderer: Callable[[], OrdererLike],
    *,
    builder: PromptBuilder | None = None,
    tokenizer: Any = None,
    template: DocumentTemplate | None = None,
    number_by_place: bool = False,
    send_facts: bool = False,
    hosts: Collection[str] | None = None,
    api_key: str | None = None,
    body_limit: int = BODY_LIMIT,
    bodies_limit: int = BODIES_LIMIT,
    timeouts: Timeouts = Timeouts(),  # noqa: B008
) -> ASGIApp:
    builder = builder or PromptBuilder("", tokenizer=tokenizer)
    tokens = TokenCounter(builder, tokenizer)
    facts: dict[str, Any] = {"send_facts": send_facts}
    proxy = BestReplicaProxy(
        replicas,
        ReplicaMirrors(lambda: RequestOrderer(make_orderer(), exact=tokens.exact, **facts)),
        BodyParser(
            builder,
            tokens,
            template,
            warn=make_orderer().degrade,
            number_by_place=number_by_place,
            heeds_client_marks=False,
            **facts,
        ),
        read_s=timeouts.read_s,
        dropped=[] if api_key is None else [b"authorization"],
        body_limit=body_limit,
        memory=MemoryBudget(bodies_limit),
        workers=Workers(always=tokens.exact),
        client_s=timeouts.client_s,
    )
    app: ASGIApp = Router([Route("/ragorder/health", health)], redirect_slashes=False, default=proxy)
    if api_key is not None:
        app = APIKeyMiddleware(app, api_key, open_paths=PROBES)
    elif hosts is not None:
        app = HostMiddleware(app, hosts, open_paths=PROBES)
    return ErrorMiddleware(app, error_content)
