"""Orders and marks for clouds: tables of rules, prompts in parts, what is predicted, reported and paid."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples

from ragorder import Document, Orderer, Ordering, PromptBuilder
from ragorder.benchmarks.common.clouds import SimulatedCloud
from ragorder.clouds import (
    CacheRules,
    Prices,
    PromptParts,
    anthropic_content,
    bedrock_content,
    cache_rules,
    openai_content,
    read_cloud_usage,
    tables,
)
from ragorder.ordering import RequestOutcome
from ragorder.tokens import special_token_escaper

SYSTEM = "Answer from the documents. " * 90
DOCUMENTS = [Document(name, f"About {name}. " * 200) for name in ("cats", "dogs", "owls", "bees", "ants")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    provider: Any = "anthropic", model: str = "claude-opus-5", **options: Any
) -> tuple[Orderer, PromptBuilder, Clock]:
    builder, clock = PromptBuilder(SYSTEM), Clock()
    given = {"model": model, "builder": builder, "clock": clock, "strict": True} | options
    return Orderer.for_cloud(provider, **given), builder, clock


def serve(orderer: Orderer, documents: Sequence[Document], **options: Any) -> Ordering[Document]:
    ordering = orderer.order(documents, **options)
    ordering.confirm()
    return ordering


class TestTables:
    @pytest.mark.parametrize(
        ("provider", "model", "minimum", "read"),
        [
            ("anthropic", "claude-opus-5-5", 512, 0.05),
            ("anthropic", "claude-opus-5", 512, 0.1),
            ("anthropic", "claude-opus-4-5-20251101", 4096, 0.1),
            ("anthropic", "anthropic/claude-haiku-4-5", 4096, 0.1),
            ("anthropic", "claude-fable-5-1", 512, 0.025),
            ("bedrock", "us.anthropic.claude-opus-4-7-20260416-v1:0", 2048, 0.1),
            ("openai", "gpt-5.6-terra", 1024, 0.1),
            ("openai", "openai/gpt-6.1-sol", 1024, 0.05),
            ("openai", "gpt-5.4-mini-2026-03-17", 1024, 0.1),
            ("openai", "gpt-4o-mini", 1024, 0.5),
            ("deepseek", "deepseek-chat", 64, 0.1),
        ],
    )
    def test_know_a_model_by_its_generation(self, provider: str, model: str, minimum: int, read: float) -> None:
        rules = cache_rules(provider, model)
        assert (rules.minimum_tokens, rules.read) == (minimum, read)
        assert rules.date and rules.source and rules.usage is not None

    def test_prices_of_writes_follow_from_the_lifetime(self) -> None:
        found = [cache_rules("anthropic", "claude-opus-5", ttl) for ttl in (None, "5m", "1h")]
        assert [(rules.ttl_s, rules.write) for rules in found] == [(300, 1.25), (300, 1.25), (3600, 2.0)]
        assert cache_rules("openai", "gpt-5.6").ttl_s == 1800
        assert cache_rules("openai", "gpt-5.6", "12h").write == 2.5

    def test_generations_before_marks_have_intervals(self) -> None:
        for model, interval in (("gpt-5.5", 2048), ("gpt-5.4", 128)):
            rules = cache_rules("openai", model)
            assert (rules.resume, rules.interval_tokens, rules.marks, rules.write) == ("interval", interval, 0, 1.0)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("azure", "gpt-5.6"), "choose from anthropic, bedrock, deepseek, openai"),
            (("anthropic", "claude-opus-9"), "CacheRules"),
            (("anthropic", "claude-opus-5-7"), "CacheRules"),
            (("openai", "gpt-5.60"), "CacheRules"),
            # Not a name: comparing it with the table's could take minutes.
            (("openai", "gpt-5.6" + "-latest" * 8_000), "CacheRules"),
            (("anthropic", "claude-opus-5", "2h"), "choose from 5m, 1h"),
            (("openai", "gpt-5.4", "12h"), "'gpt-5.4' have one fixed TTL: leave ttl out"),
        ],
    )
    def test_unknown_models_and_lifetimes_are_named(self, arguments: tuple[str, ...], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            cache_rules(*arguments)


class TestOrders:
    def test_the_same_documents_resume_at_a_mark(self) -> None:
        orderer, builder, _ = make()
        first = serve(orderer, DOCUMENTS)
        assert first.cached_tokens == 0 and 0 < len(first.breakpoints) <= 4
        second, mark = orderer.order(DOCUMENTS[::-1]), first.breakpoints[-1]
        shared = first.documents[:mark]
        assert second.documents[:mark] == shared
        assert second.cached_tokens == builder.prefix_tokens + sum(map(builder.document_tokens, shared))
        assert mark in second.breakpoints
        assert (second.prefix_documents, second.fallback) == (mark, False)

    def test_nothing_can_be_read_before_the_first_token(self) -> None:
        orderer, _, _ = make()
        first = orderer.order(DOCUMENTS)
        assert orderer.predict_cached_tokens(DOCUMENTS)[0] == 0
        first.readable()
        assert orderer.predict_cached_tokens(DOCUMENTS)[0] > 0
        second = orderer.order(DOCUMENTS)
        assert second.cached_tokens > 0
        first.confirm()
        second.discard()

    def test_entries_age_from_the_start_of_the_last_request_that_used_them(self) -> None:
        orderer, _, clock = make()
        ordering = orderer.order(DOCUMENTS)
        clock.now += 100
        ordering.confirm()
        clock.now += 199
        assert orderer.predict_cached_tokens(DOCUMENTS)[0] > 0
        clock.now += 2
        assert orderer.predict_cached_tokens(DOCUMENTS)[0] == 0
        serve(orderer, DOCUMENTS)
        for _ in range(4):
            clock.now += 299
            assert serve(orderer, DOCUMENTS).cached_tokens > 0
        clock.now += 301
        assert orderer.order(DOCUMENTS).cached_tokens == 0

    def test_tenants_see_only_themselves(self) -> None:
        orderer, _, _ = make()
        serve(orderer, DOCUMENTS, scope="a")
        assert orderer.order(DOCUMENTS, scope="b").cached_tokens == 0
        assert orderer.order(DOCUMENTS, scope="a").cached_tokens > 0

    def test_prompts_below_the_minimum_get_no_marks(self) -> None:
        orderer, _, _ = make(model="claude-haiku-4-5")
        for _ in range(3):
            ordering = serve(orderer, DOCUMENTS)
            assert (ordering.breakpoints, ordering.cached_tokens) == ((), 0)
            assert ordering.cost is not None and ordering.cost.share == 1

    @pytest.mark.parametrize("missing", [0, 1])
    def test_a_prompt_of_exactly_the_minimum_is_cached(self, missing: int) -> None:
        _, builder, _ = make()
        end = builder.prefix_tokens + sum(map(builder.document_tokens, DOCUMENTS))
        rules = CacheRules("mine", minimum_tokens=end + missing, write=1.0)
        orderer = Orderer.for_rules(rules, builder=builder, strict=True)
        serve(orderer, DOCUMENTS)
        assert orderer.order(DOCUMENTS).cached_tokens == (0 if missing else end)

    def test_caches_with_intervals_need_no_marks(self) -> None:
        orderer, builder, _ = make("openai", "gpt-5.4")
        serve(orderer, DOCUMENTS)
        second = orderer.order(DOCUMENTS[::-1])
        end = builder.prefix_tokens + sum(map(builder.document_tokens, DOCUMENTS))
        assert second.cached_tokens == end // 128 * 128
        assert second.breakpoints == ()

    def test_a_batch_is_planned_on_a_copy_and_served_whole(self) -> None:
        orderer, _, _ = make()
        rng = random.Random(0)
        requests = [rng.sample(DOCUMENTS, 3) for _ in range(12)]
        served = []
        for ordering in orderer.order_batch(requests):
            served.append(ordering.index)
            assert sorted(map(id, ordering.documents)) == sorted(map(id, requests[ordering.index]))
            ordering.readable()
            ordering.confirm()
        assert sorted(served) == list(range(12))
        assert orderer.fallbacks == 0

    def test_a_request_without_documents_is_served(self) -> None:
        orderer, builder, _ = make()
        ordering = serve(orderer, [])
        assert ordering.documents == [] and set(ordering.breakpoints) <= {0}
        assert builder.build("?", ordering).anthropic()["messages"]

    def test_failed_requests_and_previews_leave_nothing(self) -> None:
        orderer, _, _ = make()
        orderer.order(DOCUMENTS).discard()
        assert orderer.tree_size == 0
        assert serve(orderer, DOCUMENTS).cached_tokens == 0
        before = orderer.predict_cached_tokens(DOCUMENTS), orderer.tree_size
        orderer.preview(DOCUMENTS[::-1])
        assert (orderer.predict_cached_tokens(DOCUMENTS), orderer.tree_size) == before

    def test_guards_hold(self) -> None:
        orderer, _, _ = make(keep_first=1)
        serve(orderer, DOCUMENTS)
        assert orderer.order(DOCUMENTS[::-1]).documents[0].id == "ants"

    def test_clones_and_copies_start_cold(self) -> None:
        orderer = Orderer.for_cloud("anthropic", model="claude-opus-5")
        serve(orderer, DOCUMENTS)
        for other in (orderer.clone(moves="prefix"), copy.deepcopy(orderer), pickle.loads(pickle.dumps(orderer))):  # noqa: S301
            assert other.order(DOCUMENTS).cached_tokens == 0
            assert other.order(DOCUMENTS).cloud is not None
        assert "Anthropic, claude-opus-5" in repr(orderer)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"residency": "none"}, "residency is not for a cache with rules"),
            ({"reuse": "fused"}, "reuse is not for a cache with rules"),
            ({"host_tokens": 5}, "host_tokens is not for a cache with rules"),
            ({"events_endpoint": "tcp://h:1"}, "events_endpoint is not for a cache with rules"),
        ],
    )
    def test_what_is_not_for_such_caches_is_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            Orderer.for_rules(CacheRules("mine"), **options)

    def test_other_orderers_have_no_marks(self) -> None:
        ordering = Orderer(strict=True).order(DOCUMENTS)
        ordering.readable()
        ordering.confirm(0, written_tokens=5)
        assert (ordering.breakpoints, ordering.cost, ordering.cloud) == ((), None, None)


# Cached, written and prompt tokens.
READ = (600, 300, 1000)
READ_DETAILS = {"cached_tokens": 600, "cache_write_tokens": 300}


class TestReports:
    def test_cost_follows_from_the_tokens_found_and_written_and_is_in_the_outcome(self) -> None:
        orderer, _, _ = make()
        ordering = orderer.order(DOCUMENTS)
        assert ordering.cost is not None and not ordering.cost.reported
        outcomes: list[RequestOutcome] = []
        ordering.add_done_callback(outcomes.append)
        ordering.confirm(600, prompt_tokens=4000, written_tokens=2000)
        cost = ordering.cost
        assert outcomes == [(True, 600, None, 4000)] and outcomes[0].cost == cost
        assert (cost.prompt_tokens, cost.cached_tokens, cost.written_tokens) == (4000, 600, 2000)
        assert cost.input_tokens == pytest.approx(60 + 2500 + 1400)
        assert cost.reported and cost.share == pytest.approx(3960 / 4000)
        assert (cost.price, cost.currency, cost.prices_date) == (5.0, "USD", "2026-11-23")
        assert cost.money == pytest.approx(3960 * 5 / 1e6)
        assert cost.saved_money == pytest.approx(40 * 5 / 1e6)

    def test_a_second_report_is_ignored(self) -> None:
        orderer, _, _ = make()
        ordering = orderer.order(DOCUMENTS)
        ordering.confirm(0, prompt_tokens=4000, written_tokens=0)
        ordering.confirm(4000, prompt_tokens=4000)
        assert ordering.cost is not None and ordering.cost.cached_tokens == 0

    def test_a_provider_that_found_nothing_is_believed(self) -> None:
        orderer, _, _ = make()
        serve(orderer, DOCUMENTS)
        ordering = orderer.order(DOCUMENTS)
        assert ordering.cached_tokens > 0
        ordering.readable()
        ordering.confirm(0, prompt_tokens=4000, written_tokens=0)
        assert orderer.order(DOCUMENTS).cached_tokens == 0

    @pytest.mark.parametrize(("percent", "kept"), [(85, True), (50, False)])
    def test_reports_correct_estimated_lengths_only_if_clearly_different(self, percent: int, kept: bool) -> None:
        rules = CacheRules("mine", marks=1, lookback_parts=20, write=1.0)
        orderer = Orderer.for_rules(rules, builder=PromptBuilder(SYSTEM), strict=True)
        for documents in (DOCUMENTS[:4], DOCUMENTS):
            serve(orderer, documents)
        ordering = orderer.order(DOCUMENTS)
        assert ordering.prefix_documents == 5
        ordering.confirm(ordering.cached_tokens * percent // 100)
        assert orderer.order(DOCUMENTS[:4]).prefix_documents == (4 if kept else 0)

    @pytest.mark.parametrize(
        ("usage", "read"),
        [
            ({"input_tokens": 100, "cache_read_input_tokens": 600, "cache_creation_input_tokens": 300}, READ),
            ({"inputTokens": 100, "cacheReadInputTokens": 600, "cacheWriteInputTokens": 300}, READ),
            ({"prompt_tokens": 1000, "prompt_tokens_details": READ_DETAILS}, READ),
            ({"input_tokens": 1000, "input_tokens_details": READ_DETAILS}, READ),
            ({"prompt_cache_hit_tokens": 600, "prompt_tokens": 1000}, (600, None, 1000)),
            ({"input_tokens": 100, "cache_read_input_tokens": 0}, (0, None, 100)),
            ({"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 600}}, (None, None, 500)),
            ({"prompt_tokens": 1000, "prompt_tokens_details": None}, (None, None, None)),
            (None, (None, None, None)),
        ],
    )
    def test_usage_is_read_in_each_providers_words(self, usage: Any, read: tuple[int | None, ...]) -> None:
        assert read_cloud_usage(usage) == read

    def test_what_a_cloud_reports_is_read_by_its_rules(self) -> None:
        for provider, model in (("anthropic", "claude-opus-5"), ("bedrock", "claude-opus-5"), ("openai", "gpt-5.6")):
            orderer, builder, _ = make(provider, model)
            rules = cache_rules(provider, model)
            cloud = SimulatedCloud(rules)
            prompt = builder.build("Who hunts?", orderer.order(DOCUMENTS))
            answer = cloud.begin(prompt.openai() if provider == "openai" else prompt.anthropic(), 0.0)
            read = read_cloud_usage(cloud.usage(answer), rules)
            assert read == (answer.cached_tokens, answer.written_tokens, answer.prompt_tokens)


class TestPrices:
    def test_are_read_from_a_file_that_users_edit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "prices.toml"
        file.write_text('date = "2027-01-01"\ncurrency = "EUR"\n[per_million]\n"claude-opus-5" = 2\n', "utf-8")
        for options in ({"prices": file}, {"prices": Prices.load(file)}):
            cost = make(**options)[0].order(DOCUMENTS).cost
            assert cost is not None
            assert (cost.price, cost.currency, cost.prices_date) == (2.0, "EUR", "2027-01-01")
        monkeypatch.setenv("RAGORDER_PRICES", str(file))
        assert Prices.load().of("claude-opus-5-20270101") == 2.0
        assert Prices.load().of("claude-opus-5-5") is None

    def test_a_model_without_one_costs_tokens_alone(self) -> None:
        cost = Orderer.for_rules(CacheRules("mine"), model="mine-1").order(DOCUMENTS).cost
        assert cost is not None and (cost.price, cost.money, cost.saved_money) == (None, None, None)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("date = ", "not TOML"),
            ("currency = 'USD'", "date and currency must be given"),
            *(
                (f"date = '2027'\n[per_million]\nmodel = {price}", "model: .* is no price")
                for price in ("'dear'", "-1", "true", "nan", "inf", "9" * 400)
            ),
            ("date = '2027'\nper_million = 5", "must be a table"),
        ],
    )
    def test_a_wrong_file_is_named(self, tmp_path: Path, text: str, problem: str) -> None:
        file = tmp_path / "wrong.toml"
        file.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=rf"wrong\.toml: .*{problem}"):
            Prices.load(file)
        with pytest.raises(OSError, match="absent"):
            Prices.load(tmp_path / "absent.toml")

    def test_every_priced_model_has_rules(self) -> None:
        for model in Prices.load(Path(tables.__file__).with_name("prices.toml")).per_million:
            provider = {"c": "anthropic", "g": "openai", "d": "deepseek"}[model[0]]
            assert cache_rules(provider, model).name


PIECES = ["<", "|", "<|", "|>", "im_", "end", "<|im_", "_end|>", "a", " "]


class TestPrompts:
    def test_have_one_part_a_document_and_marks_at_the_breakpoints(self) -> None:
        orderer, builder, _ = make()
        serve(orderer, DOCUMENTS)
        ordering = orderer.order(DOCUMENTS)
        body = builder.build("Who hunts?", ordering).anthropic()
        (message,) = body["messages"]
        parts = message["content"]
        assert len(parts) == len(DOCUMENTS) + 1
        for document, part in zip(ordering.documents, parts, strict=False):
            assert part["text"] == f"[{document.id}]\n{document.text}\n\n"
        assert parts[-1] == {"type": "text", "text": "Question: Who hunts?"}
        marked = [place for place, part in enumerate(parts, 1) if "cache_control" in part]
        assert marked == [mark for mark in ordering.breakpoints if mark]
        assert ("cache_control" in body["system"][0]) == (0 in ordering.breakpoints)
        assert body["system"][0]["text"] == SYSTEM

    def test_openai_is_told_that_marks_are_explicit(self) -> None:
        orderer, builder, _ = make("openai", "gpt-5.6")
        ordering = serve(orderer, DOCUMENTS)
        body = builder.build("Who hunts?", ordering).openai()
        assert body["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        parts = body["messages"][1]["content"]
        marked = [place for place, part in enumerate(parts, 1) if "prompt_cache_breakpoint" in part]
        assert marked == [mark for mark in ordering.breakpoints if mark]

    @pytest.mark.parametrize(("provider", "model"), [("openai", "gpt-5.4"), ("deepseek", "deepseek-chat")])
    def test_models_without_marks_get_texts_alone(self, provider: str, model: str) -> None:
        """DeepSeek refuses parts: "invalid type: sequence, expected a string"."""
        orderer, builder, _ = make(provider, model)
        prompt = builder.build("?", orderer.order(DOCUMENTS))
        assert prompt.openai() == {"messages": prompt.messages}
        assert all(isinstance(message["content"], str) for message in prompt.openai()["messages"])

    def test_bedrock_has_parts_that_are_marks(self) -> None:
        orderer, builder, _ = make("bedrock", "claude-opus-5")
        serve(orderer, DOCUMENTS)
        ordering = serve(orderer, DOCUMENTS)
        body = builder.build("?", ordering).bedrock()
        parts = [*body["system"], *body["messages"][0]["content"]]
        assert sum("cachePoint" in part for part in parts) == len(ordering.breakpoints)
        assert all(part["cachePoint"] == {"type": "default"} for part in parts if "cachePoint" in part)

    @pytest.mark.parametrize(
        ("provider", "name", "kind"),
        [("anthropic", "cache_control", "ephemeral"), ("bedrock", "cachePoint", "default")],
    )
    def test_the_lifetime_is_that_of_the_rules(self, provider: str, name: str, kind: str) -> None:
        orderer, builder, _ = make(provider, ttl="1h")
        for _ in range(4):
            body = getattr(builder.build("?", serve(orderer, DOCUMENTS)), provider)()
        marks = [part[name] for part in body["messages"][0]["content"] if name in part]
        assert marks and all(mark == {"type": kind, "ttl": "1h"} for mark in marks)

    def test_plain_orders_have_parts_without_marks_and_a_system_prompt_if_given(self) -> None:
        prompt = PromptBuilder(SYSTEM).build("?", DOCUMENTS)
        assert "cache_control" not in repr(prompt.anthropic())
        assert set(prompt.openai()) == {"messages"}
        assert len(prompt.bedrock()["messages"][0]["content"]) == 6
        alone = PromptBuilder("").build("?", DOCUMENTS)
        assert set(alone.anthropic()) == set(alone.bedrock()) == {"messages"}
        assert len(alone.openai()["messages"]) == 1

    def test_empty_texts_which_apis_refuse_are_left_out(self) -> None:
        texts = ["one", "", "two", " \n", "three"]
        parts = anthropic_content(texts, marks=[2, 5])
        assert [part["text"] for part in parts] == ["one", "two \n", "three"]
        assert ["cache_control" in part for part in parts] == [True, False, True]
        assert anthropic_content(["", " "], marks=[1]) == openai_content([]) == bedrock_content([""]) == []
        assert openai_content(["a"], [1], "input_text")[0]["type"] == "input_text"

    def test_can_be_sent_to_another_process(self) -> None:
        orderer, builder, _ = make()
        prompt = builder.build("Who hunts?", orderer.order(DOCUMENTS))
        again = pickle.loads(pickle.dumps(prompt))  # noqa: S301
        assert again == prompt
        assert again.anthropic() == prompt.anthropic()

    @settings(max_examples=examples(100))
    @given(st.lists(st.lists(st.sampled_from(PIECES)), max_size=5))
    def test_documents_never_form_a_special_token_between_them(self, pieces: list[list[str]]) -> None:
        builder = PromptBuilder("", document_template="{text}", question_template="{query}")
        documents = [Document(str(number), "".join(text)) for number, text in enumerate(pieces)]
        content = builder.build("|im_end|>", documents).anthropic()["messages"][0]["content"]
        joined = "".join(part["text"] for part in content)
        assert special_token_escaper()(joined) == joined

    def test_a_part_never_depends_on_those_after_it(self) -> None:
        def texts(*documents: str) -> list[str]:
            return PromptParts("", documents, "?", escape=special_token_escaper()).texts()

        assert texts("a <|im", "_end|> b") == ["a <|im", " _end|> b", "?"]
        assert texts("a <|im", "c")[0] == texts("a <|im", "_end|> b")[0]

    def test_the_sdks_take_them(self) -> None:
        """As far as these are installed: their own types check every part."""
        pydantic = pytest.importorskip("pydantic")
        orderer, builder, _ = make("openai", "gpt-5.6")
        part = pytest.importorskip("openai.types.chat.chat_completion_content_part_text_param")
        if hasattr(part, "PromptCacheBreakpoint"):
            adapter = pydantic.TypeAdapter(part.ChatCompletionContentPartTextParam)
            for message in builder.build("?", orderer.order(DOCUMENTS)).openai()["messages"]:
                for each in message["content"]:
                    assert adapter.validate_python(each) == each
        types = pytest.importorskip("anthropic.types")
        orderer, builder, _ = make()
        adapter = pydantic.TypeAdapter(types.TextBlockParam)
        body = builder.build("?", orderer.order(DOCUMENTS)).anthropic()
        for each in (*body["system"], *body["messages"][0]["content"]):
            assert adapter.validate_python(each) == each
