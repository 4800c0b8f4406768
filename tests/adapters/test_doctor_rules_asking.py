"""Rules of `ragorder doctor --requests` that ask a server or a tokenizer: the balancer, and the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.balancer import Balancer, plain
from support.request_logs import NAMES, Lines, chat, conversations, examined, healthy, served

from ragorder.adapters.doctor import Finding


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., dict[str, Finding]]:
    return partial(examined, tmp_path)


@pytest.fixture
def balance() -> Iterator[Callable[..., Balancer]]:
    started: list[Balancer] = []

    def balance(choose: Callable[[int, str | None], int] = lambda *_: 0, **options: Any) -> Balancer:
        pytest.importorskip("httpx2")
        pytest.importorskip("prometheus_client")
        started.append(Balancer(choose, **options))
        return started[-1].start()

    yield balance
    for each in started:
        each.stop()


class TestTopic:
    def probe(self, examine: Callable[..., dict[str, Finding]], balancer: Balancer) -> Finding:
        return examine(healthy(5), base_url=balancer.base_url, topic_header="x-session-id")["topic's replica"]

    def test_a_balancer_that_heeds_it_is_good(
        self, examine: Callable[..., dict[str, Finding]], balance: Callable[..., Balancer]
    ) -> None:
        balancer = balance(lambda _, topic: int(topic or "0", 16) % 8)
        assert self.probe(examine, balancer).verdict == "good"
        assert len(balancer.topics) == 8
        assert len(set(balancer.topics)) == 1

    @pytest.mark.parametrize("replicas", [2, 3, 64])
    def test_one_that_goes_round_is_found(
        self, examine: Callable[..., dict[str, Finding]], balance: Callable[..., Balancer], replicas: int
    ) -> None:
        found = self.probe(examine, balance(lambda number, _: number % replicas))
        assert found.verdict == "bad"
        assert found.found.startswith(f"{max(0, 8 - replicas)} of 7 requests")
        assert "deploy/README.md" in str(found.advice)

    def test_without_reports_it_is_unknown(
        self, examine: Callable[..., dict[str, Finding]], balance: Callable[..., Balancer]
    ) -> None:
        balancer = balance()
        balancer.reports = False
        assert self.probe(examine, balancer).verdict == "unknown"

    def test_nothing_is_sent_without_a_header(
        self, examine: Callable[..., dict[str, Finding]], balance: Callable[..., Balancer]
    ) -> None:
        balancer = balance()
        found = examine(healthy(5), base_url=balancer.base_url)
        assert found["topic's replica"].verdict == "unknown"
        assert found["cache granularity"].found.startswith("steps of 16 tokens (the server's blocks)")
        assert balancer.topics == []


def counting(messages: list[dict[str, Any]], open_end: bool) -> str:
    return f"{len(messages)} messages: " + plain(messages, open_end)


def forgetful(messages: list[dict[str, Any]], open_end: bool) -> str:
    """Thoughts stay in the last message alone."""
    last = len(messages) - 1
    kept = [
        {**each, "content": each["content"] if place == last else each["content"].rpartition("</think>")[2]}
        for place, each in enumerate(messages)
    ]
    return plain(kept, open_end)


def thinking(messages: list[dict[str, Any]], open_end: bool) -> str:
    """Asks for an answer without thoughts, which it does not write into earlier ones."""
    return plain(messages, open_end) + "<think></think>" * open_end


class TestTemplate:
    def check(self, examine: Callable[..., dict[str, Finding]], balancer: Balancer, lines: Lines) -> Finding:
        return examine(lines, base_url=balancer.base_url)["chat template"]

    @pytest.mark.parametrize(
        ("render", "verdict"),
        [(plain, "good"), (counting, "bad"), (thinking, "warning")],
        ids=["plain", "counts", "thinks"],
    )
    def test_renders_a_turn_twice(
        self,
        examine: Callable[..., dict[str, Finding]],
        balance: Callable[..., Balancer],
        render: Callable[..., str],
        verdict: str,
    ) -> None:
        balancer = balance(render=render)
        assert self.check(examine, balancer, healthy(5)).verdict == verdict
        assert self.check(examine, balancer, conversations(list)).verdict == verdict

    def test_the_logs_own_turns_show_what_made_up_ones_do_not(
        self, examine: Callable[..., dict[str, Finding]], balance: Callable[..., Balancer]
    ) -> None:
        balancer = balance(render=forgetful)
        assert self.check(examine, balancer, healthy(5)).verdict == "good"
        first = [
            {"role": "user", "content": "which of them?"},
            {"role": "assistant", "content": "<think>a</think>this"},
        ]
        tool = [*first, {"role": "tool", "content": "<think>what the tool has said of it</think>that"}]
        last = [*tool, {"role": "assistant", "content": "that one"}, {"role": "user", "content": "and then?"}]
        lines = served({"model": "qwen", "messages": messages} for messages in (tool, last))
        found = self.check(examine, balancer, lines)
        assert found.verdict == "bad"
        assert "--chat-template" in str(found.advice)

    def test_a_server_that_cannot_render_leaves_it_open(
        self, examine: Callable[..., dict[str, Finding]], balance: Callable[..., Balancer]
    ) -> None:
        found = self.check(examine, balance(), healthy(5))
        assert found.verdict == "unknown"
        assert "HTTP 404" in found.found

    def test_by_a_tokenizer_of_ones_own(
        self, examine: Callable[..., dict[str, Finding]], tokenizers: dict[str, Any]
    ) -> None:
        assert examine(healthy(5), tokenizer=tokenizers["chatml"])["chat template"].verdict == "good"
        assert examine(healthy(5), tokenizer=tokenizers["plain"])["chat template"].verdict == "unknown"

    def test_a_date_in_it_is_seen(self, examine: Callable[..., dict[str, Finding]]) -> None:
        class Dated:
            chat_template = "{{ strftime_now('%d %b %Y') }}"

            def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
                return plain(messages, add_generation_prompt)

            def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
                return [ord(each) for each in text]

        found = examine(healthy(5), tokenizer=Dated())["chat template"]
        assert found.verdict == "warning"
        assert "date" in str(found.advice)


@pytest.mark.vllm
class TestARealServer:
    def test_renders_chats_says_its_steps_and_keeps_what_it_computed(
        self, examine: Callable[..., dict[str, Finding]], vllm_server: Any
    ) -> None:
        lines = served(chat(NAMES[:1], f"what about {number}?") for number in range(4))
        found = examine(lines, base_url=vllm_server.base_url, topic_header="x-session-id", timeout_s=60)
        assert found["chat template"].verdict == "good", found["chat template"]
        assert found["topic's replica"].verdict == "good", found["topic's replica"]
        assert found["cache granularity"].found.startswith(f"steps of {vllm_server.block_size} tokens (the server's")

    def test_has_metrics_at_the_path_that_the_proxy_forwards(self, vllm_server: Any) -> None:
        """As deploy/routers/llm-d asks for them."""
        httpx2 = pytest.importorskip("httpx2")
        page = httpx2.get(f"{vllm_server.base_url}/metrics/")
        assert page.status_code == 200
        assert "vllm:num_requests_waiting" in page.text
