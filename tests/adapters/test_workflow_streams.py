"""Streams of a shared workflow server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.workflows import Asked, PlainPrompts, ScriptedEngine, chain, found_by_name

from ragorder.adapters.workflows import SharedWorkflows
from ragorder.pipelining import AnswerChunk
from ragorder.pipelining.workflow import RAGraph, WorkflowServer


class Stuck(ScriptedEngine):
    """Stops after a word; a request takes a moment to be aborted."""

    aborted = 0

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        try:
            yield AnswerChunk("word")
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.1)
            self.aborted += 1


async def test_a_reader_that_is_cancelled_is_told_so_once_its_request_is_aborted() -> None:
    graph = chain(RAGraph("plain").add_generation("answer", prompt="{query}"), "answer").compile()
    engine = Stuck()

    def make() -> WorkflowServer[Any, Any]:
        return WorkflowServer(engine, found_by_name, None, None, PlainPrompts())

    shared = await asyncio.to_thread(SharedWorkflows, make)
    try:
        shown = asyncio.Event()

        async def read() -> None:
            async for _ in shared.astream(graph, "why?"):
                shown.set()

        reader = asyncio.create_task(read())
        await asyncio.wait_for(shown.wait(), 60)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.aborted == 1
    finally:
        await asyncio.to_thread(shared.close)
