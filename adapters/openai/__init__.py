"""Clients for OpenAI-compatible servers (vLLM, SGLang): order the documents, send the prompt, report back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ragorder import Document
from ragorder.adapters.openai.batch import Backlog, Outcome, Question, answer_many, answer_many_async
from ragorder.adapters.openai.call import Call, Setup
from ragorder.adapters.openai.reply import Answer
from ragorder.adapters.openai.stream import AsyncOrderedStream, OrderedStream, generate, generate_async

__all__ = ["Answer", "AsyncOrderedClient", "AsyncOrderedStream", "OrderedClient", "OrderedStream"]

A = TypeVar("A")
S = TypeVar("S")
M = TypeVar("M")


class _Client(Setup, Generic[A, S, M]):
    """What the two clients have in common: `generate` gives A, `stream` gives S, `generate_many` gives M."""

    _foreign: ClassVar[tuple[str, str]]
    _generate: Callable[[Call], A]
    _stream: Callable[[Call], S]
    _answer_many: Callable[[Backlog], M]

    def __post_init__(self) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError(f"{type(self).__name__} needs openai: pip install 'ragorder[live]'") from error
        foreign, other = self._foreign
        if isinstance(self.client, getattr(openai, foreign)):
            given = type(self.client).__name__
            raise TypeError(f"{type(self).__name__} cannot use a client of type {given}: use {other}")
        super().__post_init__()

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

        `scope` and `waiting` are those of `Orderer.order`, all else goes to create(); None leaves an option to the
        server. Raises what the openai client raises, as it is; TypeError or ValueError for an option that is not the
        caller's to set; ValueError for a `scope` that cannot be sent as a salt, or is not the `cache_salt` in
        `extra_body`.
        """
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._generate(Call(self, query, documents, scope, waiting, options, hands_out=False))

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
        return self._stream(Call(self, query, documents, scope, waiting, options, hands_out=True))

    def generate_many(
        self,
        requests: Iterable[Question],
        *,
        concurrency: int = 8,
        window: int = 32,
        on_error: Literal["return", "raise"] = "return",
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> M:
        """(index, `Answer`) for each of the requests (query, documents) or (query, documents, scope), as they come.

        At most `concurrency` are in flight. The others wait: those go first of which the cache has most, but none is
        overtaken by more than `window` that came later, and each is laid out for those that will probably follow it. A
        request that failed has its exception instead of an answer, or ends everything (`on_error`). Nothing is sent
        before the first outcome is asked for; closing the iterator early ends what is in flight.

        Options are as for `generate`. Raises TypeError or ValueError for options or requests that cannot be.
        """
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        limits: dict[str, Any] = {"concurrency": concurrency, "window": window, "on_error": on_error}
        return self._answer_many(Backlog(self, requests, options, **limits))


class OrderedClient(_Client[Answer, OrderedStream, Generator[Outcome, None, None]]):
    """Asks an OpenAI-compatible server questions on documents, ordered for its prefix cache. Thread-safe.

    - `client` is an `openai.OpenAI`, or anything with the same `create`. It repeats requests that get no response.
    - `prompts`: "messages" go through chat completions and the server's chat template; "token_ids" go through
      completions, exactly as `builder` made them (which needs the served model's tokenizer).
    - `retries`: how often a question is asked again whose stream broke before the caller saw any of it. `sleep` waits
      before that, for so many seconds.
    - `send_salt`: a scope that is a string is sent as vLLM's `cache_salt`, which has at most 128 characters, none of
      them @, /, \\ or NUL; False for servers that do not know it.
    - `send_facts`: switch it on for a vLLM with ragorder tiers (docs/tiers.md). Where the documents end in the prompt
      (if `builder` has a tokenizer) and a digest of the scope are sent as `kv_transfer_params`, which other servers may
      refuse.

    The cache gets room for an answer of the mean length that the server reported so far, `max_tokens` at most.

    Every ordering is finished: with the cached tokens that the server reports (vLLM: --enable-prompt-tokens-details,
    SGLang: --enable-cache-report) after success; without a number if the stream broke or was closed after its first
    token; as discarded if it never had one. `stream` sends its request at once.

    Raises ImportError without the openai package, TypeError for an asynchronous client, ValueError for `prompts` or
    `retries` that cannot be.
    """

    _foreign = ("AsyncOpenAI", "AsyncOrderedClient")
    _generate = staticmethod(generate)
    _stream = OrderedStream
    _answer_many = staticmethod(answer_many)


class AsyncOrderedClient(_Client[Coroutine[Any, Any, Answer], AsyncOrderedStream, AsyncGenerator[Outcome, None]]):
    """`OrderedClient` for an `openai.AsyncOpenAI`. `generate` and `sleep` are awaited; `stream` sends its request when
    it is entered by `async with`, or asked for its first piece; `generate_many` is for `async for`."""

    _foreign = ("OpenAI", "OrderedClient")
    _generate = staticmethod(generate_async)
    _stream = AsyncOrderedStream
    _answer_many = staticmethod(answer_many_async)
