"""The workflow server's own time: what is counted, and what the report says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy")

from support.suites import page_of, run_suites

from ragorder.benchmarks.hedra.wavefront import WavefrontCell, measure


async def test_the_pieces_of_all_requests_are_counted() -> None:
    """Of three rounds each: a search, a generation and a step."""
    cell = WavefrontCell.read({"requests": 6, "in_flight": 3, "stages": 8, "tokens": 3}, "here")
    _, plain = await measure(cell, transformed=False)
    assert (plain["pieces"], plain["speculative"]) == (6 * 9, 0)
    _, all_ = await measure(cell, transformed=True)
    assert all_["pieces"] == 6 * 9 + all_["speculative"] and all_["speculative"] > 0


def test_a_client_of_an_engine_elsewhere(tmp_path: Path) -> None:
    """HyDE's two generations are asked for whole where nothing reads their tokens."""
    pytest.importorskip("openai")
    run_suites(tmp_path, "hedra-client", workflow="hyde", requests=2, tokens=5, repeats=1)
    rows = [[each.strip() for each in line.split("|")] for line in page_of(tmp_path).splitlines() if "| hyde |" in line]
    sent = {row[2]: (float(row[6]), float(row[7])) for row in rows}
    assert sent["plain client"] == sent["stage by stage"] == (2.0, 0.0)
    assert sent["streaming client"] == (2.0, 2.0)
