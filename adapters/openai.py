"""Clients for OpenAI-compatible servers (vLLM, SGLang): order the documents, send the prompt, report back."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar, cast

from ragorder import Document, Orderer, Ordering, Prompt, PromptBuilder

__all__ = ["Answer", "AsyncOrderedClient", "AsyncOrderedStream", "OrderedClient", "OrderedStream"]

_OWNED = ("messages", "model", "prompt", "stream", "stream_options")
_OPTIONAL = ("max_tokens", "max_completion_tokens", "temperature", "extra_body")
_OUTPUT = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
_UNKNOWN_OPTION = re.compile(r"stream_options|include_usage|\bextra|unknown field|unrecogni[sz]ed", re.IGNORECASE)
_TRANSIENT = ("408", "409", "429")
_FIRST_DELAY_S = 0.1

A = TypeVar("A")
S = TypeVar("S")

_logger = logging.getLogger("ragorder")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered.

    `cached_tokens` of the `prompt_tokens` were reused from the prefix cache. Token counts are None where the server
    does not report them, or reports what cannot be. `ttft_s` are the seconds from sending the request to its first
    token, repeats by the openai client included (None: there was no token).
    """

    text: str
    cached_tokens: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    ordering: Ordering[Document]
    finish_reason: str | None

    @property
    def total_tokens(self) -> int | None:
        """The tokens of prompt and answer together."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens


class _Reply:
    """What the chunks of one response say, in any server's dialect. Whatever they hold, reading them raises nothing."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.ttft_s: float | None = None
        self.sent_s = 0.0
        self._usage: Any = None

    def read(self, chunk: Any) -> str:
        """The text of a chunk ("" for none)."""
        usage, choices = _get(chunk, "usage"), _get(chunk, "choices")
        if usage is not None:
            self._usage = usage
        choice = choices[0] if isinstance(choices, list) and choices else None
        delta, finish_reason = _get(choice, "delta"), _get(choice, "finish_reason")
        text = _get(choice, "text") if delta is None else _get(delta, "content")
        if finish_reason:
            self.finish_reason = str(finish_reason)
        # A chat opens with a chunk that names the role: some servers send it before they have computed anything.
        is_token = isinstance(text, str) if delta is None else any(_get(delta, name) for name in _OUTPUT)
        if self.ttft_s is None and (is_token or finish_reason):
            self.ttft_s = time.perf_counter() - self.sent_s
        if not isinstance(text, str) or not text:
            return ""
        self.pieces.append(text)
        return text

    def answer(self, ordering: Ordering[Document]) -> Answer:
        """The answer, once the response has ended."""
        usage = self._usage
        prompt_tokens = _count(_get(usage, "prompt_tokens"))
        cached_tokens = _count(_get(_get(usage, "prompt_tokens_details"), "cached_tokens"))
        if cached_tokens is not None and (prompt_tokens is None or cached_tokens > prompt_tokens):
            cached_tokens = None
        completion_tokens = _count(_get(usage, "completion_tokens"))
        text = "".join(self.pieces)
        return Answer(text, cached_tokens, prompt_tokens, completion_tokens, self.ttft_s, ordering, self.finish_reason)


class _Wire:
    """A response, with an eye on its last bytes: the openai client keeps to itself whether it saw [DONE]."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._tail = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    @property
    def done(self) -> bool:
        return self._tail.rstrip().endswith(b"[DONE]")

    def iter_bytes(self) -> Iterator[bytes]:
        for data in self._response.iter_bytes():
            self._tail = (self._tail + data)[-32:]
            yield data

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        async for data in self._response.aiter_bytes():
            self._tail = (self._tail + data)[-32:]
            yield data


class _Call:
    """The life of one question, without any waiting. Each `with` block is one attempt; leaving it settles the ordering
    and swallows an error after which there is to be another attempt, `delay_s` later. Done once there is an `answer`.
    """

    def __init__(
        self,
        client: _Client[Any, Any],
        query: str,
        documents: Sequence[Document],
        scope: Hashable,
        waiting: Sequence[Iterable[Document]],
        options: dict[str, Any],
        *,
        hands_out: bool,
    ) -> None:
        self.ordering: Ordering[Document] | None = None
        self.answer: Answer | None = None
        self.delay_s = 0.0
        self._client = client
        self._query = query
        self._documents = list(documents)
        self._order: dict[str, Any] = {"scope": scope, "waiting": waiting}
        self._options = _checked(options, scope, client.send_salt)
        self._hands_out = hands_out
        self._reports_usage = client.reports_usage
        self._retries = 0
        limit = self._options.get("max_completion_tokens", self._options.get("max_tokens"))
        if isinstance(limit, int) and limit >= 0:
            # The last token of an answer is never computed on: its keys and values are not cached.
            self._order["suffix_tokens"] = client.builder.suffix_tokens(query) + max(0, limit - 1)

    def __enter__(self) -> None:
        self.ordering = None
        self._reply = _Reply()
        self._opened = False
        self._wire: _Wire | None = None

    def request(self) -> dict[str, Any]:
        """What to call create() with, now: what is ordered first must be sent first."""
        client = self._client
        self.ordering = client.orderer.order(self._documents, **self._order)
        request = self._options | client.request(client.builder.build(self._query, self.ordering))
        if self._reports_usage:
            request["stream_options"] = {"include_usage": True}
        self._reply.sent_s = time.perf_counter()
        return request

    def opened(self, stream: Any) -> None:
        """The server accepted the request."""
        self._opened = True
        if not self._reports_usage:
            self._client.reports_usage = False
        with suppress(AttributeError):
            stream.response = self._wire = _Wire(stream.response)

    def read(self, chunk: Any) -> str:
        return self._reply.read(chunk)

    def ended(self) -> None:
        """The stream ended without an error. Raises openai.APIConnectionError if it was not at its end."""
        if self._reply.finish_reason is None and not (self._wire and self._wire.done):
            from openai import APIConnectionError

            request: Any = getattr(self._wire, "request", None)
            raise APIConnectionError(message="The stream ended before the answer was complete.", request=request)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        ordering, reply = self.ordering, self._reply
        if ordering is None:
            return False
        if error is None:
            self.answer = reply.answer(ordering)
            ordering.confirm(self.answer.cached_tokens, self.answer.total_tokens)
        elif reply.ttft_s is not None:
            # The prompt was computed, and stays in the cache, whatever became of the answer.
            ordering.confirm()
        else:
            ordering.discard()
        return isinstance(error, Exception) and self._tries_again(error)

    def _tries_again(self, error: Exception) -> bool:
        self.delay_s = 0.0
        if not self._opened:
            # The openai client has already repeated what is worth repeating.
            if not self._reports_usage or not _refuses_stream_options(error):
                return False
            self._reports_usage = False
            return True
        if self._retries >= self._client.retries or not _is_broken_stream(error):
            return False
        if self._hands_out and self._reply.pieces:
            return False
        self.delay_s = _FIRST_DELAY_S * 2**self._retries
        self._retries += 1
        _logger.warning("a stream broke with %s: asking again", type(error).__name__)
        return True


class _Stream:
    """What the two streams have in common."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    @property
    def ordering(self) -> Ordering[Document] | None:
        """The ordering of the request that was sent (None: not sent yet)."""
        return self._call.ordering

    @property
    def answer(self) -> Answer | None:
        """The whole answer, once the last piece was taken."""
        return self._call.answer


class OrderedStream(_Stream):
    """The pieces of an answer, as they arrive. Closing it early ends the request; it closes itself when dropped."""

    def __init__(self, call: _Call, pieces: Generator[str, None, None]) -> None:
        super().__init__(call)
        self._pieces = pieces
        next(pieces)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        for piece in self._pieces:
            if piece:
                return piece
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the HTTP stream and settle the ordering."""
        self._pieces.close()


class AsyncOrderedStream(_Stream):
    """`OrderedStream` for a coroutine. Use it by `async with`, or close it: once dropped, it closes itself late."""

    def __init__(self, call: _Call, pieces: AsyncGenerator[str, None]) -> None:
        super().__init__(call)
        self._pieces = pieces

    def __aiter__(self) -> Self:
        return self

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
        """Close the HTTP stream and settle the ordering."""
        await self._pieces.aclose()

    aclose = close


class _Client(ABC, Generic[A, S]):
    """What the two clients have in common: `generate` gives A, `stream` gives S."""

    _sleep: Callable[[float], Any]
    _foreign: tuple[str, str]

    def __init__(
        self,
        client: Any,
        *,
        model: str,
        orderer: Orderer,
        builder: PromptBuilder,
        prompts: Literal["messages", "token_ids"] = "messages",
        retries: int = 1,
        send_salt: bool = True,
        sleep: Callable[[float], Any] | None = None,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError(f"{type(self).__name__} needs openai: pip install 'ragorder[live]'") from error
        foreign, other = self._foreign
        if isinstance(client, getattr(openai, foreign)):
            raise TypeError(f"{type(self).__name__} cannot use a client of type {type(client).__name__}: use {other}")
        if prompts not in ("messages", "token_ids"):
            raise ValueError(f"prompts must be 'messages' or 'token_ids', got {prompts!r}")
        if prompts == "token_ids" and builder.build("", ()).token_ids is None:
            raise ValueError("prompts='token_ids' needs the served model's tokenizer: PromptBuilder(tokenizer=…)")
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        self.orderer = orderer
        self.builder = builder
        self.retries = retries
        self.send_salt = send_salt
        self.reports_usage = True
        self._model = model
        self._chats = prompts == "messages"
        self._endpoint = client.chat.completions if self._chats else client.completions
        if sleep is not None:
            self._sleep = sleep

    def generate(
        self,
        query: str,
        documents: Sequence[Document],
        *,
        scope: Hashable = None,
        waiting: Sequence[Iterable[Document]] = (),
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> A:
        """The `Answer` to a question on documents, given in retrieval order.

        `scope` and `waiting` are those of `Orderer.order`, all else goes to create(); None for `max_tokens` or
        `temperature` leaves it to the server. Raises what the openai client raises, as it is; TypeError or ValueError
        for an option that is not the caller's to set; ValueError for a `scope` that is empty, or that is not the
        `cache_salt` in `extra_body`.
        """
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._generate(_Call(self, query, documents, scope, waiting, options, hands_out=False))

    def stream(
        self,
        query: str,
        documents: Sequence[Document],
        *,
        scope: Hashable = None,
        waiting: Sequence[Iterable[Document]] = (),
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> S:
        """The answer as it arrives. Takes and raises what `generate` does, but what breaks after its first piece is
        not asked again."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._stream(_Call(self, query, documents, scope, waiting, options, hands_out=True))

    def request(self, prompt: Prompt) -> dict[str, Any]:
        """The options of create() that are ours."""
        sent = {"messages": prompt.messages} if self._chats else {"prompt": prompt.token_ids}
        return {"model": self._model, "stream": True, **sent}

    @abstractmethod
    def _generate(self, call: _Call) -> A: ...

    @abstractmethod
    def _stream(self, call: _Call) -> S: ...


class OrderedClient(_Client[Answer, OrderedStream]):
    """Asks an OpenAI-compatible server questions on documents, ordered for its prefix cache. Thread-safe.

    - `client` is an `openai.OpenAI`, or anything with the same `create`. It repeats requests that get no response.
    - `prompts`: "messages" go through chat completions and the server's chat template; "token_ids" go through
      completions, exactly as `builder` made them (which needs the served model's tokenizer).
    - `retries`: how often a question is asked again whose stream broke before the caller saw any of it. `sleep` waits
      before that, for so many seconds.
    - `send_salt`: a scope that is a string is sent as vLLM's `cache_salt`; False for servers that do not know it.

    Every ordering is settled: with the cached tokens that the server reports (vLLM: --enable-prompt-tokens-details,
    SGLang: --enable-cache-report) after success; without a number if the stream broke or was closed after its first
    token; as discarded if it never had one. `stream` sends its request at once.

    Raises ImportError without the openai package, TypeError for an asynchronous client, ValueError for `prompts` or
    `retries` that cannot be.
    """

    _sleep = staticmethod(time.sleep)
    _foreign = ("AsyncOpenAI", "AsyncOrderedClient")

    def _generate(self, call: _Call) -> Answer:
        for _ in self._pieces(call):
            pass
        return cast(Answer, call.answer)

    def _stream(self, call: _Call) -> OrderedStream:
        return OrderedStream(call, self._pieces(call))

    def _pieces(self, call: _Call) -> Generator[str, None, None]:
        """The pieces of the answer, and empty ones: the first of them when the server has accepted the request."""
        while call.answer is None:
            if call.delay_s:
                self._sleep(call.delay_s)
            with call:
                with self._endpoint.create(**call.request()) as stream:
                    call.opened(stream)
                    yield ""
                    for chunk in stream:
                        yield call.read(chunk)
                call.ended()


class AsyncOrderedClient(_Client[Coroutine[Any, Any, Answer], AsyncOrderedStream]):
    """`OrderedClient` for an `openai.AsyncOpenAI`. `generate` and `sleep` are awaited; `stream` sends its request when
    it is entered by `async with`, or asked for its first piece."""

    _sleep = staticmethod(asyncio.sleep)
    _foreign = ("OpenAI", "OrderedClient")

    async def _generate(self, call: _Call) -> Answer:
        async for _ in self._pieces(call):
            pass
        return cast(Answer, call.answer)

    def _stream(self, call: _Call) -> AsyncOrderedStream:
        return AsyncOrderedStream(call, self._pieces(call))

    async def _pieces(self, call: _Call) -> AsyncGenerator[str, None]:
        while call.answer is None:
            if call.delay_s:
                await self._sleep(call.delay_s)
            with call:
                # No await between ordering and sending: what is ordered first must be sent first.
                async with await self._endpoint.create(**call.request()) as stream:
                    call.opened(stream)
                    yield ""
                    async for chunk in stream:
                        yield call.read(chunk)
                call.ended()


def _checked(options: dict[str, Any], scope: Hashable, send_salt: bool) -> dict[str, Any]:
    """The caller's options as they are sent, with the scope's salt. Names options in errors, never what is in them."""
    body = dict(options.get("extra_body") or {})
    for name in _OWNED:
        if name in options or name in body:
            raise TypeError(f"{name} is not an option of a request: the client sets it")
    if any(given.get("n") not in (None, 1) for given in (options, body)):
        raise ValueError("n must be 1: an ordered request has one answer")
    if scope == "":
        raise ValueError("scope must not be an empty string, vLLM refuses an empty cache_salt: give None for no tenant")
    if send_salt:
        salt = body.get("cache_salt")
        if salt is not None and salt != scope and (scope is None or isinstance(scope, str)):
            raise ValueError("extra_body has a cache_salt that is not the scope: give it as scope, and only there")
        if isinstance(scope, str):
            body["cache_salt"] = scope
    sent = {name: value for name, value in options.items() if name not in _OPTIONAL or value is not None}
    if "max_completion_tokens" in sent:
        sent.pop("max_tokens", None)
    if body:
        sent["extra_body"] = body
    return sent


def _refuses_stream_options(error: Exception) -> bool:
    from openai import APIStatusError

    if not isinstance(error, APIStatusError) or error.status_code not in (400, 422):
        return False
    return bool(_UNKNOWN_OPTION.search(f"{error} {error.body} {error.param}"))


def _is_broken_stream(error: Exception) -> bool:
    """Whether a stream that failed with this error may well succeed when asked for again."""
    from openai import APIError

    if isinstance(error, APIError):
        code = str(error.code)
        return len(code) != 3 or code[0] != "4" or code in _TRANSIENT
    # The openai client passes on what its HTTP library raises in the middle of a stream (httpx2 from openai 3 on).
    modules = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return any(isinstance(error, getattr(module, "TransportError", ())) for module in modules)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
