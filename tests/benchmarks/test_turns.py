"""Turns of conversations, on a simulated server that is vLLM's block pool to the block, and on a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("bm25s")

from ragorder.benchmarks.chats.servers import SimulatedServer
from ragorder.benchmarks.chats.talks import ChatTurn, conversations
from ragorder.benchmarks.chats.turns import CHATS, send_turns


def columns(rows: dict[str, Any], name: str, turn: int) -> list[int]:
    return [figure for figure, number in zip(rows[name], rows["turn"], strict=True) if number == turn]


@pytest.fixture(scope="module")
def made() -> list[list[ChatTurn]]:
    return conversations(16, 4)


@pytest.fixture(scope="module")
def served(made: list[list[ChatTurn]]) -> dict[str, dict[str, Any]]:
    server = SimulatedServer(1023)
    return {name: asyncio.run(send_turns(server, made, kind, None, 24, 8)) for name, kind in CHATS.items()}


@pytest.mark.parametrize("turn", range(4))
def test_each_turn_computes_less_than_where_all_is_appended_or_in_the_system_message(
    served: dict[str, dict[str, Any]], turn: int
) -> None:
    computed = {
        name: sum(columns(rows, "prompt_tokens", turn)) - sum(columns(rows, "cached_tokens", turn))
        for name, rows in served.items()
    }
    assert computed["turns"] < computed["append"]
    assert computed["turns"] < computed["system"]


def test_documents_that_stand_there_are_named(served: dict[str, dict[str, Any]]) -> None:
    rows = served["turns"]
    assert columns(rows, "repeated", 0) == [0] * 16
    assert sum(columns(rows, "repeated", 3)) > 16
    assert sum(columns(rows, "prompt_tokens", 3)) < 0.8 * sum(columns(served["append"], "prompt_tokens", 3))


def test_a_real_servers_cached_tokens_are_predicted_to_the_block(vllm_server: Any, vllm_model: Path) -> None:
    """128 blocks of 32 tokens: conversations of small documents, two at a time."""
    from ragorder.eval.engines.models import load_tokenizer

    made = [
        [ChatTurn(turn.question, [(id, text[:60]) for id, text in turn.documents[:3]]) for turn in turns]
        for turns in conversations(4, 3, seed=1)
    ]
    tokenizer = load_tokenizer(str(vllm_model))
    rows = asyncio.run(send_turns(vllm_server, made, CHATS["turns"], tokenizer, 8, 2))
    pairs = list(zip(rows["predicted_tokens"], rows["cached_tokens"], strict=True))
    assert len(pairs) == 12
    assert [pair for pair in pairs if abs(pair[0] - pair[1]) > 32] == []
    assert all(columns(rows, "cached_tokens", 2))
