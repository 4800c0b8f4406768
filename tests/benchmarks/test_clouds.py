"""Simulated clouds, which are strict about their rules, and what prompts and conversations cost there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.rings import grid

from ragorder.benchmarks.chats.clouds.experiment import Clouds, serve, serve_conversations, talks
from ragorder.benchmarks.chats.clouds.policies import CHATS, POLICIES, CloudsCell
from ragorder.benchmarks.common.clouds import CloudAnswer, CloudError, SimulatedCloud
from ragorder.clouds import CacheRules, PromptParts, anthropic_content, cache_rules
from ragorder.eval.data.workloads import make_workload

ANTHROPIC = cache_rules("anthropic", "claude-opus-5")
OPENAI = cache_rules("openai", "gpt-5.6")
SYSTEM, QUESTION = "s" * 2400, "q" * 240


def text(name: str, tokens: int = 600) -> str:
    return (name * 4 * tokens)[: 4 * tokens]


def anthropic(documents: str, *marks: int, **fields: Any) -> dict[str, Any]:
    return PromptParts(SYSTEM, [text(each) for each in documents], QUESTION, marks, "5m").anthropic() | fields


def openai(documents: str, *marks: int, explicit: bool = True) -> dict[str, Any]:
    return PromptParts(SYSTEM, [text(each) for each in documents], QUESTION, marks, "30m", explicit=explicit).openai()


def ask(cloud: SimulatedCloud, body: dict[str, Any], now_s: float = 0.0) -> CloudAnswer:
    answer = cloud.begin(body, now_s)
    cloud.first_token(answer)
    return answer


class TestMarks:
    def test_a_request_resumes_at_a_mark_that_an_earlier_one_wrote(self) -> None:
        cloud = SimulatedCloud(ANTHROPIC)
        first = ask(cloud, anthropic("abc", 2))
        assert (first.prompt_tokens, first.cached_tokens, first.written_tokens) == (2460, 0, 1800)
        second = ask(cloud, anthropic("abd", 2))
        assert (second.cached_tokens, second.written_tokens) == (1800, 0)
        assert ask(cloud, anthropic("acb", 2)).cached_tokens == 0
        assert ask(cloud, anthropic("a", 1)).cached_tokens == 0, "nothing was marked there"

    def test_it_writes_up_to_its_last_mark(self) -> None:
        cloud = SimulatedCloud(ANTHROPIC)
        ask(cloud, anthropic("abc", 0, 1))
        answer = ask(cloud, anthropic("abc", 0, 1, 3))
        assert (answer.cached_tokens, answer.written_tokens) == (1200, 1200)

    def test_nothing_is_read_before_its_writers_first_token(self) -> None:
        cloud = SimulatedCloud(ANTHROPIC)
        first = cloud.begin(anthropic("ab", 2), 0.0)
        assert cloud.begin(anthropic("ab", 2), 0.5).cached_tokens == 0
        cloud.first_token(first)
        assert cloud.begin(anthropic("ab", 2), 1.0).cached_tokens == 1800

    def test_entries_live_from_the_start_of_a_request_and_again_when_read(self) -> None:
        cloud = SimulatedCloud(ANTHROPIC)
        ask(cloud, anthropic("ab", 2), 0.0)
        assert ask(cloud, anthropic("ab", 2), 299.0).cached_tokens == 1800
        assert ask(cloud, anthropic("ab", 2), 598.0).cached_tokens == 1800
        assert ask(cloud, anthropic("ab", 2), 898.0).cached_tokens == 0

    def test_five_marks_are_refused(self) -> None:
        cloud = SimulatedCloud(ANTHROPIC)
        with pytest.raises(CloudError, match="4 marks"):
            cloud.begin(anthropic("abcd", 0, 1, 2, 3, 4), 0.0)
        with pytest.raises(CloudError, match="4 marks"):
            cloud.begin(anthropic("abcd", 1, 2, 3, 4, cache_control={"type": "ephemeral"}), 0.0)

    def test_at_openai_the_latest_four_marks_are_written(self) -> None:
        cloud = SimulatedCloud(OPENAI)
        ask(cloud, openai("abcde", 1, 2, 3, 4, 5))
        found = [cloud.begin(openai("abcde", mark), 1.0).cached_tokens for mark in range(1, 6)]
        assert found == [0, 1800, 2400, 3000, 3600]
        implicit = SimulatedCloud(OPENAI)
        ask(implicit, openai("abcd", 1, 2, 3, 4, explicit=False))
        found = [implicit.begin(openai("abcd", mark), 1.0).cached_tokens for mark in range(1, 5)]
        assert found == [0, 1800, 2400, 3000], "the provider's own is one of the four"

    def test_at_openai_the_first_two_marks_and_the_latest_fifty_are_looked_at(self) -> None:
        many = "".join(chr(number) for number in range(ord("A"), ord("A") + 60))
        for written, is_found in ((1, True), (2, True), (3, False), (10, False), (11, True)):
            cloud = SimulatedCloud(OPENAI)
            ask(cloud, openai(many, written))
            cached = cloud.begin(openai(many, *range(1, 61)), 1.0).cached_tokens
            assert cached == (600 + 600 * written) * is_found, written

    @pytest.mark.parametrize("provider", ["anthropic", "bedrock"])
    def test_marks_of_an_hour_stand_before_those_of_five_minutes(self, provider: Any) -> None:
        def body(system: str, user: str) -> dict[str, Any]:
            one, other = (
                getattr(PromptParts(SYSTEM, [text("a")], QUESTION, [0, 1], ttl), provider)() for ttl in (system, user)
            )
            return {"system": one["system"], "messages": other["messages"]}

        cloud = SimulatedCloud(cache_rules(provider, "claude-opus-5", "1h"))
        assert cloud.begin(body("1h", "5m"), 0.0).written_tokens == 1200
        with pytest.raises(CloudError, match="an hour"):
            cloud.begin(body("5m", "1h"), 0.0)

    @pytest.mark.parametrize(
        ("rules", "body"),
        [(replace(ANTHROPIC, minimum_tokens=4096), anthropic("abcd", 0, 2, 4)), (OPENAI, openai("abc"))],
        ids=["prefixes shorter than the minimum", "explicit mode without marks"],
    )
    def test_nothing_is_cached_of(self, rules: CacheRules, body: dict[str, Any]) -> None:
        cloud = SimulatedCloud(rules)
        for _ in range(2):
            answer = ask(cloud, body)
            assert (answer.cached_tokens, answer.written_tokens) == (0, 0)

    def test_an_entry_is_looked_for_twenty_parts_back_or_at_openai_only_at_the_requests_marks(self) -> None:
        cloud = SimulatedCloud(ANTHROPIC)
        ask(cloud, anthropic("a", 1))
        many = "abcdefghijklmnopqrstuvwxyz"
        assert cloud.begin(anthropic(many[:20], 20), 1.0).cached_tokens == 1200
        assert cloud.begin(anthropic(many[:21], 21), 1.0).cached_tokens == 0
        cloud = SimulatedCloud(OPENAI)
        ask(cloud, openai("a", 1))
        assert cloud.begin(openai("ab", 2), 1.0).cached_tokens == 0
        assert cloud.begin(openai("ab", 1, 2), 1.0).cached_tokens == 1200

    def test_the_automatic_mark_stands_after_the_question(self) -> None:
        for cloud, body in (
            (SimulatedCloud(ANTHROPIC), anthropic("ab", cache_control={"type": "ephemeral"})),
            (SimulatedCloud(OPENAI), openai("ab", explicit=False)),
        ):
            assert ask(cloud, body).written_tokens == 1860
            assert ask(cloud, body, 1.0).cached_tokens == 1860
            changed = {**body, "messages": [*body["messages"][:-1], {"content": [*_content(body)[:-1], {"text": "?"}]}]}
            assert ask(cloud, changed, 2.0).cached_tokens == 0

    def test_intervals_need_no_marks(self) -> None:
        cloud = SimulatedCloud(cache_rules("openai", "gpt-5.4"))
        ask(cloud, openai("abc", explicit=False))
        answer = ask(cloud, openai("abd", explicit=False))
        assert (answer.cached_tokens, answer.written_tokens) == (1800 // 128 * 128, 0)

    def test_converse_has_marks_that_are_parts(self) -> None:
        cloud = SimulatedCloud(cache_rules("bedrock", "claude-opus-5"))
        body = PromptParts(SYSTEM, [text("a"), text("b")], QUESTION, [0, 2]).bedrock()
        assert ask(cloud, body).written_tokens == 1800
        usage = {"cacheReadInputTokens": 1800, "cacheWriteInputTokens": 0, "inputTokens": 60}
        assert cloud.usage(ask(cloud, body, 1.0)) == usage


def _content(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body["messages"][-1]["content"]
    return found


def test_marks_of_content_are_read_as_they_were_made() -> None:
    cloud = SimulatedCloud(CacheRules("mine", minimum_tokens=0, usage=ANTHROPIC.usage))
    body = {"messages": [{"role": "user", "content": anthropic_content(["abcd", "efgh", "ijkl"], [2])}]}
    assert cloud.begin(body, 0.0).written_tokens == 2


def cell(**fields: Any) -> CloudsCell:
    return CloudsCell.read({"workload": "mix8", **fields}, "here")


def run(workload: str, policy: str, rules: CacheRules, requests: int, seed: int = 0, **fields: Any) -> Any:
    rankings = make_workload(workload, seed, requests=requests).rankings[:requests]
    return record(serve(rankings, cell(**fields), rules, policy, seed), policy, rules, workload=workload)


def talk(policy: str, rules: CacheRules, requests: int = 300, seed: int = 0, **fields: Any) -> Any:
    chats = cell(workload="conversations", **fields)
    turns = talks(requests // chats.turns, chats.turns, seed)
    return record(serve_conversations(turns, chats, rules, policy, seed), policy, rules, **chats.fields)


def record(rows: Any, policy: str, rules: CacheRules, **fields: Any) -> Any:
    facts = {"write": rules.write, "read": rules.read}
    return Clouds.record(suite="mine", policy=policy, cell=fields, rows=rows, facts=facts)


class TestCosts:
    def test_an_automatic_mark_costs_more_than_no_cache(self) -> None:
        assert run("mix8", "automatic", ANTHROPIC, 200).cost == pytest.approx(1.25, abs=0.001)

    @pytest.mark.parametrize(
        ("rules", "gap_s"), [(ANTHROPIC, 2.0), (OPENAI, 30.0), (cache_rules("openai", "gpt-5.4"), 2.0)]
    )
    def test_what_is_predicted_is_found(self, rules: CacheRules, gap_s: float) -> None:
        for workload in ("mix8", "zipf10"):
            found = run(workload, "ragorder", rules, 300, gap_s=gap_s)
            assert found.exact is not None and found.exact >= 0.99

    @pytest.mark.parametrize("workload", ["mix8", "mix64", "zipf10"])
    def test_orders_with_marks_where_they_are_expected_to_be_read_save_most(self, workload: str) -> None:
        ours = run(workload, "ragorder", ANTHROPIC, 500).cost
        others = [run(workload, policy, ANTHROPIC, 500).cost for policy in POLICIES if policy != "ragorder"]
        assert ours < min(others)
        assert ours < 0.9

    @pytest.mark.parametrize("seed", grid([0, 1, 2], 1))
    @pytest.mark.parametrize("workload", ["unique", "disjoint", "mix64"])
    @pytest.mark.parametrize("ttl", ["5m", "1h"])
    def test_never_more_than_three_points_above_no_cache(self, workload: str, ttl: str, seed: int) -> None:
        rules = cache_rules("anthropic", "claude-opus-5", ttl)
        found = run(workload, "ragorder", rules, 1000, seed, system_tokens=60, gap_s=40.0)
        assert found.cost <= 1.03 and found.worst <= 1.03

    def test_every_policy_serves_the_same_prompts(self) -> None:
        found = [run("mix8", policy, ANTHROPIC, 50).rows["prompt_tokens"] for policy in POLICIES]
        assert all(each == found[0] for each in found)
        assert found[0] == [600 + 5 * 600 + 60] * 50


class TestConversations:
    def test_a_turn_finds_five_of_its_topics_eight_documents(self) -> None:
        for turns in talks(30, 4, 0):
            assert all(len(set(ranking)) == 5 for ranking in turns)
            assert len({number // 8 for ranking in turns for number in ranking}) == 1
        assert talks(30, 4, 0) == talks(30, 4, 0) != talks(30, 4, 1)

    @pytest.mark.parametrize("rules", [ANTHROPIC, OPENAI])
    def test_turns_with_marks_where_they_are_expected_to_be_read_cost_least(self, rules: CacheRules) -> None:
        appended = talk("automatic", rules)
        bills = {policy: talk(policy, rules).cost_of(appended) for policy in CHATS}
        assert min(bills, key=bills.__getitem__) == "ragorder"
        # A history is read each turn; without marks after it, nothing but the system prompt is.
        assert bills["automatic"] < 0.7 < bills["system prompt"]

    @pytest.mark.parametrize("rules", [ANTHROPIC, OPENAI])
    def test_what_is_predicted_is_found(self, rules: CacheRules) -> None:
        found = talk("ragorder", rules)
        assert found.exact is not None and found.exact >= 0.99

    @pytest.mark.parametrize("seed", grid([0, 1, 2], 1))
    @pytest.mark.parametrize(
        "fields", [{"pause_s": 1200.0}, {"turns": 1, "gap_s": 30.0}, {"turns": 2, "pause_s": 250.0}]
    )
    @pytest.mark.parametrize("ttl", ["5m", "1h"])
    def test_never_more_than_three_points_above_no_cache(self, ttl: str, fields: dict[str, Any], seed: int) -> None:
        found = talk("ragorder", cache_rules("anthropic", "claude-opus-5", ttl), 1200, seed, **fields)
        assert found.cost <= 1.03 and found.worst <= 1.03

    def test_every_policy_answers_the_same_turns(self) -> None:
        assert {len(talk(policy, ANTHROPIC, 60).rows["prompt_tokens"]) for policy in CHATS} == {60}
        appended = [talk(policy, ANTHROPIC, 60).rows["prompt_tokens"] for policy in CHATS if policy != "ragorder"]
        assert all(each == appended[0] for each in appended)
        assert sum(talk("ragorder", ANTHROPIC, 60).rows["prompt_tokens"]) < 0.8 * sum(appended[0])
