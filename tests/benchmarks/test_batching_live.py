"""Streamed weights, partitions on disk and decoupled batches in real time, on tiny parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.benchmarks.doll.batching_live.experiment import BatchingLiveCell, BatchingLiveRecord, make_part
from ragorder.benchmarks.doll.batching_live.measuring import POLICIES, LiveParts, serve_live
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite, load_suites

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


def record(policy: str, *latency_s: float) -> BatchingLiveRecord:
    facts: dict[str, Any] = {"total_s": 10.0, "prompt_tokens": 100, "cached_tokens": 25, "pass_s": 5.05, "step_s": 0.12}
    facts["streamed"] = 1.0
    facts["beside_s"] = 0.125 if policy == "decoupled" else None
    return BatchingLiveRecord(suite="mine", cell={}, policy=policy, rows={"latency_s": list(latency_s)}, facts=facts)


def test_the_report_compares_means() -> None:
    results = Results(Path(), records=[record("serial", 4.0, 8.0), record("decoupled", 1.0, 3.0)])
    (table,) = make_part(Suite.unlisted("mine"), results).tables
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["serial static batches", "6.0", "1.00", "8.0", "10.0", "25.0", "1.000", "5.050", "0.120", "–"],
        ["DecoupledServer, ordered", "2.0", "3.00", "3.0", "10.0", "25.0", "1.000", "5.050", "0.120", "0.125"],
    ]


def test_the_suite_has_a_short_form() -> None:
    suite = load_suites()["doll-live"]
    assert suite.short_form is not None
    assert suite.short_form.cells[0].scale > suite.cells[0].scale
