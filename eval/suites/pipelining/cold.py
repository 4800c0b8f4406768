"""Cold starts with and without a warm-up (RAGCache++ Tables 5 and 6)."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from statistics import median
from typing import Any

from ragorder.adapters.openai.pipelined import OrderedPrompts, PromptRequest
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.running.load import rotated
from ragorder.eval.suites.pipelining.modes import ask, make_pipeline, milliseconds
from ragorder.eval.suites.pipelining.search import played
from ragorder.eval.suites.pipelining.server import MeasuredServer
from ragorder.prompt import PromptBuilder

__all__ = ["ALONE", "measure_cold", "time_system"]

ALONE = "alone"
_MODES = ("none", "warmup")
_CALIBRATING = 5


async def measure_cold(
    server: MeasuredServer,
    builder: PromptBuilder,
    requests: Sequence[TraceRequest],
    retrieval_s: float,
    advance: Callable[[], None],
) -> dict[str, dict[str, list[Any]]]:
    """Each request in each mode in turn, with its own salt: the system prompt is never cached.

    Rows of "alone": `system_ms` (T_sys) is the system prompt's time, `documents_ms` (T_docs) that of the whole prompt
    after it. Raises EngineError for a server that does not answer or has other clients.
    """
    rankings = [request.documents for request in requests]
    orderers = {mode: server.orderer(builder) for mode in _MODES}
    retrieval = played(rankings, retrieval_s)
    pipelines = {
        mode: make_pipeline(server, mode, retrieval, orderer=orderers[mode], builder=builder) for mode in _MODES
    }
    rows: dict[str, dict[str, list[Any]]] = {mode: defaultdict(list) for mode in (*_MODES, ALONE)}
    for number, request in enumerate(requests):
        for mode in rotated((*_MODES, ALONE), number):
            await server.quiet()
            salt = secrets.token_hex(16)
            asked = ask(number, request.question, salt)
            if mode == ALONE:
                prompts = OrderedPrompts(server.orderer(builder), builder, "token_ids")
                whole = prompts.preview(asked, request.documents)
                rows[ALONE]["system_ms"].append(milliseconds(await _time(server, _system(builder, salt))))
                rows[ALONE]["documents_ms"].append(milliseconds(await _time(server, whole)))
            else:
                stream = await pipelines[mode].answer(asked)
                trace, usage = stream.trace, stream.usage
                row = rows[mode]
                row["ttft_ms"].append(milliseconds(trace.first_token_s))
                row["retrieval_ms"].append(milliseconds(trace.retrieval_s))
                row["cached_tokens"].append(usage and usage.cached_tokens)
                row["prompt_tokens"].append(usage and usage.prompt_tokens)
                row["warmed_up"].append(trace.warmed_up)
        advance()
    for pipeline in pipelines.values():
        await pipeline.close()
    return rows


async def time_system(server: MeasuredServer, builder: PromptBuilder) -> float:
    """Median seconds of the system prompt alone."""
    times = []
    for _ in range(_CALIBRATING):
        await server.quiet()
        times.append(await _time(server, _system(builder, secrets.token_hex(16))))
    return median(times)


def _system(builder: PromptBuilder, salt: str) -> PromptRequest:
    return PromptRequest(None, builder.prefix_ids, salt, {"max_tokens": 1, "temperature": 0.0})


async def _time(server: MeasuredServer, request: PromptRequest) -> float:
    start, first_s = time.perf_counter(), 0.0
    async with aclosing(server.streams.stream(request)) as chunks:
        async for _ in chunks:
            first_s = first_s or time.perf_counter() - start
    return first_s
