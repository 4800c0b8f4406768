"""Several orderers before one server, measured: the questions, and what is printed of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("openai")
pytest.importorskip("bm25s")

from ragorder.eval.experiments.workers import measuring as workers


def test_questions_are_of_some_topics_far_more_than_of_others_and_the_same_every_time() -> None:
    requests = workers.questions_by_topic(400, 3, 5)
    assert [len(request.documents) for request in requests] == [5] * 400
    assert requests == workers.questions_by_topic(400, 3, 5) != workers.questions_by_topic(400, 4, 5)
    asked = Counter(document.id for request in requests for document in request.documents)
    assert max(asked.values()) > 40 > 4 * sorted(asked.values())[len(asked) // 2]


def test_every_option_is_passed_on_and_the_environment_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(counts: Any, **options: Any) -> Iterator[Any]:
        calls.append((tuple(counts), options))
        for seed in options["seeds"]:
            for count, knows in ((1, "retrieval order"), (8, "mirror"), (8, "events")):
                yield workers._Row(count, knows, seed, 0.25 * (1 + seed), 1000, 2.5, 0.125)

    monkeypatch.setattr(workers, "measure", measure)
    options = [
        "--orderers=8",
        "--questions=7",
        "--seed=0",
        "--seed=1",
        "--top-k=3",
        "--prompts=messages",
        "--concurrency=2",
    ]
    said = CliRunner().invoke(workers.main, options, catch_exceptions=False).output
    limits = {"questions": 7, "seeds": (0, 1), "top_k": 3, "prompts": "messages", "concurrency": 2}
    assert calls == [((8,), limits)]
    assert "8 x events          37.5% cached (25.0% 50.0%), predictions off by 2.5 tokens" in said
    assert "python: 3." in said
    told = json.loads(CliRunner().invoke(workers.main, [*options, "--json"], catch_exceptions=False).output)
    assert len(told["rows"]) == 6 and told["environment"]["cores"]
    assert all(getattr(option, "help", None) for option in workers.main.params)
