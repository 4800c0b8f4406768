"""The embedded engine in a pipeline or workflow."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from ragorder.adapters.embedded.worker import EngineWorker
from ragorder.adapters.openai.prompts import PromptRequest, TimedUsage
from ragorder.adapters.request_facts import checked_salt
from ragorder.errors import RagorderError
from ragorder.kernels.engine import Request, Sampling
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.pipelining import AnswerChunk
from ragorder.pipelining.placement.base import Placement

# By an engine's fault: causes after which a batch may be tried again.
_CAUSES = {"memory": MemoryError, "disk": OSError}


class EmbeddedStreams:
    """Engine on an `EngineWorker`, which stays open. Closing a stream aborts its request after the current step.

        worker = EngineWorker(TieredEngine.load(model))
        engine = EmbeddedStreams(worker)

    Prompts are tokens: `OrderedPrompts(…, prompts="token_ids")`; options are those of `Sampling`. A string scope is the
    salt.
    """

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    def requests(self) -> int:
        return self._worker.unfinished

    def relieve(self) -> bool:
        return self._worker.engine.relieve()

    def place(self, placement: object) -> int | None:
        """Apply a `Placement`; ignore other objects. Return the tokens of KV on the device, or None while running
        requests need more. Raises as `TieredEngine.place`."""
        engine = self._worker.engine
        if isinstance(placement, Placement):
            try:
                engine.place(placement)
            except OutOfBlocksError:
                return None
        return engine.device_tokens

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        """Raises the worker's errors, TypeError or ValueError for unusable options, messages and scopes."""
        if request.token_ids is None:
            raise ValueError("the embedded engine takes token ids only: give OrderedPrompts(…, prompts='token_ids')")
        options = {name: value for name, value in request.options.items() if value is not None}
        asked = Request(
            request.token_ids,
            # Without documents requests can share the system prompt.
            request.document_ends or ((request.prefix_tokens,) if request.prefix_tokens else ()),
            Sampling(**options),
            checked_salt(request.scope) if isinstance(request.scope, str) else None,
            expected_uses=request.expected_uses,
            prefix_tokens=request.prefix_tokens,
            exact_documents=request.exact_documents,
            keep_question=request.keep_question,
        )
        sent_s = time.perf_counter()
        async with self._worker.submit([asked]) as updates:
            async for _, update in updates:
                if (done := update.completion) is None:
                    yield AnswerChunk(update.text)
                    continue
                if done.finish_reason not in ("stop", "length"):
                    why = f"the engine ended the request ({done.finish_reason}): {done.error}"
                    if done.finish_reason == "timeout":
                        raise EmbeddedTimeoutError(why)
                    cause = _CAUSES.get(done.fault or "")
                    raise EmbeddedRequestError(why) from (None if cause is None else cause(why))
                if update.text:
                    yield AnswerChunk(update.text)
                usage = done.prompt_tokens, done.cached.total, len(done.token_ids), done.finish_reason
                yield AnswerChunk("", TimedUsage(*usage, sent_s=sent_s))


class EmbeddedRequestError(RagorderError, RuntimeError):
    """A request failed, timed out or was aborted; caused by a MemoryError or OSError if memory or disk was at fault."""


class EmbeddedTimeoutError(EmbeddedRequestError):
    """The engine's deadline for a request has passed."""
