"""One question to a server: its attempts, orderings and streams."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self, cast

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.openai.endpoint import ModelEndpoint, UsageOption, checked_options
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest
from ragorder.adapters.openai.reply import Answer, Reply
from ragorder.common.lock import run_or_defer
from ragorder.protocols import OrdererLike
from ragorder.topic import checked_header

_TRANSIENT = ("408", "409", "429")
_FIRST_DELAY_S = 0.1
_UNREPORTED = 8
_USUAL = {"max_tokens": 256, "temperature": 0.0}
_logger = logging.getLogger("ragorder")


@dataclass(eq=False, repr=False)
class CallSetup:
    client: Any
    _: KW_ONLY
    model: str
    orderer: OrdererLike
    builder: PromptBuilder
    prompts: PromptForm = "messages"
    retries: int = 1
    send_salt: bool = True
    send_facts: bool = False
    topic_header: str | None = None
    sleep: Callable[[float], Any] | None = None

    def __post_init__(self) -> None:
        self.ordered = OrderedPrompts(self.orderer, self.builder, self.prompts)
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}: give 0 or more")
        if self.topic_header is not None:
            checked_header(self.topic_header)
        self.endpoint = ModelEndpoint(self.client, self.model, send_facts=self.send_facts)
        self._unreported = 0

    def learn(self, answer: Answer) -> None:
        """Degrade the orderer if the server never reports cached tokens."""
        self.ordered.answer_length.learn(answer.completion_tokens)
        # Servers omit a zero: a missing count is informative only if cached tokens were predicted.
        if answer.cached_tokens is not None:
            self._unreported = -sys.maxsize
        elif answer.prompt_tokens is not None and answer.ordering.cached_tokens:
            self._unreported += 1
            if self._unreported >= _UNREPORTED:
                self.orderer.degrade(
                    "answers report no cached tokens, so predictions cannot be corrected: start vLLM with "
                    "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
                )


@dataclass(eq=False, repr=False)
class Call:
    """One question, without I/O: a driver makes attempts, each after `delay_s`, until there is an `answer`."""

    setup: CallSetup
    query: str
    documents: Sequence[Document]
    scope: Hashable
    waiting: Sequence[Iterable[Document]]
    options: dict[str, Any]
    # Pieces reach the caller at once: no attempt follows the first.
    hands_out: bool

    def __post_init__(self) -> None:
        self.documents = list(self.documents)
        self.options = checked_options(_USUAL | self.options, self.scope, self.setup.send_salt)
        if self.setup.topic_header is not None:
            self._add_topic(self.setup.topic_header)
        self.ordering: Ordering[Document] | None = None
        self.answer: Answer | None = None
        self.delay_s = 0.0
        self._retries = 0
        self._usage_option = UsageOption(self.setup.endpoint)

    @contextmanager
    def attempt(self) -> Iterator[Reply]:
        """Order the documents, and finish the ordering at the block's end. Swallows an error that is retried."""
        ordering = self.ordering = self._order()
        reply = Reply(ordering)
        try:
            yield reply
            answer = reply.answer()
        except BaseException as error:
            if reply.ttft_s is None:
                ordering.discard()
            else:
                # The prompt was computed and stays cached.
                ordering.confirm()
            if not isinstance(error, Exception) or not self._tries_again(error, reply):
                raise
        else:
            self.answer = answer
            self._usage_option.accepted()
            self.setup.learn(answer)
            counts: dict[str, Any] = {"prompt_tokens": answer.prompt_tokens}
            if ordering.cloud is not None:
                counts["written_tokens"] = answer.written_tokens
            try:
                self._answered(answer)
            finally:
                ordering.confirm(answer.cached_tokens, answer.total_tokens, **counts)

    def create(self, reply: Reply) -> Any:
        """Must follow the ordering at once: requests are sent in the order of their orderings."""
        request = self._request(reply.ordering)
        reply.sent_s = time.perf_counter()
        return self.setup.endpoint.create(request, self.options, self._usage_option)

    def _order(self) -> Ordering[Document]:
        return self.setup.ordered.order(self.query, self.documents, self.scope, self.options, self.waiting)

    def _request(self, ordering: Ordering[Document]) -> PromptRequest:
        return self.setup.ordered.request(self.query, ordering, self.scope, self.options)

    def _answered(self, answer: Answer) -> None:
        """Called before the ordering is confirmed."""

    def _topic(self) -> str | None:
        return self.setup.orderer.topic(self.documents, scope=self.scope)

    def _add_topic(self, header: str) -> None:
        """Add the topic that all attempts share: documents count once."""
        topic = self._topic()
        own = dict(self.options.get("extra_headers", ()))
        if topic is not None and header.lower() not in map(str.lower, own):
            self.options["extra_headers"] = own | {header: topic}

    def _tries_again(self, error: Exception, reply: Reply) -> bool:
        self.delay_s = 0.0
        if not reply.accepted:
            # The openai client has already repeated the request if that was useful.
            return self._usage_option.drop(error)
        if self._retries >= self.setup.retries or (self.hands_out and reply.pieces) or not _is_broken_stream(error):
            return False
        self.delay_s = _FIRST_DELAY_S * 2**self._retries
        self._retries += 1
        _logger.warning("a stream broke with %s: sending the request again", type(error).__name__)
        return True


def _is_broken_stream(error: Exception) -> bool:
    from openai import APIError

    if isinstance(error, APIError):
        code = str(error.code)
        return code in _TRANSIENT or not re.fullmatch("4..", code)
    # The openai client passes on errors of its HTTP library in the middle of a stream (httpx2 from openai 3 on).
    libraries = map(sys.modules.get, ("httpx", "httpx2"))
    return any(isinstance(error, getattr(library, "TransportError", ())) for library in libraries)


@contextmanager
def _opened(stream: Any) -> Iterator[Any]:
    # Closing takes the lock of a connection pool, which a thread interrupted by the garbage collector may hold: a
    # dropped stream is closed after the collection.
    with ExitStack() as stack:
        opened = stack.enter_context(stream)
        try:
            yield opened
        finally:
            run_or_defer(stack.pop_all().close)


def _pieces(call: Call) -> Generator[str, None, None]:
    """Yield pieces, some empty, the first when the server has accepted the request."""
    while call.answer is None:
        if call.delay_s:
            (call.setup.sleep or time.sleep)(call.delay_s)
        with call.attempt() as reply, _opened(call.create(reply)) as stream:
            reply.watch(stream)
            yield ""
            for chunk in stream:
                yield reply.read(chunk)


async def _async_pieces(call: Call) -> AsyncGenerator[str, None]:
    while call.answer is None:
        if call.delay_s:
            await (call.setup.sleep or asyncio.sleep)(call.delay_s)
        with call.attempt() as reply:
            async with await call.create(reply) as stream:
                reply.watch(stream)
                yield ""
                async for chunk in stream:
                    yield reply.read(chunk)


def generate(call: Call) -> Answer:
    for _ in _pieces(call):
        pass
    return cast(Answer, call.answer)


async def generate_async(call: Call) -> Answer:
    async for _ in _async_pieces(call):
        pass
    return cast(Answer, call.answer)


class _BaseStream:
    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def ordering(self) -> Ordering[Document] | None:
        """None before the request is sent."""
        return self._call.ordering

    @property
    def answer(self) -> Answer | None:
        """None before the last piece."""
        return self._call.answer


class OrderedStream(_BaseStream, Iterator[str]):
    """An answer's pieces. Closing the stream, or dropping it, ends the request."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._pieces = _pieces(call)
        next(self._pieces)

    def __next__(self) -> str:
        return next(filter(None, self._pieces))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pieces.close()


class AsyncOrderedStream(_BaseStream, AsyncIterator[str]):
    """`OrderedStream` for coroutines. Use `async with`, or close it: a dropped stream ends late."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._pieces = _async_pieces(call)

    async def __anext__(self) -> str:
        async for piece in self._pieces:
            if piece:
                return piece
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        if self.ordering is None:
            await anext(self._pieces, "")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pieces.aclose()
