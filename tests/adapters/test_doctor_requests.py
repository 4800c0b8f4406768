"""`ragorder doctor --requests`: a log for each reason why little is cached, and one where all is well."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_command
from support.http_server import Handler, LocalServer
from support.request_logs import SYSTEM, chat, document, of_cloud, served, texts_of, write_log

from ragorder.adapters.doctor import Finding, examine_requests
from ragorder.adapters.doctor.beginnings import common_length, shared_beginnings
from ragorder.adapters.doctor.request_log import LoggedRequest, read_log
from ragorder.adapters.doctor.rules import all_rules
from ragorder.cli import main
from ragorder.jsonl import JSONLinesError

NAMES = [f"doc-{number}" for number in range(40)]
doctor = partial(run_command, main, "doctor")

Lines = list[dict[str, Any]]


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., dict[str, Finding]]:
    """Findings of a log by their checks: complete ones, that quote nothing."""

    def examine(lines: Lines, **options: Any) -> dict[str, Finding]:
        found = examine_requests(write_log(tmp_path / "requests.jsonl", lines), **options)
        assert len({each.check for each in found}) == len(found) == len(all_rules()) + 1
        for each in found:
            assert each.found
            assert each.verdict == "good" or each.advice
            assert_quotes_nothing(f"{each.found} {each.advice}")
        return {each.check: each for each in found}

    return examine


def assert_quotes_nothing(text: str) -> None:
    words = {word for name in NAMES[:8] for word in document(name).split()[1:]}
    assert words.isdisjoint(text.split())
    for secret in ("alice", "Answer", "questions from documents", "doc-1"):
        assert secret not in text


def healthy(requests: int = 30) -> Lines:
    """Requests that begin alike: the same documents in the same places, then the question."""
    return served(chat([*NAMES[:4], NAMES[4 + number % 3]], f"what about {number}?") for number in range(requests))


def turns(conversation: int, *, replays: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Lines:
    """Three turns; `replays` makes of a turn's messages what the next one sends of them."""
    bodies = []
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for turn in range(3):
        name = NAMES[(5 * conversation + turn) % 40]
        question = f"what does conversation {conversation} say in turn {turn}?"
        history = [*history, {"role": "user", "content": f"{document(name)}Question: {question}"}]
        bodies.append({"model": "qwen", "messages": history})
        history = [*replays(history), {"role": "assistant", "content": f"It says {conversation} and {turn}."}]
    return bodies


def conversations(replays: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Lines:
    return served(body for number in range(8) for body in turns(number, replays=replays))


class TestAllIsWell:
    def test_nothing_is_bad_and_the_command_succeeds(
        self, examine: Callable[..., dict[str, Finding]], tmp_path: Path
    ) -> None:
        found = examine(healthy(), block_size=16)
        checked = {check: each.verdict for check, each in found.items()}
        # Those two ask a server.
        assert checked.pop("chat template") == checked.pop("topic's replica") == "unknown"
        assert set(checked.values()) == {"good"}
        done = doctor("--requests", tmp_path / "requests.jsonl", "--block-size", "16")
        assert done.exit_code == 0
        assert_quotes_nothing(done.output)

    def test_is_told_in_shares(self, examine: Callable[..., dict[str, Finding]]) -> None:
        found = examine(healthy(), block_size=16)["requests"].found
        assert found.startswith("30 requests: ")
        shares = [float(part.split()[-1]) for part in found.split(" %")[:2]]
        assert 70 < shares[0] <= shares[1] < 100

    def test_steps_are_read_from_the_hits(self, examine: Callable[..., dict[str, Finding]]) -> None:
        assert examine(healthy())["cache granularity"].verdict == "good"


class TestRequests:
    def test_without_reports_that_is_what_is_missing(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = [{**line, "usage": {"prompt_tokens": 100}} for line in healthy()]
        found = examine(lines)["requests"]
        assert found.verdict == "warning"
        assert "--enable-prompt-tokens-details" in str(found.advice)

    def test_a_cache_that_loses_all_is_bad(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = healthy()
        for line in lines:
            line["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
        found = examine(lines, block_size=16)
        assert found["requests"].verdict == "bad"
        assert "too small" in str(found["requests"].advice)

    def test_nothing_in_common_is_no_fault_of_the_cache(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = served(chat([name], "?", system=f"{number} {SYSTEM}") for number, name in enumerate(NAMES))
        assert examine(lines, block_size=16)["requests"].verdict == "warning"

    def test_an_empty_log_is_unknown(self, tmp_path: Path) -> None:
        (found,) = examine_requests(write_log(tmp_path / "empty.jsonl", []))
        assert found.verdict == "unknown"


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
        assert "behind the documents" in str(found.advice)

    def test_so_is_what_no_pattern_knows(self, examine: Callable[..., dict[str, Finding]]) -> None:
        found = examine(self.with_head(lambda number: f"Dear {'abcdefghijklmnopqrst'[number]}nna,"), block_size=16)
        assert "text that no other request has (19)" in found["text before the documents"].found

    def test_another_order_is_another_matter(self, examine: Callable[..., dict[str, Finding]]) -> None:
        lines = served(
            chat([*NAMES[number % 5 : 5], *NAMES[: number % 5]], f"number {number}?") for number in range(20)
        )
        found = examine(lines, block_size=16)["text before the documents"]
        assert found.verdict == "good"
        assert "have their documents in another order" in found.found

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
        assert "as they were sent" in str(found.advice)

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

    def test_cost_nothing_where_none_are_reported(self, examine: Callable[..., dict[str, Finding]]) -> None:
        assert examine(healthy())["writes and reads"].verdict == "good"


class Balancer(LocalServer):
    """Replicas of one engine, each with a prefix cache, and the vLLM routes that doctor asks."""

    def __init__(self, choose: Callable[[int, str | None], int], render: Callable[..., str] | None = None) -> None:
        super().__init__(_BalancerHandler)
        self.choose, self.render = choose, render
        self.reports = True
        self.caches: dict[int, set[str]] = {}
        self.topics: list[str | None] = []

    def complete(self, body: dict[str, Any], topic: str | None) -> dict[str, Any]:
        cache = self.caches.setdefault(self.choose(len(self.topics), topic), set())
        self.topics.append(topic)
        prompt = str(body["prompt"])
        cached = len(body["prompt"]) - 1 if prompt in cache else 0
        cache.add(prompt)
        details = {"cached_tokens": cached} if self.reports else None
        return {"usage": {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.render is not None
        return {"tokens": [ord(each) for each in self.render(body["messages"], body["add_generation_prompt"])]}


class _BalancerHandler(Handler):
    server: Balancer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "qwen", "max_model_len": 8192}]}))
        elif self.path == "/metrics":
            self.answer(200, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1001",engine="0"} 1.0\n')
        else:
            self.answer(404)

    def do_POST(self) -> None:
        body = self.read_json()
        if self.path == "/v1/completions":
            self.answer(200, json.dumps(self.server.complete(body, self.headers.get("x-session-id"))))
        elif self.path == "/tokenize" and self.server.render is not None:
            self.answer(200, json.dumps(self.server.tokenize(body)))
        else:
            self.answer(404)


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


def plain(messages: list[dict[str, Any]], open_end: bool) -> str:
    return "".join(f"<{each['role']}>{each['content']}</>" for each in messages) + "<assistant>" * open_end


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


class TestCommand:
    def test_a_bad_finding_is_an_exit_status(self, tmp_path: Path) -> None:
        lines = served((chat([name], "?") for name in NAMES[:20]), step=784)
        path = write_log(tmp_path / "requests.jsonl", lines)
        done = doctor("--requests", path, "--block-size", "784", "--json")
        assert done.exit_code == 1
        found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
        assert found["cache granularity"]["verdict"] == "bad"
        assert_quotes_nothing(done.output)

    def test_a_server_is_examined_as_well(self, tmp_path: Path, balance: Callable[..., Balancer]) -> None:
        pytest.importorskip("zmq")
        path = write_log(tmp_path / "requests.jsonl", healthy(5))
        balancer = balance(render=plain)
        done = doctor(balancer.base_url, "--requests", path, "--topic-header", "x-session-id", "--json")
        checks = [each["check"] for each in json.loads(done.stdout)["findings"]]
        assert checks[0] == "server"
        assert {"topic's replica", "chat template", "prefix caching"} <= set(checks)
        assert done.exit_code == 0

    def test_a_tokenizer_is_loaded(self, tmp_path: Path, model_folder: Path) -> None:
        path = write_log(tmp_path / "requests.jsonl", healthy(5))
        done = doctor("--requests", path, "--tokenizer", model_folder, "--json")
        found = {each["check"]: each["verdict"] for each in json.loads(done.stdout)["findings"]}
        assert found["chat template"] == "good"

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--block-size", "16"], "URL"),
            (["http://127.0.0.1:9", "--block-size", "16"], "--block-size requires --requests"),
            (["http://127.0.0.1:9", "--topic-header", "x-session-id"], "--topic-header requires --requests"),
            (["http://127.0.0.1:9", "--tokenizer", "there"], "--tokenizer requires --requests"),
            (["--requests", "LOG", "--topic-header", "x-session-id"], "--topic-header requires URL"),
            (["--requests", "LOG", "--model", "qwen"], "--model requires the URL"),
            (["http://127.0.0.1:9", "--requests", "LOG", "--topic-header", "Host"], "--topic-header: 'Host'"),
            (["--requests", "LOG", "--tokenizer", "/nowhere/at/all"], "--tokenizer: "),
            (["--requests", "LOG", "--memory"], "leave out --requests"),
            (["--requests", "NOWHERE"], "--requests"),
        ],
    )
    def test_options_that_do_not_go_together_are_refused(self, tmp_path: Path, arguments: list[str], says: str) -> None:
        path = write_log(tmp_path / "requests.jsonl", healthy(2))
        done = doctor(*(str(path) if each == "LOG" else each for each in arguments))
        assert done.exit_code != 0
        assert says in done.stderr

    def test_a_line_that_cannot_be_read_is_named_and_not_quoted(self, tmp_path: Path) -> None:
        path = write_log(tmp_path / "requests.jsonl", [*healthy(2), {"prompts": "alice"}])
        done = doctor("--requests", path)
        assert done.exit_code == 1
        assert "requests.jsonl:3: " in done.stderr
        assert '"messages"' in done.stderr
        assert "alice" not in done.output


class TestLog:
    def read(self, tmp_path: Path, *lines: Any, **options: Any) -> Any:
        return read_log(write_log(tmp_path / "requests.jsonl", lines), **options)

    def test_bodies_of_each_api_are_read(self, tmp_path: Path) -> None:
        log = self.read(
            tmp_path,
            {"prompt": "some text", "usage": {"prompt_tokens": 4}},
            {"prompt": [1, 2, 3]},
            {
                "request": {"messages": [{"role": "user", "content": "hello"}]},
                "response": {"usage": {"prompt_tokens": 7}},
            },
            {
                "body": {
                    "system": "be brief",
                    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
                }
            },
            {"instructions": "be brief", "input": "hi"},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
            {"messages": [], "ragorder": {"documents": [{"id": "a", "text": "first"}], "query": "which?"}},
        )
        texts = [each.text for each in log.requests]
        assert texts[:3] == ["<prompt>\nsome text\n", "<prompt>\n1 2 3\n", "<user>\nhello\n"]
        assert texts[3] == texts[4] == "<system>\nbe brief\n<user>\nhi\n"
        assert texts[5:] == ["<user>\nhi\n", "<user>\n[a]\nfirst\n\nwhich?\n"]
        assert [each.prompt_tokens for each in log.requests[:4]] == [4, None, 7, None]

    def test_what_stands_in_front_is_known(self, tmp_path: Path) -> None:
        tools = [{"type": "function", "function": {"name": "search"}}]
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        (request,) = self.read(tmp_path, {"tools": tools, "messages": messages}).requests
        assert [each.role for each in request.messages] == ["tools", "system", "user"]
        assert request.text[request.system_end :] == "<user>\nhi\n"

    def test_tenants_and_models_share_nothing(self, tmp_path: Path) -> None:
        body = healthy(1)[0]
        salted = [{**body, "cache_salt": "one"}, {**body, "cache_salt": "two"}, {**body, "model": "other"}]
        log = self.read(tmp_path, body, *salted)
        assert [found.earlier for found in shared_beginnings(log.requests)] == [None] * 4

    def test_a_log_may_be_compressed_and_is_read_to_a_bound(self, tmp_path: Path) -> None:
        path = tmp_path / "requests.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in healthy(6)).encode()))
        log = read_log(path, most_requests=4)
        assert len(log.requests) == 4
        assert log.cut
        assert not read_log(path, most_requests=6).cut
        assert len(read_log(path, most_characters=1).requests) == 1

    @pytest.mark.parametrize(
        "line", ['{"messages": ', "[1]", '{"answer": "alice"}', '{"messages": [' + '{"content": [' * 600]
    )
    def test_other_lines_are_refused_by_number(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text(f"{json.dumps(healthy(1)[0])}\n{line}\n", "utf-8")
        with pytest.raises(JSONLinesError, match=r"requests\.jsonl:2: ") as caught:
            read_log(path)
        assert "alice" not in str(caught.value)


BASE = "".join(chr(97 + place * place % 7) for place in range(1200))


class TestBeginnings:
    @given(st.lists(st.tuples(st.integers(0, len(BASE)), st.text("xy", max_size=20)), min_size=1, max_size=8))
    def test_are_the_longest_but_for_a_chunk(self, parts: list[tuple[int, str]]) -> None:
        requests = [request_of(BASE[:cut] + tail) for cut, tail in parts]
        for place, (request, found) in enumerate(zip(requests, shared_beginnings(requests), strict=True)):
            longest = max((common_length(request.text, other.text) for other in requests[:place]), default=0)
            assert longest - 256 < found.characters <= longest
            assert (found.earlier is None) == (place == 0)

    @given(st.text("ab", max_size=40), st.text("ab", max_size=40))
    def test_common_length_is_that_of_the_common_prefix(self, one: str, other: str) -> None:
        length = common_length(one, other)
        assert one[:length] == other[:length]
        assert length == min(len(one), len(other)) or one[length] != other[length]


def request_of(text: str) -> LoggedRequest:
    return LoggedRequest(1, "", ("", ""), (), text, 0, None, None, None, None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=60) | VALUES}
    ),
    max_size=5,
)
USAGE = st.dictionaries(
    st.sampled_from(["prompt_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens"]), VALUES
)


@given(
    st.lists(
        st.fixed_dictionaries({"messages": MESSAGES | VALUES, "usage": USAGE | VALUES}, optional={"model": VALUES}),
        max_size=6,
    )
)
def test_no_log_makes_a_rule_fail(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    path = write_log(tmp_path_factory.mktemp("log") / "requests.jsonl", lines)
    for found in examine_requests(path, block_size=16):
        assert found.verdict in ("good", "warning", "bad", "unknown")
        assert found.verdict == "good" or found.advice
