"""The clients for applications: synchronous and asynchronous."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ragorder import Document
from ragorder.adapters.openai.batch import BatchBacklog, BatchOutcome, BatchRequest, answer_many, answer_many_async
from ragorder.adapters.openai.call import Call, CallSetup
from ragorder.adapters.openai.endpoint import check_client
from ragorder.adapters.openai.reply import Answer
from ragorder.adapters.openai.stream import AsyncOrderedStream, OrderedStream, generate, generate_async

__all__ = ["AsyncOrderedClient", "OrderedClient"]

A = TypeVar("A")
S = TypeVar("S")
M = TypeVar("M")


class _BaseClient(CallSetup, Generic[A, S, M]):
    """`generate` returns A, `stream` S, `generate_many` M."""

    _foreign: ClassVar[tuple[str, str]]
    _generate: Callable[[Call], A]
    _stream: Callable[[Call], S]
    _answer_many: Callable[[BatchBacklog], M]

    def __post_init__(self) -> None:
        check_client(self.client, type(self).__name__, *self._foreign)
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

        `scope` and `waiting` are those of `Orderer.order`, all other options those of create(); None leaves an option
        to the server. Raises the openai client's errors; TypeError or ValueError for an option that the client sets
        itself, ValueError for a `scope` that cannot be sent as a salt or differs from `cache_salt` in `extra_body`.
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
        """The answer as it arrives, as by `generate`; a stream that breaks after its first piece is not retried."""
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        return self._stream(Call(self, query, documents, scope, waiting, options, hands_out=True))

    def generate_many(
        self,
        requests: Iterable[BatchRequest],
        *,
        concurrency: int = 8,
        window: int = 32,
        on_error: Literal["return", "raise"] = "return",
        max_tokens: int | None = 256,
        temperature: float | None = 0.0,
        **options: Any,
    ) -> M:
        """(index, `Answer`) for each request (query, documents) or (query, documents, scope), in order of completion.

        At most `concurrency` requests are in flight. Waiting requests with the largest cached share go first, but none
        is overtaken by more than `window` later ones; each is ordered for those that will probably follow. A failed
        request has its exception instead of an answer, or ends the batch (`on_error`). Nothing is sent before the first
        outcome is requested; closing the iterator early ends all requests in flight.

        Options as for `generate`. Raises TypeError or ValueError for invalid options or requests.
        """
        options |= {"max_tokens": max_tokens, "temperature": temperature}
        limits: dict[str, Any] = {"concurrency": concurrency, "window": window, "on_error": on_error}
        return self._answer_many(BatchBacklog(self, requests, options, **limits))


class OrderedClient(_BaseClient[Answer, OrderedStream, Generator[BatchOutcome, None, None]]):
    """Sends questions and their ordered documents to an OpenAI-compatible server. Thread-safe.

    rag = OrderedClient(openai.OpenAI(base_url=url), model="…", orderer=orderer, builder=builder)
    rag.generate("Who was it?", documents).text

    - `client`: an `openai.OpenAI`, or anything with the same `create`. It retries requests that get no response.
    - `prompts`: "messages" for chat completions and the server's chat template; "token_ids" for completions, exactly as
      `builder` made them (with the served model's tokenizer).
    - `retries`: further attempts after a stream broke before the caller saw any of it; `sleep(seconds)` before each.
    - `send_salt`: send a scope that is a string as vLLM's `cache_salt` (at most 128 characters, without @, /, \\ and
      NUL). False for servers without that field.
    - `send_facts`: send where the documents end (if `builder` has a tokenizer) and a digest of the scope as
      `kv_transfer_params`: for a vLLM with ragorder tiers (docs/tiers.md). Other servers may refuse them.

    Every ordering is finished: on success with the reported cached tokens (vLLM: --enable-prompt-tokens-details,
    SGLang: --enable-cache-report), without a number if the stream ended early after its first token, as discarded
    before. `stream` sends its request at once.

    Raises ImportError without the openai package, TypeError for an asynchronous client, ValueError for invalid
    `prompts` or `retries`.
    """

    _foreign = ("AsyncOpenAI", "AsyncOrderedClient")
    _generate = staticmethod(generate)
    _stream = OrderedStream
    _answer_many = staticmethod(answer_many)


class AsyncOrderedClient(
    _BaseClient[Coroutine[Any, Any, Answer], AsyncOrderedStream, AsyncGenerator[BatchOutcome, None]]
):
    """`OrderedClient` for an `openai.AsyncOpenAI`. `generate` and `sleep` are awaited; `stream` sends its request on
    `async with` or at its first piece; `generate_many` is for `async for`."""

    _foreign = ("OpenAI", "OrderedClient")
    _generate = staticmethod(generate_async)
    _stream = AsyncOrderedStream
    _answer_many = staticmethod(answer_many_async)
