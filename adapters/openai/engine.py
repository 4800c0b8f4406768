"""An OpenAI-compatible server as the engine of a pipeline."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from ragorder import Ordering
from ragorder.adapters.openai.call import refuses_stream_options
from ragorder.adapters.openai.prompts import PromptRequest, TimedUsage
from ragorder.adapters.openai.reply import Reply
from ragorder.adapters.openai.request import checked_options
from ragorder.adapters.request_facts import with_facts
from ragorder.pipelining import AnswerChunk

__all__ = ["OpenAIStreams"]


class OpenAIStreams:
    """Sends requests through an `openai.AsyncOpenAI`, or anything with the same `create`: messages to chat completions,
    tokens to completions. Closing a stream closes its HTTP response, on which vLLM and SGLang abort the request.

    `send_salt`: a scope that is a string is sent as vLLM's `cache_salt`; False for servers that do not know it.
    `send_facts`: where the documents end and a digest of the scope are sent to a vLLM with ragorder tiers; other
    servers may refuse them.

    Raises ImportError without the openai package, TypeError for a synchronous client.
    """

    def __init__(self, client: Any, model: str, *, send_salt: bool = True, send_facts: bool = False) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError("a pipeline to a server needs openai: pip install 'ragorder[live]'") from error
        if isinstance(client, openai.OpenAI):
            raise TypeError(f"a pipeline cannot use a client of type {type(client).__name__}: use openai.AsyncOpenAI")
        self._client = client
        self._model = model
        self._send_salt = send_salt
        self._send_facts = send_facts
        self._reports_usage = True

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """The answer, as it arrives; the last chunk has the usage. Raises what the openai client raises, and
        openai.APIConnectionError for an answer that ends too early; TypeError or ValueError, before anything is sent,
        for options that are not the caller's to set and for a scope that cannot be a salt."""
        options = checked_options(dict(request.options), request.scope, self._send_salt)
        if self._send_facts:
            options["extra_body"] = with_facts(options["extra_body"], request.document_ends, request.scope)
        options |= {"model": self._model, "stream": True}
        reply = Reply(Ordering([], []))
        reply.sent_s = time.perf_counter()
        async with await self._create(request, options) as response:
            reply.watch(response)
            began = False
            async for chunk in response:
                text = reply.read(chunk)
                if text or (reply.ttft_s is not None and not began):
                    began = True
                    yield AnswerChunk(text)
            answer = reply.answer()
        usage = answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens, answer.finish_reason
        yield AnswerChunk("", TimedUsage(*usage, sent_s=reply.sent_s))

    async def _create(self, request: PromptRequest, options: dict[str, Any]) -> Any:
        if self._reports_usage:
            try:
                return await self._send(request, options | {"stream_options": {"include_usage": True}})
            except Exception as error:
                if not refuses_stream_options(error):
                    raise
        response = await self._send(request, options)
        self._reports_usage = False
        return response

    async def _send(self, request: PromptRequest, options: dict[str, Any]) -> Any:
        if request.token_ids is None:
            return await self._client.chat.completions.create(messages=request.messages, **options)
        return await self._client.completions.create(prompt=request.token_ids, **options)
