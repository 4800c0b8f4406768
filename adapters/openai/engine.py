"""An OpenAI-compatible server as the engine of a pipeline."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from ragorder import Ordering
from ragorder.adapters.openai.endpoint import ModelEndpoint, UsageOption, check_client, checked_options
from ragorder.adapters.openai.prompts import PromptRequest, TimedUsage
from ragorder.adapters.openai.reply import Reply
from ragorder.pipelining import AnswerChunk

__all__ = ["OpenAIStreams"]


class OpenAIStreams:
    """An OpenAI-compatible server as the engine of a pipeline. Closing a stream aborts its request on vLLM and SGLang.

        engine = OpenAIStreams(openai.AsyncOpenAI(base_url=url), "…")

    Options as for `OrderedClient`. Raises ImportError without openai, TypeError for a synchronous client.
    """

    def __init__(self, client: Any, model: str, *, send_salt: bool = True, send_facts: bool = False) -> None:
        check_client(client, "a pipeline", "OpenAI", "openai.AsyncOpenAI")
        self._endpoint = ModelEndpoint(client, model, send_facts=send_facts)
        self._send_salt = send_salt

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """Stream an answer; the last chunk has the usage. Raises the openai client's errors (APIConnectionError for a
        cut-off answer), and before sending those of `checked_options`."""
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
