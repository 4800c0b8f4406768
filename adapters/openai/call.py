"""One question to a server: its attempts, how each is finished with the orderer, and whether there is another."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.openai.reply import Answer, Reply
from ragorder.adapters.openai.request import checked_options
from ragorder.adapters.request_facts import with_facts
from ragorder.adapters.usage import AnswerLength
from ragorder.orderer import OrdererLike

__all__ = ["Call", "Setup", "refuses_stream_options"]

_UNKNOWN_OPTION = re.compile(r"stream_options|include_usage|\bextra|unknown field|unrecogni[sz]ed", re.IGNORECASE)
_TRANSIENT = ("408", "409", "429")
_FIRST_DELAY_S = 0.1
_UNREPORTED = 8

_logger = logging.getLogger("ragorder")


@dataclass(eq=False, repr=False)
class Setup:
    """What the calls of a client share. Raises ValueError for `prompts` or `retries` that cannot be."""

    client: Any
    _: KW_ONLY
    model: str
    orderer: OrdererLike
    builder: PromptBuilder
    prompts: Literal["messages", "token_ids"] = "messages"
    retries: int = 1
    send_salt: bool = True
    send_facts: bool = False
    sleep: Callable[[float], Any] | None = None

    def __post_init__(self) -> None:
        if self.prompts not in ("messages", "token_ids"):
            raise ValueError(f"prompts must be 'messages' or 'token_ids', got {self.prompts!r}")
        if self.prompts == "token_ids" and self.builder.build("", ()).token_ids is None:
            raise ValueError("prompts='token_ids' needs the served model's tokenizer: PromptBuilder(tokenizer=…)")
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, got {self.retries}")
        self.reports_usage = True
        self.answer_length = AnswerLength()
        self._unreported = 0

    def learn(self, answer: Answer) -> None:
        """What an answer tells of those to come, and whether the server reports cached tokens at all."""
        self.answer_length.learn(answer.completion_tokens)
        # Servers leave a zero out: only where something was expected its absence means anything.
        if answer.cached_tokens is not None:
            self._unreported = -sys.maxsize
        elif answer.prompt_tokens is not None and answer.ordering.cached_tokens:
            self._unreported += 1
            if self._unreported >= _UNREPORTED:
                self.orderer.degrade(
                    "answers report no cached tokens, which would correct what the cache is expected to hold: start "
                    "vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
                )


@dataclass(eq=False, repr=False)
class Call:
    """One question, without any waiting. Done once there is an `answer`; until then, there is to be another attempt,
    `delay_s` later. Whoever `hands_out` the pieces cannot take them back: no attempt follows the first of them."""

    setup: Setup
    query: str
    documents: Sequence[Document]
    scope: Hashable
    waiting: Sequence[Iterable[Document]]
    options: dict[str, Any]
    hands_out: bool

    def __post_init__(self) -> None:
        self.documents = list(self.documents)
        self.options = checked_options(self.options, self.scope, self.setup.send_salt)
        self.ordering: Ordering[Document] | None = None
        self.answer: Answer | None = None
        self.delay_s = 0.0
        self._retries = 0
        self._reports_usage = self.setup.reports_usage
        limit = self.options.get("max_completion_tokens", self.options.get("max_tokens"))
        self._limit = limit if isinstance(limit, int) and limit >= 0 else sys.maxsize

    @contextmanager
    def attempt(self) -> Iterator[Reply]:
        """Order the documents, and finish the ordering however the block ends. An error after which there is to be
        another attempt is swallowed."""
        ordering = self.ordering = self._order()
        reply = Reply(ordering)
        try:
            yield reply
            answer = reply.answer()
        except BaseException as error:
            if reply.ttft_s is None:
                ordering.discard()
            else:
                # The prompt was computed, and stays in the cache, whatever became of the answer.
                ordering.confirm()
            if not isinstance(error, Exception) or not self._tries_again(error, reply):
                raise
        else:
            self.answer = answer
            self.setup.reports_usage &= self._reports_usage
            self.setup.learn(answer)
            ordering.confirm(answer.cached_tokens, answer.total_tokens, prompt_tokens=answer.prompt_tokens)

    def create(self, reply: Reply) -> Any:
        """What create() returns for an attempt. To be called at once: what is ordered first must be sent first."""
        setup = self.setup
        prompt = setup.builder.build(self.query, reply.ordering)
        options = self.options | {"model": setup.model, "stream": True}
        if setup.send_facts:
            ends = [span.end for span in prompt.spans]
            options["extra_body"] = with_facts(options["extra_body"], ends, self.scope)
        if self._reports_usage:
            options["stream_options"] = {"include_usage": True}
        reply.sent_s = time.perf_counter()
        if setup.prompts == "messages":
            return setup.client.chat.completions.create(messages=prompt.messages, **options)
        return setup.client.completions.create(prompt=prompt.token_ids, **options)

    def _order(self) -> Ordering[Document]:
        orderer, question_tokens = self.setup.orderer, self.setup.builder.suffix_tokens(self.query)
        default = orderer.settings.suffix_tokens
        suffix_tokens = self.setup.answer_length.suffix_tokens(question_tokens, self._limit, default)
        return orderer.order(self.documents, scope=self.scope, waiting=self.waiting, suffix_tokens=suffix_tokens)

    def _tries_again(self, error: Exception, reply: Reply) -> bool:
        self.delay_s = 0.0
        if not reply.accepted:
            # The openai client has already repeated what is worth repeating.
            asked_too_much = self._reports_usage and refuses_stream_options(error)
            self._reports_usage = self._reports_usage and not asked_too_much
            return asked_too_much
        if self._retries >= self.setup.retries or (self.hands_out and reply.pieces) or not _is_broken_stream(error):
            return False
        self.delay_s = _FIRST_DELAY_S * 2**self._retries
        self._retries += 1
        _logger.warning("a stream broke with %s: asking again", type(error).__name__)
        return True


def refuses_stream_options(error: Exception) -> bool:
    from openai import APIStatusError

    if not isinstance(error, APIStatusError) or error.status_code not in (400, 422):
        return False
    return bool(_UNKNOWN_OPTION.search(f"{error} {error.body} {error.param}"))


def _is_broken_stream(error: Exception) -> bool:
    """Whether a stream that failed with this error may well succeed when asked for again."""
    from openai import APIError

    if isinstance(error, APIError):
        code = str(error.code)
        return code in _TRANSIENT or not re.fullmatch("4..", code)
    # The openai client passes on what its HTTP library raises in the middle of a stream (httpx2 from openai 3 on).
    libraries = map(sys.modules.get, ("httpx", "httpx2"))
    return any(isinstance(error, getattr(library, "TransportError", ())) for library in libraries)
