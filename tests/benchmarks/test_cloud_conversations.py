"""What conversations cost at simulated clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.rings import grid
from support.suites import page_of, run_suites

from ragorder.benchmarks.chats.clouds.experiment import Clouds, serve_conversations, talks
from ragorder.benchmarks.chats.clouds.policies import CHATS, CloudsCell
from ragorder.clouds import CacheRules, cache_rules

ANTHROPIC = cache_rules("anthropic", "claude-opus-5")
OPENAI = cache_rules("openai", "gpt-5.6")


def run(policy: str, rules: CacheRules, requests: int = 300, seed: int = 0, **fields: Any) -> Any:
    cell = CloudsCell.read({"workload": "conversations", **fields}, "here")
    rows = serve_conversations(talks(requests // cell.turns, cell.turns, seed), cell, rules, policy, seed)
    return Clouds.record(
        suite="mine", policy=policy, cell=cell.fields, rows=rows, facts={"write": rules.write, "read": rules.read}
    )


def test_a_turn_finds_five_of_its_topics_eight_documents() -> None:
    for turns in talks(30, 4, 0):
        assert all(len(set(ranking)) == 5 for ranking in turns)
        assert len({number // 8 for ranking in turns for number in ranking}) == 1
    assert talks(30, 4, 0) == talks(30, 4, 0) != talks(30, 4, 1)


@pytest.mark.parametrize("rules", [ANTHROPIC, OPENAI])
def test_turns_with_marks_where_they_are_expected_to_be_read_cost_least(rules: CacheRules) -> None:
    appended = run("automatic", rules)
    bills = {policy: run(policy, rules).cost_of(appended) for policy in CHATS}
    assert min(bills, key=bills.__getitem__) == "ragorder"
    # A history is read each turn; without marks after it, nothing but the system prompt is.
    assert bills["automatic"] < 0.7 < bills["system prompt"]


@pytest.mark.parametrize("rules", [ANTHROPIC, OPENAI])
def test_what_is_predicted_is_found(rules: CacheRules) -> None:
    found = run("ragorder", rules)
    assert found.exact is not None and found.exact >= 0.99


@pytest.mark.parametrize("seed", grid([0, 1, 2], 1))
@pytest.mark.parametrize("fields", [{"pause_s": 1200.0}, {"turns": 1, "gap_s": 30.0}, {"turns": 2, "pause_s": 250.0}])
@pytest.mark.parametrize("ttl", ["5m", "1h"])
def test_never_more_than_three_points_above_no_cache(ttl: str, fields: dict[str, Any], seed: int) -> None:
    found = run("ragorder", cache_rules("anthropic", "claude-opus-5", ttl), 1200, seed, **fields)
    assert found.cost <= 1.03 and found.worst <= 1.03


def test_every_policy_answers_the_same_turns() -> None:
    assert {len(run(policy, ANTHROPIC, 60).rows["prompt_tokens"]) for policy in CHATS} == {60}
    appended = [run(policy, ANTHROPIC, 60).rows["prompt_tokens"] for policy in CHATS if policy != "ragorder"]
    assert all(each == appended[0] for each in appended)
    assert sum(run("ragorder", ANTHROPIC, 60).rows["prompt_tokens"]) < 0.8 * sum(appended[0])


def test_other_policies_send_no_conversations(tmp_path: Path) -> None:
    asked = ("clouds", "--reduced", "--seeds", 0, "--limit", 12)
    assert "4 runs served, 3 unavailable" in run_suites(tmp_path, *asked, workload="conversations")
    assert "conversations are sent by automatic, system prompt" in " ".join(page_of(tmp_path).split())
