"""One question to a server: its attempts, how each is settled with the orderer, and whether there is another."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ragorder import Document, Orderer, Ordering, PromptBuilder
from ragorder.adapters._answer_length import AnswerLength
from ragorder.adapters._openai_reply import Answer, Reply
from ragorder.adapters._openai_request import checked_options

__all__ = ["Call", "Setup"]

_UNKNOWN_OPTION = re.compile(r"stream_options|include_usage|\bextra|unknown field|unrecogni[sz]ed", re.IGNORECASE)
_TRANSIENT = ("408", "409", "429")
_FIRST_DELAY_S = 0.1

_logger = logging.getLogger("ragorder")


@dataclass
class Setup:
    """What the calls of a client share. Raises ValueError for `prompts` or `retries` that cannot be."""

    model: str
    orderer: Orderer
    builder: PromptBuilder
    prompts: str
    retries: int
    send_salt: bool
    reports_usage: bool = True
    answer_length: AnswerLength = field(default_factory=AnswerLength)

    def __post_init__(self) -> None:
        if self.prompts not in ("messages", "token_ids"):
            raise ValueError(f"prompts must be 'messages' or 'token_ids', got {self.prompts!r}")
        if self.prompts == "token_ids" and self.builder.build("", ()).token_ids is None:
            raise ValueError("prompts='token_ids' needs the served model's tokenizer: PromptBuilder(tokenizer=…)")
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, got {self.retries}")


class Call:
    """One question, without any waiting. Done once there is an `answer`; until then, there is to be another attempt,
    `delay_s` later. Whoever `hands_out` the pieces cannot take them back: no attempt follows the first of them."""

    def __init__(
        self,
        setup: Setup,
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
        self._setup = setup
        self._query = query
        self._documents = list(documents)
        self._scope = scope
        self._waiting = waiting
        self._options = checked_options(options, scope, setup.send_salt)
        self._hands_out = hands_out
        self._reports_usage = setup.reports_usage
        self._retries = 0
        self._sent_s = 0.0
        self._reply: Reply | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """One attempt. Leaving it settles its ordering, and swallows an error after which there is to be another."""
        self.ordering = self._reply = None
        try:
            yield
        except BaseException as error:
            self._settle(answered=False)
            if not isinstance(error, Exception) or not self._tries_again(error):
                raise
        else:
            self._settle(answered=True)

    def request(self) -> dict[str, Any]:
        """What to call create() with, now: what is ordered first must be sent first."""
        setup = self._setup
        self.ordering = setup.orderer.order(
            self._documents, scope=self._scope, waiting=self._waiting, suffix_tokens=self._suffix_tokens()
        )
        prompt = setup.builder.build(self._query, self.ordering)
        request = self._options | {"model": setup.model, "stream": True}
        request |= {"messages": prompt.messages} if setup.prompts == "messages" else {"prompt": prompt.token_ids}
        if self._reports_usage:
            request["stream_options"] = {"include_usage": True}
        self._sent_s = time.perf_counter()
        return request

    def opened(self, stream: Any) -> Reply:
        """What reads the chunks of the stream that create() returned: the server has accepted the request."""
        if not self._reports_usage:
            self._setup.reports_usage = False
        self._reply = Reply(stream, self._sent_s)
        return self._reply

    def _suffix_tokens(self) -> int:
        setup = self._setup
        limit = self._options.get("max_completion_tokens", self._options.get("max_tokens"))
        return setup.answer_length.suffix_tokens(
            setup.builder.suffix_tokens(self._query),
            limit if isinstance(limit, int) and limit >= 0 else None,
            setup.orderer.settings.suffix_tokens,
        )

    def _settle(self, *, answered: bool) -> None:
        ordering, reply = self.ordering, self._reply
        if ordering is None:
            return
        if reply is None or not (answered or reply.ttft_s):
            ordering.discard()
        elif not answered:
            # The prompt was computed, and stays in the cache, whatever became of the answer.
            ordering.confirm()
        else:
            self.answer = answer = reply.answer(ordering)
            if answer.completion_tokens is not None:
                self._setup.answer_length.learn(answer.completion_tokens)
            ordering.confirm(answer.cached_tokens, answer.total_tokens)

    def _tries_again(self, error: Exception) -> bool:
        self.delay_s = 0.0
        if self._reply is None:
            # The openai client has already repeated what is worth repeating.
            if not self._reports_usage or not _refuses_stream_options(error):
                return False
            self._reports_usage = False
            return True
        if self._retries >= self._setup.retries or not _is_broken_stream(error):
            return False
        if self._hands_out and self._reply.pieces:
            return False
        self.delay_s = _FIRST_DELAY_S * 2**self._retries
        self._retries += 1
        _logger.warning("a stream broke with %s: asking again", type(error).__name__)
        return True


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
