"""Streamed weights, partitions on disk and decoupled batches in real time, on tiny parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("faiss")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.benchmarks.doll.batching_live.cells import BatchingLiveCell
from ragorder.benchmarks.doll.batching_live.measuring import POLICIES, LiveParts, serve_live

pytestmark = pytest.mark.merge

CELL = BatchingLiveCell(
    steps="steps:8@1m",
    scale=60.0,
    step_s=0.3,
    pass_s=6.0,
    most=4,
    serial_most=6,
    layers=2,
    hidden_size=64,
    partitions=4,
    vectors=3000,
    documents=40,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_system_answers_every_request(policy: str, tmp_path: Path) -> None:
    arrivals = CELL.arrivals
    at_s = [each.at_s for each in arrivals.draw(arrivals.count or 0, 0)]
    parts = LiveParts.make(CELL, tmp_path, len(at_s), 0)
    found = asyncio.run(serve_live(policy, parts, at_s))
    assert len(found["rows"]["latency_s"]) == 8
    # A pass and 32 steps take their time at least.
    assert min(found["rows"]["latency_s"]) > (CELL.pass_s + 32 * CELL.step_s) / CELL.scale / 2
    assert found["facts"]["prompt_tokens"] > 8 * CELL.top_k * CELL.document_words
    # Each partition waits for the bucket, whether it was read ahead or not.
    assert found["facts"]["pass_s"] > 0.99 * CELL.pass_s / CELL.scale
    if policy == "serial":
        assert found["facts"]["beside_s"] is None


def test_all_layers_stream_in_every_step(tmp_path: Path) -> None:
    """Also after so many that the engine takes memory again which it gave back."""
    parts = LiveParts.make(CELL, tmp_path, 1, 0)
    with parts.search() as search, parts.engine(1024, 4, search) as (engine, timed):

        async def answer(number: int) -> None:
            request = PromptRequest(None, [number + 1] * 20, None, {}, 20)
            async for _ in engine.stream(request):
                pass

        for number in range(20):
            asyncio.run(answer(number))
        assert len(timed.times) > 2 * 256
        stream = timed.stats().stream
        assert stream is not None and stream.disk_layers == CELL.layers
        assert timed.passes >= len(timed.times)
