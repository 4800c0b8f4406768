"""Batches in real time on tiny parts: a budget, placements that move, and what the report says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss")
pytest.importorskip("torch")
pytest.importorskip("transformers")


from ragorder.benchmarks.doll.batching_live.cells import POLICIES, BatchingLiveCell
from ragorder.benchmarks.doll.batching_live.parts import LiveParts
from ragorder.benchmarks.doll.batching_live.serving import rate_at, serial_size, serve_live
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteError
from ragorder.pipelining.placement.costs import Footprint
from ragorder.pipelining.placement.plan import plan_placement

pytestmark = pytest.mark.merge

# The memory has never room for all layers.
TINY: Mapping[str, Any] = {
    "steps": "steps:8@1m",
    "scale": 60.0,
    "step_s": 0.6,
    "pass_s": 6.0,
    "most": 4,
    "serial_most": 2,
    "layers": 8,
    "hidden_size": 128,
    "vectors": 3000,
    "documents": 40,
}
CELL = BatchingLiveCell(**TINY)


def served(policy: str, cell: BatchingLiveCell, folder: Path) -> Mapping[str, Any]:
    at_s = [each.at_s for each in cell.arrivals.draw(cell.requests, 0)]
    return asyncio.run(serve_live(policy, LiveParts.make(cell, folder, len(at_s), 0), at_s))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_system_answers_every_request_from_its_streamed_layers(policy: str, tmp_path: Path) -> None:
    found = served(policy, CELL, tmp_path)
    rows, facts = found["rows"], found["facts"]
    assert len(rows["latency_s"]) == 8
    columns = [rows[f"{name}_s"] for name in ("latency", "waiting", "retrieval", "generation")]
    for latency_s, *parts_s in zip(*columns, strict=True):
        # A request leaves the server after its answer.
        assert sum(parts_s) - 0.01 <= latency_s
    # Each partition waits for the bucket, whether it was read ahead or not.
    assert facts["pass_s"] > 0.99 * CELL.pass_s / CELL.scale
    assert facts["prompt_tokens"] > 8 * CELL.top_k * CELL.document_words
    assert facts["streamed"] > 0
    if policy == "serial":
        assert facts["streamed"] > 0.99 and facts["beside_s"] is None and not facts["trace"]
    else:
        assert all(moment["device"] + moment["host"] + moment["disk"] == CELL.layers for moment in facts["trace"])
        assert len({moment["most"] for moment in facts["trace"]}) > 1


def test_serial_batches_are_four_minutes_of_requests_within_a_limit_and_wait_until_full_or_the_last_comes() -> None:
    steps = Arrivals.parse("steps:4@20m,16@20m").steps
    assert [rate_at(steps, at_s) for at_s in (0, 1199, 1200, 9999)] == [4, 4, 16, 16]
    assert [serial_size(100, rate, 56, last=False) for rate in (0, 4, 16)] == [1, 16, 56]
    assert [serial_size(waiting, 1, 56, last=False) for waiting in (1, 3, 4, 9)] == [0, 0, 4, 4]
    assert serial_size(3, 1, 56, last=True) == 3


def test_arrivals_come_in_steps() -> None:
    with pytest.raises(SuiteError, match="arrivals come in steps"):
        BatchingLiveCell.read({"steps": "poisson:2"}, "mine")
    with pytest.raises(SuiteError, match="is no step"):
        BatchingLiveCell.read({"steps": "steps:4"}, "mine")


def test_the_memory_is_that_of_the_serial_system(tmp_path: Path) -> None:
    parts = LiveParts.make(CELL, tmp_path, 1, 0)
    used = Footprint(parts.sizes, parts.index).total(parts.serial)
    assert used.device + used.host == parts.budgets.host_bytes
    for backlog in (1, 2, 4):
        used = Footprint(parts.sizes, parts.index).total(plan_placement(parts.budgets, parts.costs, backlog=backlog))
        assert used.device + used.host <= parts.budgets.host_bytes


def test_longer_prompts_have_the_same_memory(tmp_path: Path) -> None:
    usual, longer = (
        LiveParts.make(CELL.model_copy(update={"top_k": top_k, "serial_most": 8}), tmp_path, 1, 0) for top_k in (5, 10)
    )
    assert longer.budgets == usual.budgets
    assert longer.serial.batch < usual.serial.batch == 8


def test_lists_are_read_as_they_are_needed(tmp_path: Path) -> None:
    cell = CELL.model_copy(update={"index": "lists", "steps": "steps:1@1m"})
    parts = LiveParts.make(cell, tmp_path, 1, 0)
    with parts.search() as search:
        list(search.search(parts.queries, cell.top_k))
        assert search.read_bytes < search.pass_bytes / 4
    assert 0.5 < parts.recall <= 1
