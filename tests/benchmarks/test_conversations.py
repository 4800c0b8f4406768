"""Conversations through the proxy, on a simulated server that is vLLM's block pool to the block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.results import result_lines
from support.suites import page_of, run_suites

pytest.importorskip("starlette")
pytest.importorskip("bm25s")

from ragorder.benchmarks.chats.conversations import LAYOUTS, make_proxy, send_conversations
from ragorder.benchmarks.chats.servers import SimulatedServer
from ragorder.benchmarks.chats.talks import ChatTurn, conversations


@dataclass
class Sums:
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    largest_error: int = 0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@pytest.fixture(scope="module")
def made() -> list[list[ChatTurn]]:
    return conversations(15, 3)


def both(made: list[list[ChatTurn]], name: str) -> tuple[Sums, Sums]:
    """In retrieval order, and by the proxy."""
    server, layout = SimulatedServer(511), LAYOUTS[name]
    found = [asyncio.run(send_conversations(server, made, layout.retrieval, 24))]
    proxy = make_proxy(server, **layout.options)
    found.append(asyncio.run(send_conversations(server, made, layout.proxied, 24, proxy)))
    retrieval, ordered = (Sums(**{name: sum(filter(None, column)) for name, column in rows.items()}) for rows in found)
    assert len(found[0]["cached_tokens"]) == 45
    pairs = zip(found[1]["predicted_tokens"], found[1]["cached_tokens"], strict=True)
    ordered.largest_error = max(abs((predicted or 0) - (cached or 0)) for predicted, cached in pairs)
    return retrieval, ordered


@pytest.mark.parametrize(
    "layout", ["each turn", "first turn only", "system message replaced", "last turn after history"]
)
def test_what_is_predicted_of_conversations_is_what_the_server_has(layout: str, made: list[list[ChatTurn]]) -> None:
    """Estimated at four characters a token where the server's tokens have 3.75."""
    retrieval, ordered = both(made, layout)
    assert ordered.predicted_tokens
    error = ordered.predicted_tokens - ordered.cached_tokens
    # An estimate is 1/15 too low; beyond that two points of all tokens.
    assert -ordered.cached_tokens / 8 < error + 0.02 * ordered.prompt_tokens
    assert error < 0.02 * ordered.prompt_tokens
    # Each for itself, and not only in sum: an earlier turn that goes as it went is counted as it goes.
    assert ordered.largest_error <= 256
    assert ordered.cached_tokens > retrieval.cached_tokens


def test_parts_tags_and_numbers_by_place_have_cached_what_a_text_with_names_has(made: list[list[ChatTurn]]) -> None:
    def shares(layout: str) -> tuple[float, float]:
        retrieval, ordered = both(made, layout)
        return retrieval.cached_share, ordered.cached_share

    _, text = shares("one turn")
    retrieval, parts = shares("one turn in parts")
    assert parts > 2 * retrieval
    assert abs(parts - text) < 0.01
    for layout in ("the same --number-by-place", "one turn tagged"):
        assert abs(shares(layout)[1] - text) < 0.02
    # Numbers that are ranks change with the order.
    retrieval, ranks = shares("one turn ids are ranks")
    assert abs(ranks - retrieval) < 0.01


def test_the_suite_shows_both_shares_and_what_was_predicted(tmp_path: Path) -> None:
    for served in (4, 0):
        asked = ("conversations", "--reduced", "--seeds", 1)
        assert f"{served} runs served" in run_suites(tmp_path, *asked, layout="each turn,one turn")
    page = page_of(tmp_path)
    assert "| one turn | 11,227 | 39.9 | 39.3 |" in page
    assert "ragorder" in page and "retrieval order" in page


def test_a_tokenizer_needs_a_model(tmp_path: Path) -> None:
    assert "0 runs served" in run_suites(tmp_path, "conversations", "--seeds", 0, "--limit", 3, tokenizer="yes")
    [missing, *_] = result_lines(tmp_path, "unavailable")
    assert "the simulated server has no tokenizer: use --engine openai" in missing["reason"]


def test_with_engine_openai_a_server_with_a_model_is_started(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a real server counts is measured with one (docs/proxy.md)."""
    started: list[tuple[Path, int]] = []

    @contextmanager
    def start(model: Path, *, blocks: int, max_model_len: int) -> Iterator[SimulatedServer]:
        started.append((model, max_model_len))
        yield SimulatedServer(blocks)

    monkeypatch.setattr("ragorder.benchmarks.chats.servers.VLLMServer", start)
    options = ("--engine", "openai", "--model", model_folder, "--seeds", 0, "--limit", 3)
    run_suites(tmp_path, "conversations", *options, turns=1, layout="one turn", tokenizer="yes")
    assert started == [(model_folder, 8192)]
    lines = result_lines(tmp_path, "conversations")
    assert [line["policy"] for line in lines] == ["retrieval", "ragorder"]
    assert [len(line["rows"]["cached_tokens"]) for line in lines] == [3, 3]
