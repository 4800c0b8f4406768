"""A model on an OpenAI-compatible server, and request options."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Hashable
from typing import Any

from ragorder import Ordering
from ragorder.adapters.openai.prompts import PromptRequest, TimedUsage
from ragorder.adapters.openai.reply import Reply, read_chunks
from ragorder.adapters.request_facts import checked_salt, with_facts
from ragorder.adapters.usage import member, read_usage
from ragorder.common.extras import needs
from ragorder.pipelining import AnswerChunk

__all__ = ["ModelEndpoint", "OpenAIStreams", "UsageOption", "check_client", "checked_options"]

_OWNED = ("messages", "model", "prompt", "stream", "stream_options")
_UNKNOWN_OPTION = re.compile(r"stream_options|include_usage|\bextra|unknown field|unrecogni[sz]ed", re.IGNORECASE)


def check_client(client: Any, user: str, refused_class: str, advice: str) -> None:
    with needs("live", user):
        import openai
    if isinstance(client, getattr(openai, refused_class)):
        raise TypeError(f"{user} cannot use a client of type {type(client).__name__}: use {advice}")


class ModelEndpoint:
    def __init__(self, client: Any, model: str, *, send_facts: bool) -> None:
        self.refuses_usage = False
        self._client = client
        self._model = model
        self._send_facts = send_facts

    def create(self, request: PromptRequest, options: dict[str, Any], usage: UsageOption) -> Any:
        options = options | {"model": self._model, "stream": request.streamed}
        if self._send_facts:
            options["extra_body"] = with_facts(
                options["extra_body"],
                request.document_ends,
                request.scope,
                request.expected_uses,
                prefix_tokens=request.prefix_tokens,
                exact_documents=request.exact_documents,
                keep_question=request.keep_question,
            )
        if request.extra_body:
            options["extra_body"] = {**request.extra_body, **options["extra_body"]}
        if usage.sent and request.streamed:
            options["stream_options"] = {"include_usage": True}
        if request.token_ids is None:
            return self._client.chat.completions.create(messages=request.messages, **options)
        return self._client.completions.create(prompt=request.token_ids, **options)


class UsageOption:
    """Whether a request asks for its usage; never again after the server accepted one only without."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self.sent = not endpoint.refuses_usage
        self._endpoint = endpoint

    def drop(self, error: Exception) -> bool:
        """Return whether the error refuses the option: then send the request again."""
        refused = self.sent and _refuses_stream_options(error)
        self.sent = self.sent and not refused
        return refused

    def accepted(self) -> None:
        if not self.sent:
            self._endpoint.refuses_usage = True


def _refuses_stream_options(error: Exception) -> bool:
    from openai import APIStatusError

    if not isinstance(error, APIStatusError) or error.status_code not in (400, 422):
        return False
    return bool(_UNKNOWN_OPTION.search(f"{error} {error.body} {error.param}"))


def checked_options(options: dict[str, Any], scope: Hashable, send_salt: bool) -> dict[str, Any]:
    """Return the options of create() that are not None, with the salt. Errors (TypeError, ValueError) quote no
    value."""
    sent = {name: value for name, value in options.items() if value is not None}
    body = sent["extra_body"] = dict(sent.get("extra_body", ()))
    for name in _OWNED:
        if name in sent or name in body:
            raise TypeError(f"{name} is set by the client: leave it out")
    if (sent | body).get("n") not in (None, 1):
        raise ValueError("n is not 1, but an ordered request has one answer: leave it out")
    if "max_completion_tokens" in sent:
        sent.pop("max_tokens", None)
    if send_salt and (scope is None or isinstance(scope, str)):
        if body.get("cache_salt", scope) != scope:
            raise ValueError("extra_body has a cache_salt that differs from the scope: give it as scope only")
        if scope is not None:
            body["cache_salt"] = checked_salt(scope)
    return sent


class OpenAIStreams:
    """An OpenAI-compatible server as a pipeline's engine. Closing a stream aborts its request on vLLM and SGLang.

        engine = OpenAIStreams(openai.AsyncOpenAI(base_url=url), "…")

    Options as for `OrderedClient`. Raises ImportError, or TypeError for a synchronous client.
    """

    def __init__(self, client: Any, model: str, *, send_salt: bool = True, send_facts: bool = False) -> None:
        check_client(client, "a pipeline", "OpenAI", "openai.AsyncOpenAI")
        self._endpoint = ModelEndpoint(client, model, send_facts=send_facts)
        self._send_salt = send_salt

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """Raises the openai client's errors, and those of `checked_options`."""
        options = checked_options(dict(request.options), request.scope, self._send_salt)
        reply = Reply(Ordering([], []))
        reply.sent_s = time.perf_counter()
        response = await self._create(request, options)
        if not request.streamed:
            yield _whole(response, reply.sent_s)
            return
        async with response:
            reply.watch(response)
            began = False
            async for chunk in read_chunks(response):
                text = reply.read(chunk)
                if text or (reply.ttft_s is not None and not began):
                    began = True
                    yield AnswerChunk(text)
            answer = reply.answer()
        usage = answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens, answer.finish_reason
        yield AnswerChunk("", TimedUsage(*usage, sent_s=reply.sent_s))

    async def _create(self, request: PromptRequest, options: dict[str, Any]) -> Any:
        usage, response = UsageOption(self._endpoint), None
        while response is None:
            try:
                response = await self._endpoint.create(request, options, usage)
            except Exception as error:
                if not usage.drop(error):
                    raise
        usage.accepted()
        return response


def _whole(completion: Any, sent_s: float) -> AnswerChunk:
    choice = completion.choices[0]
    message = member(choice, "message")
    text = member(choice, "text") if message is None else member(message, "content")
    counts = read_usage(member(completion, "usage"))
    usage = TimedUsage(
        counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens, member(choice, "finish_reason"), sent_s
    )
    return AnswerChunk(text or "", usage, usage.completion_tokens or 1)
