"""An OpenAI-compatible server as the engine of a pipeline."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from ragorder import Ordering
from ragorder.adapters.openai.endpoint import ModelEndpoint, UsageOption, check_client
from ragorder.adapters.openai.prompts import PromptRequest, TimedUsage
from ragorder.adapters.openai.reply import Reply
from ragorder.adapters.openai.request import checked_options
from ragorder.pipelining import AnswerChunk

__all__ = ["OpenAIStreams"]


class OpenAIStreams:
    """Sends requests through an `openai.AsyncOpenAI`, or anything with the same `create`: messages to chat completions,
    tokens to completions. Closing a stream closes its HTTP response, on which vLLM and SGLang abort the request.

    `send_salt` and `send_facts` are those of `OrderedClient`. Raises ImportError without the openai package, TypeError
    for a synchronous client.
    """

    def __init__(self, client: Any, model: str, *, send_salt: bool = True, send_facts: bool = False) -> None:
        check_client(client, "a pipeline", "OpenAI", "openai.AsyncOpenAI")
        self._endpoint = ModelEndpoint(client, model, send_facts=send_facts)
        self._send_salt = send_salt

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """The answer as it arrives; the last chunk has the usage. Raises the openai client's errors, and
        openai.APIConnectionError for an answer that ends too early; before sending, TypeError or ValueError for options
        that the client sets itself and for a scope that cannot be a salt."""
        options = checked_options(dict(request.options), request.scope, self._send_salt)
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
        usage = UsageOption(self._endpoint)
        try:
            response = await self._endpoint.create(request, options, usage)
        except Exception as error:
            if not usage.drop(error):
                raise
            response = await self._endpoint.create(request, options, usage)
        usage.accepted()
        return response
