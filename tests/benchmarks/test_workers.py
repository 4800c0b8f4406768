"""Several orderers for one server: their questions, and the suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.results import result_lines
from support.suites import page_of, run_suites

pytest.importorskip("openai")
pytest.importorskip("bm25s")
pytest.importorskip("scipy")

from ragorder import Orderer
from ragorder.benchmarks.fleet import workers


def test_some_topics_are_far_more_popular_and_a_seed_draws_the_same_questions() -> None:
    requests = workers.questions_by_topic(400, 3, 5)
    assert [len(request.documents) for request in requests] == [5] * 400
    assert requests == workers.questions_by_topic(400, 3, 5) != workers.questions_by_topic(400, 4, 5)
    asked = Counter(document.id for request in requests for document in request.documents)
    assert max(asked.values()) > 40 > 4 * sorted(asked.values())[len(asked) // 2]


class Server:
    base_url = "http://server"
    block_size = 32
    capacity_tokens = 511 * 32
    events_endpoint, replay_endpoint, events_topic = "ipc://events", "tcp://replay", "kv"
    resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_retrieval_order_is_measured_once_and_each_run_finds_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, made = Server(), []

    @contextmanager
    def for_vllm(url: str, *, builder: Any, **options: Any) -> Any:
        made.append(options)
        yield Orderer()

    def serve(cell: Any, orderers: Sequence[Any], *arguments: Any) -> dict[str, list[int]]:
        requests = arguments[2]
        assert len(orderers) == cell.orderers
        return {"prompt_tokens": [100] * len(requests), "cached_tokens": [10 * cell.orderers] * len(requests)}

    monkeypatch.setattr(workers.SeveralOrderers, "start", lambda self: (server, None))
    monkeypatch.setattr(workers.TimedOrderer, "for_vllm", for_vllm)
    monkeypatch.setattr(workers, "serve", serve)
    asked = ("workers", "--engine", "openai", "--seeds", "0,1", "--limit", 7)
    assert "10 runs served" in run_suites(tmp_path, *asked, orderers="1,4")
    lines = result_lines(tmp_path)[1:]
    order = [(line["seed"], line["cell"]["orderers"], line["policy"]) for line in lines]
    several = [(0, count, policy) for count in (1, 4) for policy in ("mirror", "events")]
    assert order[:5] == [(0, 1, "retrieval"), *several]
    # Another seed begins with another policy.
    assert order[5:7] == [(1, 1, "mirror"), (1, 1, "events")]
    assert {len(line["rows"]["cached_tokens"]) for line in lines} == {7}
    assert server.resets == 10
    assert made[0] == {"keep_first": 5}
    assert made[2]["events_endpoint"] == "ipc://events"
    assert "0 runs served" in run_suites(tmp_path, *asked, orderers="1,4")
    assert "| events | 40.0 |" in page_of(tmp_path)
