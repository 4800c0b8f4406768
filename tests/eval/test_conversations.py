"""Conversations through the proxy, on a simulated server that is vLLM's block pool to the block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("bm25s")

import httpx2

from ragorder.eval.experiments.conversations.measuring import (
    LAYOUTS,
    Outcome,
    RealServer,
    SimulatedServer,
    Turn,
    conversations,
    main,
    make_proxy,
    run,
)


@pytest.fixture(scope="module")
def made() -> list[list[Turn]]:
    return conversations(15, 3)


def both(made: list[list[Turn]], layout: str) -> tuple[Outcome, Outcome]:
    """In retrieval order, and by the proxy."""
    server = SimulatedServer(511)
    plain, sent, options = LAYOUTS[layout]
    retrieval = asyncio.run(run(server, made, plain, max_tokens=24))
    proxy = make_proxy(server, **options)
    return retrieval, asyncio.run(run(server, made, sent, max_tokens=24, proxy=proxy))


@pytest.mark.parametrize(
    "layout", ["each turn", "first turn only", "system message, replaced", "last turn, behind history"]
)
def test_d1_what_is_predicted_of_conversations_is_what_the_server_has(layout: str, made: list[list[Turn]]) -> None:
    """Estimated at four characters a token where the server's tokens have 3.75. What stood behind the documents was not
    counted, and 32 % were predicted where the server had 19."""
    retrieval, ordered = both(made, layout)
    assert ordered.predicted_tokens is not None
    error = ordered.predicted_tokens - ordered.cached_tokens
    # An estimate is 1/15 too low; beyond that two points of all tokens.
    assert -ordered.cached_tokens / 8 < error + 0.02 * ordered.prompt_tokens
    assert error < 0.02 * ordered.prompt_tokens
    assert ordered.cached_tokens > retrieval.cached_tokens


def test_d10_documents_in_parts_have_what_documents_in_a_text_have(made: list[list[Turn]]) -> None:
    _, text = both(made, "one turn")
    retrieval, parts = both(made, "one turn, in parts")
    assert parts.cached_share > 2 * retrieval.cached_share
    assert abs(parts.cached_share - text.cached_share) < 0.01


def test_d7_numbers_by_place_have_what_names_have(made: list[list[Turn]]) -> None:
    _, names = both(made, "one turn")
    retrieval, ranks = both(made, "one turn, ids are ranks")
    _, by_place = both(made, "the same, --number-by-place")
    assert abs(ranks.cached_share - retrieval.cached_share) < 0.01
    assert abs(by_place.cached_share - names.cached_share) < 0.02


def test_tags_have_what_the_template_has(made: list[list[Turn]]) -> None:
    _, template = both(made, "one turn")
    _, tagged = both(made, "one turn, tagged")
    assert abs(tagged.cached_share - template.cached_share) < 0.02


def test_the_command_says_both_shares() -> None:
    options = ["--conversations", "4", "--turns", "2", "--blocks", "200", "--max-tokens", "8", "--seed", "1"]
    result = CliRunner().invoke(
        main, [*options, "--engine", "simulated", "--layout", "each turn", "--layout", "one turn"]
    )
    assert result.exit_code == 0, result.output
    head, *lines = result.output.splitlines()
    assert head.split() == ["documents", "tokens", "retrieval", "order", "ragorder", "predicted"]
    assert [line[:30].strip() for line in lines] == ["each turn", "one turn"]
    assert all(line.count("%") == 3 for line in lines)


def test_a_tokenizer_needs_a_model() -> None:
    result = CliRunner().invoke(main, ["--tokenizer"])
    assert result.exit_code == 2
    assert "--engine vllm" in result.output


def test_with_an_engine_the_server_is_one_with_a_model(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real server counts is measured with one (docs/proxy.md); here it is known to be asked for."""
    started: list[tuple[Path, int]] = []

    @contextmanager
    def start(model: Path, *, blocks: int, max_model_len: int) -> Iterator[SimulatedServer]:
        started.append((model, max_model_len))
        yield SimulatedServer(blocks)

    monkeypatch.setattr("ragorder.eval.experiments.conversations.measuring.RealServer", start)
    monkeypatch.setattr("ragorder.eval.experiments.conversations.measuring._model", lambda made, folder: model_folder)
    options = ["--conversations", "3", "--turns", "1", "--layout", "one turn", "--engine", "vllm", "--tokenizer"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    assert started == [(model_folder, 8192)]
    assert result.output.splitlines()[-1].startswith("one turn")


def test_a_real_servers_counters_are_read_from_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1200.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 34.0\n'
        'vllm:prefix_cache_queries_created{engine="0"} 1.7e+09\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 5.0\n'
    )
    monkeypatch.setattr(httpx2, "get", lambda *_, **__: httpx2.Response(200, text=page))
    server = RealServer.__new__(RealServer)
    server.base_url = "http://server"
    assert server.counts() == (1234.0, 5.0)
