"""vLLM in this process as a pipeline's engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ragorder.adapters.openai.prompts import PromptRequest, TimedUsage
from ragorder.adapters.request_facts import FACTS, checked_salt, with_facts
from ragorder.common.extras import needs
from ragorder.pipelining import AnswerChunk


class AsyncVLLM:
    """Engine on a `vllm.v1.engine.async_llm.AsyncLLM`. Closing a stream aborts its request after the current iteration.

        engine = AsyncVLLM(AsyncLLM.from_engine_args(arguments))
        pipeline = ordered_pipeline(engine, **parts, requests=engine.requests)

    Prompts are tokens: `OrderedPrompts(…, prompts="token_ids")`; options are SamplingParams'. `send_salt`: a string
    scope becomes the `cache_salt`. `send_facts`: `extra_args` get document ends and a digest of the scope (None: if the
    engine has ragorder's tiers). Raises ImportError without vllm.
    """

    def __init__(self, engine: Any, *, send_salt: bool = True, send_facts: bool | None = None) -> None:
        with needs("vllm", "vLLM in this process"):
            from vllm import SamplingParams
            from vllm.sampling_params import RequestOutputKind
        self._engine = engine
        self._send_salt = send_salt
        self._send_facts = _has_tiers(engine) if send_facts is None else send_facts
        self._sampling = SamplingParams
        self._pieces = RequestOutputKind.DELTA

    def requests(self) -> int:
        return int(self._engine.output_processor.get_num_unfinished_requests())

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """Raises the engine's errors, ValueError for messages or a scope that cannot be a salt."""
        if request.token_ids is None:
            raise ValueError("vLLM in this process takes token ids only: give OrderedPrompts(…, prompts='token_ids')")
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        if self._send_salt and isinstance(request.scope, str):
            prompt["cache_salt"] = checked_salt(request.scope)
        options = {name: value for name, value in request.options.items() if value is not None}
        if self._send_facts:
            options["extra_args"] = with_facts(
                options.get("extra_args", {}), request.document_ends, request.scope, request.expected_uses
            )
        params = self._sampling(output_kind=self._pieces, **options)
        id, sent_s = f"ragorder-{uuid.uuid4().hex}", time.perf_counter()
        output: Any = None
        completion_tokens = 0
        try:
            async with aclosing(self._engine.generate(prompt, params, id)) as outputs:
                async for output in outputs:
                    answer = output.outputs[0]
                    completion_tokens += len(answer.token_ids)
                    if not output.finished or answer.text:
                        yield AnswerChunk(answer.text)
        finally:
            if output is None or not output.finished:
                # vLLM's own generator aborts too, but not if it is cancelled while submitting the request.
                await asyncio.shield(self._engine.abort(id))
        cached_tokens, reason = output.num_cached_tokens, output.outputs[0].finish_reason
        yield AnswerChunk(
            "", TimedUsage(len(output.prompt_token_ids), cached_tokens, completion_tokens, reason, sent_s)
        )


def _has_tiers(engine: Any) -> bool:
    config = getattr(getattr(engine, "vllm_config", None), "kv_transfer_config", None)
    return FACTS in (getattr(config, "kv_connector_extra_config", None) or {})
