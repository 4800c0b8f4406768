"""`ragorder doctor --requests`: the command, the log, one where all is well, and rules that ask a server."""

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
from support.faulty_server import FaultyServer, plain
from support.request_logs import (
    NAMES,
    SYSTEM,
    Examine,
    Lines,
    asked,
    assert_quotes_nothing,
    chat,
    conversations,
    counted,
    examined,
    healthy,
    served,
    shares,
    write_log,
)

from ragorder.adapters.doctor import Finding, examine_requests
from ragorder.adapters.doctor.beginnings import common_length, shared_beginnings
from ragorder.adapters.doctor.request_log import LoggedRequest, read_log
from ragorder.cli import main

doctor = partial(run_command, main, "doctor")

Balance = Callable[..., FaultyServer]


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    return partial(examined, tmp_path)


@pytest.fixture
def balance() -> Iterator[Balance]:
    """Puts a balancer before replicas of one engine."""
    pytest.importorskip("httpx2")
    pytest.importorskip("prometheus_client")
    with FaultyServer() as server:
        server.models["data"][0]["id"] = "qwen"

        def balance(
            choose: Callable[[int, str | None], int] = lambda *_: 0, render: Callable[..., str] | None = None
        ) -> FaultyServer:
            server.choose, server.render, server.tokenizes = choose, render, render is not None
            return server

        yield balance


class TestAllIsWell:
    def test_nothing_is_bad_and_the_command_succeeds(self, examine: Examine, tmp_path: Path) -> None:
        found = examine(healthy(), block_size=16)
        checked = {check: each.verdict for check, each in found.items()}
        # Those two ask a server.
        assert checked.pop("chat template") == checked.pop("topic's replica") == "unknown"
        assert {"earlier turns", "writes and reads"} <= checked.keys()
        assert set(checked.values()) == {"good"}
        told = found["requests"].found
        assert told.startswith("30 requests: ")
        cached, known = (float(part.split()[-1]) for part in told.split(" %")[:2])
        assert 70 < cached <= known < 100
        done = doctor("--requests", tmp_path / "requests.jsonl", "--block-size", "16")
        assert done.exit_code == 0
        assert_quotes_nothing(done.output)

    def test_steps_are_read_from_the_hits(self, examine: Examine) -> None:
        assert examine(healthy())["cache granularity"].verdict == "good"


class TestRequests:
    def test_without_reports_that_is_what_is_missing(self, examine: Examine) -> None:
        lines = [{**line, "usage": {"prompt_tokens": 100}} for line in healthy()]
        found = examine(lines)["requests"]
        assert found.verdict == "warning"
        assert "--enable-prompt-tokens-details" in str(found.advice)

    def test_a_cache_that_loses_all_is_bad(self, examine: Examine) -> None:
        lines = healthy()
        for line in lines:
            line["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
        found = examine(lines, block_size=16)
        assert found["requests"].verdict == "bad"
        assert "too small" in str(found["requests"].advice)

    def test_nothing_in_common_is_no_fault_of_the_cache(self, examine: Examine) -> None:
        lines = served(chat([name], "?", system=f"{number} {SYSTEM}") for number, name in enumerate(NAMES))
        assert examine(lines, block_size=16)["requests"].verdict == "warning"

    def test_an_empty_log_is_unknown(self, tmp_path: Path) -> None:
        (found,) = examine_requests(write_log(tmp_path / "empty.jsonl", []))
        assert found.verdict == "unknown"


def dated(number: int) -> dict[str, Any]:
    return {"chat_template_kwargs": {"date_string": f"{number} Nov"}}


class TestRequestFields:
    """Requests that begin alike and find nothing of each other in the cache."""

    @pytest.mark.parametrize(
        ("fields", "named", "does"),
        [
            (dated, ["chat_template_kwargs (19)"], "same chat_template_kwargs"),
            (lambda number: {"extra_body": dated(number)}, ["chat_template_kwargs (19)"], "same chat_template_kwargs"),
            (lambda number: {"cache_salt": f"user-{number}"}, ["cache_salt (19)"], "one for each tenant"),
            (lambda number: {"model": f"lora-{number}"}, ["model (19)"], "each LoRA adapter has a cache of its own"),
            (
                lambda number: {"cache_salt": f"user-{number}", "model": f"lora-{number % 7}"},
                ["cache_salt (19)", "model (19)"],
                "one for each tenant",
            ),
            (lambda number: {"reasoning_effort": str(number)}, ["reasoning_effort (19)"], "same in all requests"),
        ],
        ids=["arguments", "arguments in extra_body", "salt", "LoRA", "salt and LoRA", "effort"],
    )
    def test_that_differ_are_named(
        self, examine: Examine, tmp_path: Path, fields: Callable[[int], Any], named: list[str], does: str
    ) -> None:
        found = examine([counted(asked(number, **fields(number)), 300, 0) for number in range(20)])
        each = found["request fields"]
        assert each.verdict == "bad" and each.found.startswith("19 of 19 requests begin like earlier ones")
        assert all(name in each.found for name in named)
        assert shares(each.found)[0] == 0 and shares(each.found)[1] > 85
        assert does in str(each.advice)
        assert found["requests"].advice == "see the findings below"
        done = doctor("--requests", tmp_path / "requests.jsonl")
        assert done.exit_code == 1
        assert_quotes_nothing(done.output)

    def test_that_cost_no_hit_are_no_reason(self, examine: Examine) -> None:
        lines = [counted(asked(each, chat_template_kwargs={"thinking": str(each)}), 300, 256) for each in range(20)]
        assert examine(lines)["request fields"].verdict == "good"

    def test_without_reports_of_hits_are_a_warning(self, examine: Examine) -> None:
        lines = [asked(number, chat_template_kwargs={"thinking": str(number)}) for number in range(20)]
        assert examine(lines)["request fields"].verdict == "warning"

    def test_of_a_few_tenants_and_models_cost_each_its_first_request(self, examine: Examine) -> None:
        lines = [counted(asked(each, cache_salt=f"{each % 3}", model=f"{each % 2}"), 300, 0) for each in range(100)]
        assert examine(lines)["request fields"].verdict == "good"


class TestCommand:
    def test_a_server_is_examined_as_well(self, tmp_path: Path, balance: Balance) -> None:
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

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"prompts": "alice"}', '"messages"'),
            *((line, "") for line in ('{"messages": ', "[1]", '{"messages": [' + '{"content": [' * 600)),
        ],
        ids=["no messages", "cut", "a list", "nested"],
    )
    def test_a_line_that_cannot_be_read_is_named_and_not_quoted(self, tmp_path: Path, line: str, said: str) -> None:
        path = write_log(tmp_path / "requests.jsonl", healthy(2))
        path.write_text(f"{path.read_text('utf-8')}{line}\n", "utf-8")
        done = doctor("--requests", path)
        assert done.exit_code == 1
        assert "requests.jsonl:3: " in done.stderr
        assert said in done.stderr
        assert "alice" not in done.output


class TestTopic:
    def probe(self, examine: Examine, balancer: FaultyServer) -> Finding:
        return examine(healthy(5), base_url=balancer.base_url, topic_header="x-session-id")["topic's replica"]

    def test_a_balancer_that_heeds_it_is_good(self, examine: Examine, balance: Balance) -> None:
        balancer = balance(lambda _, topic: int(topic or "0", 16) % 8)
        assert self.probe(examine, balancer).verdict == "good"
        assert len(balancer.topics) == 8
        assert len(set(balancer.topics)) == 1

    @pytest.mark.parametrize("replicas", [2, 3, 64])
    def test_one_that_takes_replicas_in_turn_is_bad(self, examine: Examine, balance: Balance, replicas: int) -> None:
        found = self.probe(examine, balance(lambda number, _: number % replicas))
        assert found.verdict == "bad"
        assert found.found.startswith(f"{max(0, 8 - replicas)} of 7 requests")
        assert "deploy/README.md" in str(found.advice)

    def test_without_reports_it_is_unknown(self, examine: Examine, balance: Balance) -> None:
        balancer = balance()
        balancer.reporting = False
        assert self.probe(examine, balancer).verdict == "unknown"

    def test_nothing_is_sent_without_a_header(self, examine: Examine, balance: Balance) -> None:
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
    def check(self, examine: Examine, balancer: FaultyServer, lines: Lines) -> Finding:
        return examine(lines, base_url=balancer.base_url)["chat template"]

    @pytest.mark.parametrize(
        ("render", "verdict"),
        [(plain, "good"), (counting, "bad"), (thinking, "warning")],
        ids=["plain", "counts", "thinks"],
    )
    def test_must_render_an_earlier_turn_as_before(
        self, examine: Examine, balance: Balance, render: Callable[..., str], verdict: str
    ) -> None:
        balancer = balance(render=render)
        for lines in (healthy(5), conversations(list)):
            assert self.check(examine, balancer, lines).verdict == verdict

    def test_the_logs_own_turns_show_what_made_up_ones_do_not(self, examine: Examine, balance: Balance) -> None:
        balancer = balance(render=forgetful)
        assert self.check(examine, balancer, healthy(5)).verdict == "good"
        first = [user("which of them?"), {"role": "assistant", "content": "<think>a</think>this"}]
        tool = [*first, {"role": "tool", "content": "<think>what the tool has said of it</think>that"}]
        last = [*tool, {"role": "assistant", "content": "that one"}, user("and then?")]
        lines = served({"model": "qwen", "messages": messages} for messages in (tool, last))
        found = self.check(examine, balancer, lines)
        assert found.verdict == "bad"
        assert "--chat-template" in str(found.advice)

    def test_a_server_that_cannot_render_leaves_it_open(self, examine: Examine, balance: Balance) -> None:
        found = self.check(examine, balance(), healthy(5))
        assert found.verdict == "unknown"
        assert "HTTP 404" in found.found

    def test_by_a_tokenizer_of_ones_own(self, examine: Examine, tokenizers: dict[str, Any]) -> None:
        assert examine(healthy(5), tokenizer=tokenizers["chatml"])["chat template"].verdict == "good"
        assert examine(healthy(5), tokenizer=tokenizers["plain"])["chat template"].verdict == "unknown"

    def test_a_date_in_it_is_seen(self, examine: Examine) -> None:
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
    def test_renders_chats_says_its_steps_and_keeps_what_it_computed(self, examine: Examine, vllm_server: Any) -> None:
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


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


class TestLog:
    def read(self, tmp_path: Path, *lines: Any, **options: Any) -> Any:
        return read_log(write_log(tmp_path / "requests.jsonl", lines), **options)

    def test_bodies_of_each_api_are_read(self, tmp_path: Path) -> None:
        log = self.read(
            tmp_path,
            {"prompt": "some text", "usage": {"prompt_tokens": 4}},
            {"prompt": [1, 2, 3]},
            {"request": {"messages": [user("hello")]}, "response": {"usage": {"prompt_tokens": 7}}},
            {"body": {"system": "be brief", "messages": [user([{"type": "text", "text": "hi"}])]}},
            {"instructions": "be brief", "input": "hi"},
            {"input": [user([{"type": "input_text", "text": "hi"}])]},
            {"messages": [], "ragorder": {"documents": [{"id": "a", "text": "first"}], "query": "which?"}},
        )
        texts = [each.text for each in log.requests]
        assert texts[:3] == ["<prompt>\nsome text\n", "<prompt>\n1 2 3\n", "<user>\nhello\n"]
        assert texts[3] == texts[4] == "<system>\nbe brief\n<user>\nhi\n"
        assert texts[5:] == ["<user>\nhi\n", "<user>\n[a]\nfirst\n\nwhich?\n"]
        assert [each.prompt_tokens for each in log.requests[:4]] == [4, None, 7, None]

    def test_usage_in_the_words_of_two_apis_is_counted_once(self, tmp_path: Path) -> None:
        usage = {
            "prompt_tokens": 1000,
            "prompt_tokens_details": {"cached_tokens": 700},
            "cache_read_input_tokens": 700,
            "cache_creation_input_tokens": 100,
        }
        (request,) = self.read(tmp_path, {"prompt": "some text", "usage": usage}).requests
        assert (request.prompt_tokens, request.cached_tokens, request.written_tokens) == (1000, 700, 100)

    def test_tools_and_system_message_come_first(self, tmp_path: Path) -> None:
        tools = [{"type": "function", "function": {"name": "search"}}]
        messages = [{"role": "system", "content": "be brief"}, user("hi")]
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
    return LoggedRequest(1, "", ("", ""), (), text, 0, 0, {}, {}, None, None, None, None)


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
