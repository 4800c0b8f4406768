"""Synchronous and asynchronous clients for applications."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ragorder import Document
from ragorder.adapters.openai.batch import BatchBacklog, BatchOutcome, BatchRequest, answer_many, answer_many_async
from ragorder.adapters.openai.call import AsyncOrderedStream, Call, CallSetup, OrderedStream, generate, generate_async
from ragorder.adapters.openai.conversation import Conversation
from ragorder.adapters.openai.endpoint import check_client
from ragorder.adapters.openai.reply import Answer
from ragorder.conversation import REFERENCE, Message, Repeat

A = TypeVar("A")
S = TypeVar("S")
M = TypeVar("M")


class _BaseClient(CallSetup, Generic[A, S, M]):
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
        **options: Any,
    ) -> A:
        """Return the `Answer` to a question on documents in retrieval order.

        `scope` and `waiting` as for `Orderer.order`, `options` as for create() (`max_tokens` 256, `temperature` 0).
        Raises the openai client's errors, TypeError or ValueError for options that this client sets and a scope that
        cannot be a salt.
        """
        return self._generate(Call(self, query, documents, scope, waiting, options, hands_out=False))

    def stream(
        self,
        query: str,
        documents: Sequence[Document],
        *,
        scope: Hashable = None,
        waiting: Sequence[Iterable[Document]] = (),
        **options: Any,
    ) -> S:
        """Stream the answer, with the options of `generate`. Not retried after its first piece."""
        return self._stream(Call(self, query, documents, scope, waiting, options, hands_out=True))

    def conversation(
        self,
        messages: Iterable[Message] = (),
        *,
        scope: Hashable = None,
        repeat: Repeat = "name",
        reference: str = REFERENCE,
        rebase: Iterable[Document] | None = None,
    ) -> Conversation[A, S]:
        """Continue a conversation from its earlier `messages`. `repeat`, `reference` and `rebase` as for
        `PromptBuilder.turn`. Raises TypeError or ValueError for invalid messages, and prompts="token_ids"."""
        if self.prompts != "messages":
            raise ValueError(f"a conversation needs messages: give {type(self).__name__}(prompts='messages')")
        return Conversation(self, self._generate, self._stream, messages, scope, repeat, reference, rebase)

    def generate_many(
        self,
        requests: Iterable[BatchRequest],
        *,
        concurrency: int = 8,
        window: int = 32,
        on_error: Literal["return", "raise"] = "return",
        **options: Any,
    ) -> M:
        """Yield (index, `Answer`) for each (query, documents) or (query, documents, scope), in order of completion.

        Those with the largest cached share are sent first, from the first `next` on; at most `window` later ones
        overtake one. A failed request yields its exception, or raises it (`on_error`). Closing the iterator ends
        requests in flight. Raises TypeError or ValueError.
        """
        return self._answer_many(BatchBacklog(self, requests, options, concurrency, window, on_error))


class OrderedClient(_BaseClient[Answer, OrderedStream, Generator[BatchOutcome, None, None]]):
    """Sends questions and their ordered documents to an OpenAI-compatible server. Thread-safe.

        rag = OrderedClient(openai.OpenAI(base_url=url), model="…", orderer=orderer, builder=builder)
        rag.generate("Which drawer?", documents).text

    - `prompts`: "messages" for chat completions; "token_ids" for completions (with the served model's tokenizer).
    - `retries` after a stream broke before the caller saw any of it, each after `sleep(seconds)`.
    - `send_salt`: send a string scope as vLLM's `cache_salt` (at most 128 characters, without @, /, \\ and NUL).
    - `send_facts`: send document ends and a digest of the scope to a vLLM with ragorder tiers (docs/tiers.md).
    - `topic_header`: send the documents' topic in this header, for a router among replicas (docs/replicas.md).

    Servers should report cached tokens (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report). `stream`
    sends its request at once. Raises ImportError without openai, TypeError for an asynchronous client, ValueError.
    """

    _foreign = ("AsyncOpenAI", "AsyncOrderedClient")
    _generate = staticmethod(generate)
    _stream = OrderedStream
    _answer_many = staticmethod(answer_many)


class AsyncOrderedClient(
    _BaseClient[Coroutine[Any, Any, Answer], AsyncOrderedStream, AsyncGenerator[BatchOutcome, None]]
):
    """`OrderedClient` for an `openai.AsyncOpenAI`.

        rag = AsyncOrderedClient(openai.AsyncOpenAI(base_url=url), model="…", orderer=orderer, builder=builder)
        async with rag.stream("Which drawer?", documents) as stream:
            async for text in stream: ...

    `stream` sends its request on `async with` or at its first piece; `sleep` is awaited.
    """

    _foreign = ("OpenAI", "OrderedClient")
    _generate = staticmethod(generate_async)
    _stream = AsyncOrderedStream
    _answer_many = staticmethod(answer_many_async)
