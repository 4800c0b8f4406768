"""Rules of `ragorder doctor --requests` on what a log alone shows: a log that breaks each, and one that does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.request_logs import (
    NAMES,
    SYSTEM,
    Lines,
    chat,
    conversations,
    document,
    examined,
    healthy,
    of_cloud,
    served,
    texts_of,
)

from ragorder.adapters.doctor import Finding


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., dict[str, Finding]]:
    return partial(examined, tmp_path)


class TestGranularity:
    @pytest.fixture
    def short(self) -> Lines:
        """Requests that share a system prompt alone, on a model that resumes every 784 tokens."""
        return served((chat([name], "?") for name in NAMES[:20]), step=784)

    def test_large_steps_of_a_hybrid_model(self, examine: Callable[..., dict[str, Finding]], short: Lines) -> None:
        found = examine(short, block_size=784)["cache granularity"]
        assert found.verdict == "bad"
        assert found.found.startswith("steps of 784 tokens")
        assert "19 of 19 requests" in found.found
        assert "--prefix-match-unit" in str(found.advice)

    def test_a_block_that_is_a_bit_too_large(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = served((chat([name], "?") for name in NAMES[:20]), step=64)
        found = examine(lines, block_size=64)["cache granularity"]
        assert found.verdict == "bad"
        assert "--block-size" in str(found.advice)

    def test_steps_that_fit(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = served((chat([name], "?") for name in NAMES[:20]), step=16)
        assert examine(lines, block_size=16)["cache granularity"].verdict == "good"

    def test_are_unknown_where_nothing_was_ever_found(
        self, examine: Callable[..., dict[str, Finding]], short: Lines
    ) -> None:
        found = examine(short)["cache granularity"]
        assert found.verdict == "unknown"
        assert "--block-size" in str(found.advice)

    def test_are_unknown_by_hits_of_one_length(self, examine: Callable[..., dict[str, Finding]], short: Lines) -> None:
        again = chat(NAMES[:30], "?")
        bodies = [again, again, *({name: line[name] for name in line if name != "usage"} for line in short)]
        lines = served(bodies, step=784)
        assert len({line["usage"]["prompt_tokens_details"]["cached_tokens"] for line in lines} - {0}) == 1
        found = examine(lines)["cache granularity"]
        assert found.verdict == "unknown"
        assert found.found.startswith("hits of one length alone are reported")

    def test_are_read_from_hits_that_are_all_multiples(self, examine: Callable[..., dict[str, Finding]]) -> None:
        long = [chat(NAMES[: 10 * many], "?") for many in (1, 1, 2, 2, 4, 4)]
        lines = served([*long, *(chat([name], "?") for name in NAMES[10:30])], step=300)
        found = examine(lines)["cache granularity"]
        assert found.found.startswith("steps of 300 tokens (all hits are multiples of it)")
        assert found.verdict == "bad"


class TestMinimum:
    def asked(self, model: str, documents: int) -> Lines:
        bodies = [chat(NAMES[:documents], f"number {number}?", model=model) for number in range(10)]
        return [of_cloud(body, read=0, written=0) for body in bodies]

    def test_prompts_below_it_are_never_kept(self, examine: Callable[..., dict[str, Finding]]) -> None:
        found = examine(self.asked("claude-haiku-4-5", 4))["provider's minimum"]
        assert found.verdict == "bad"
        assert found.found.startswith("4,096 tokens: 10 of 10 prompts are shorter")

    def test_so_are_beginnings_below_it(self, examine: Callable[..., dict[str, Finding]]) -> None:
        bodies = [
            chat([NAMES[0], *(f"own {number} {place}" for place in range(30))], "?", model="claude-haiku-4-5")
            for number in range(10)
        ]
        found = examine([of_cloud(body, read=0, written=0) for body in bodies])["provider's minimum"]
        assert "0 of 10 prompts are shorter, 9 more share less" in found.found
        assert found.verdict == "bad"

    def test_a_model_with_a_smaller_one_keeps_them(self, examine: Callable[..., dict[str, Finding]]) -> None:
        assert examine(self.asked("claude-opus-5-5", 8))["provider's minimum"].verdict == "good"

    def test_what_was_read_was_long_enough(self, examine: Callable[..., dict[str, Finding]]) -> None:
        bodies = [chat(NAMES[:4], f"number {number}?", model="claude-haiku-4-5") for number in range(10)]
        lines = [of_cloud(body, read=300, written=0) for body in bodies]
        assert examine(lines)["provider's minimum"].verdict == "good"

    def test_an_engine_of_ones_own_has_none(self, examine: Callable[..., dict[str, Finding]]) -> None:
        assert examine(healthy())["provider's minimum"].found == "no model of the log is known to have one"

    @pytest.mark.parametrize("model", ["cerebras/Cerebras-GPT-6.7B", "deepseek-ai/DeepSeek-V3"])
    def test_whatever_its_model_is_called(self, examine: Callable[..., dict[str, Finding]], model: str) -> None:
        found = examine(self.asked(model, 2))["provider's minimum"].found
        assert found == "no model of the log is known to have one"


class TestTextBeforeTheDocuments:
    def with_head(self, head: Callable[[int], str]) -> Lines:
        return served(chat(NAMES[:4], f"number {number}?", system=f"{head(number)}\n{SYSTEM}") for number in range(20))

    @pytest.mark.parametrize(
        ("head", "kind"),
        [
            (lambda number: f"Today is 2026-11-{number % 28 + 1:02} 10:{number:02}.", "a date"),
            (lambda number: f"It is {number + 2:02}:15.", "a clock time"),
            (lambda number: f"User: alice{number}", "a user, session or request"),
            (lambda number: f"Trace {number:08x}-0000-4000-8000-00000000000{number % 10}", "a UUID"),
        ],
    )
    def test_what_varies_is_named(
        self, examine: Callable[..., dict[str, Finding]], head: Callable[[int], str], kind: str
    ) -> None:
        found = examine(self.with_head(head), block_size=16)["text before the documents"]
        assert found.verdict == "bad"
        assert "19 of them" in found.found or "19 requests" in found.found
        assert f"{kind} (" in found.found
        assert "in the system message" in found.found
        assert "after the documents" in str(found.advice)

    def test_so_is_what_no_pattern_knows(self, examine: Callable[..., dict[str, Finding]]) -> None:
        found = examine(self.with_head(lambda number: f"Dear {'abcdefghijklmnopqrst'[number]}nna,"), block_size=16)
        assert "text that no other request has (19)" in found["text before the documents"].found

    def test_another_order_is_another_matter(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = served(
            chat([*NAMES[number % 5 : 5], *NAMES[: number % 5]], f"number {number}?") for number in range(20)
        )
        found = examine(lines, block_size=16)
        assert found["text before the documents"].verdict == "good"
        order = found["order of documents"]
        assert order.verdict == "warning"
        assert "of 19 requests have documents of earlier ones in another order" in order.found
        assert "order them" in str(order.advice) and "ragorder replay LOG" in str(order.advice)

    def test_advice_says_what_an_order_would_save(self, examine: Callable[..., dict[str, Finding]]) -> None:
        """The same five documents in any order: all of them could be reused."""
        rotated = [chat([*NAMES[number % 5 : 5], *NAMES[: number % 5]], f"number {number}?") for number in range(20)]
        advice = str(examine(served(rotated), block_size=16)["order of documents"].advice)
        ordered, plain = map(int, re.findall(r"(\d+) % (?:of the prompt|in the log's order)", advice))
        assert 50 < ordered <= 100
        assert plain < ordered - 10

    def test_another_order_is_no_fault_of_the_cache(self, examine: Callable[..., dict[str, Finding]]) -> None:
        rotated = [chat([*NAMES[number % 5 : 5], *NAMES[: number % 5]], "the same?") for number in range(20)]
        lines = served(rotated)
        for line in lines:
            line["usage"]["prompt_tokens_details"]["cached_tokens"] = 16
        found = examine(lines, block_size=16)
        assert found["order of documents"].verdict == "warning"
        assert found["requests"].verdict == "bad"
        assert found["requests"].advice == "see the findings below"

    def test_a_document_that_one_request_alone_has_is_no_volatile_text(
        self, examine: Callable[..., dict[str, Finding]]
    ) -> None:
        lines = served(
            chat([f"own-{number}" if number % 3 == 0 else NAMES[number % 4], *NAMES[4:8]], "?") for number in range(30)
        )
        assert examine(lines, block_size=16)["text before the documents"].verdict == "good"


class TestEarlierTurns:
    def test_that_are_sent_again_are_good(self, examine: Callable[..., dict[str, Finding]]) -> None:
        found = examine(conversations(list), block_size=16)["earlier turns"]
        assert found.verdict == "good"
        assert found.found.startswith("0 of 16 later turns")

    def test_that_lose_their_documents(self, examine: Callable[..., dict[str, Finding]]) -> None:
        def bare(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
            question = history[-1]["content"].rpartition("Question: ")[2]
            return [*history[:-1], {"role": "user", "content": question}]

        found = examine(conversations(bare), block_size=16)["earlier turns"]
        assert found.verdict == "bad"
        assert found.found.startswith("16 of 16 later turns")
        assert "an earlier user message lost its documents or other text (16)" in found.found
        assert "send earlier turns again" in str(found.advice)

    def test_behind_a_system_message_that_changes(self, examine: Callable[..., dict[str, Finding]]) -> None:
        def replaced(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{"role": "system", "content": f"{SYSTEM}\n{document(f'turn {len(history)}')}"}, *history[1:]]

        found = examine(conversations(replaced), block_size=16)["earlier turns"]
        assert found.verdict == "bad"
        assert "the system message changed (16)" in found.found

    def test_that_are_dropped(self, examine: Callable[..., dict[str, Finding]]) -> None:
        def truncated(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [history[0], *history[-1:]]

        found = examine(conversations(truncated), block_size=16)["earlier turns"]
        assert "messages were dropped" in found.found

    def test_the_loss_is_told_in_tokens(self, examine: Callable[..., dict[str, Finding]]) -> None:
        def broken(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{"role": "system", "content": f"{len(history)} {SYSTEM}"}, *history[1:]]

        found = examine(conversations(broken), block_size=16)["earlier turns"]
        loses = int(found.found.rpartition("each loses ")[2].split()[0].replace(",", ""))
        lengths = [len(texts_of(line)) // 4 for line in conversations(broken)]
        assert min(lengths) < loses < max(lengths)

    def test_a_log_without_conversations_has_none(self, examine: Callable[..., dict[str, Finding]]) -> None:
        assert examine(healthy())["earlier turns"].verdict == "good"


class TestWrites:
    def test_that_are_never_read_cost_more_than_no_cache(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = [of_cloud(chat([name], "?", model="claude-opus-5-5"), read=0, written=100) for name in NAMES]
        found = examine(lines)["writes and reads"]
        assert found.verdict == "bad"
        assert (
            found.found
            == "4,000 tokens written, 0 read: 1,000 input tokens, at the plain price, dearer than without a cache"
        )

    # A write costs a quarter on top, a read saves 95 % with this model.
    @pytest.mark.parametrize(("read", "verdict"), [(26, "bad"), (27, "good")])
    def test_the_break_even_is_the_models(
        self, examine: Callable[..., dict[str, Finding]], read: int, verdict: str
    ) -> None:
        lines = [of_cloud(chat([name], "?", model="claude-opus-5-5"), read=read, written=100) for name in NAMES]
        assert examine(lines)["writes and reads"].verdict == verdict

    def test_of_answers_that_do_not_say_what_they_read_count_nothing(
        self, examine: Callable[..., dict[str, Finding]]
    ) -> None:
        lines = [of_cloud(chat([name], "?", model="claude-opus-5-5"), read=27, written=100) for name in NAMES]
        silent = of_cloud(chat(["a"], "?", model="claude-opus-5-5"), read=0, written=100_000)
        del silent["response"]["usage"]["cache_read_input_tokens"]
        assert examine([*lines, silent])["writes and reads"].verdict == "good"

    def test_cost_nothing_where_none_are_reported(self, examine: Callable[..., dict[str, Finding]]) -> None:
        assert examine(healthy())["writes and reads"].verdict == "good"
