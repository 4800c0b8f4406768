"""`ragorder doctor` and what a server says of its cache: against a real vLLM, and against servers with every fault."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.faulty_server import BLOCK, SYSTEM, FaultyServer, chat, findings, gauge, page, verdicts

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")
pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

from support.event_server import Server, event_servers

from ragorder.adapters.doctor import Events, Finding, examine
from ragorder.adapters.doctor.events import check_events
from ragorder.cli import main

KEY = "sk-never-to-be-seen"
LIVE_PACKAGES = ("httpx2", "prometheus_client", "zmq", "msgspec")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def fake() -> Iterator[FaultyServer]:
    with FaultyServer() as server:
        yield server


Publish = Callable[..., Server]
Prompts = list[str | Path]


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Publish]:
    """Starts servers that publish the blocks of the prompts that they serve."""
    with event_servers(tmp_path) as serve:
        yield partial(serve, ports=True, block_size=BLOCK)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


doctor = partial(run_command, main, "doctor")


def refusal(*arguments: str | Path, status: int) -> str:
    """The one line that says why the command did not do it."""
    done = doctor(*arguments)
    assert done.exit_code == status
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert done.stderr.endswith(errors[0] + "\n")
    return errors[0]


class TestTheServer:
    @pytest.mark.parametrize(
        ("models", "options", "asked", "verdict", "said"),
        [
            ([], {}, "fake", "good", "serves fake"),
            (["first", "second"], {}, "first", "good", "asked for the first, --model"),
            (["first", "second"], {"model": "second"}, "second", "good", "serves first, second"),
            ([], {"model": "other"}, "other", "bad", "give one of those with --model"),
        ],
    )
    def test_is_asked_for_its_first_model_or_the_one_that_is_named(
        self, fake: FaultyServer, models: list[str], options: Any, asked: str, verdict: str, said: str
    ) -> None:
        if models:
            fake.models = {"data": [{"id": name} for name in models]}
        served = findings(fake, **options)["server"]
        assert served.verdict == verdict and said in f"{served.found} {served.advice}"
        assert ("asked for" in served.found) == (len(models) > 1 and not options)
        assert {body["model"] for body in fake.bodies("/v1/completions")} == {asked}

    @pytest.mark.parametrize("models", [{"data": []}, {}, [], {"data": [{"name": 1}, 7]}, None, 404, 500])
    def test_that_lists_no_model(self, fake: FaultyServer, models: Any) -> None:
        fake.models, status = models, models if isinstance(models, int) else 0
        fake.status["/v1/models"] = status
        found = findings(fake)
        assert found["server"].verdict == "bad"
        assert not status or f"HTTP {status}" in found["server"].found
        assert found["cached tokens"].verdict == "unknown"
        assert fake.bodies("/v1/completions") == []
        assert verdicts(fake, model="fake")["server"] == "warning"
        assert {body["model"] for body in fake.bodies("/v1/completions")} == {"fake"}

    def test_of_another_kind(self, fake: FaultyServer) -> None:
        fake.raw = {"/v1/models": b"<html>", "/metrics": b"<html>", "/v1/completions": b"[" * 100_000}
        found = verdicts(fake, model="any")
        assert found.pop("server") == "warning"
        assert set(found.values()) == {"unknown"}

    def test_is_given_the_key_everywhere(self, fake: FaultyServer) -> None:
        fake.key = KEY
        samples = ("one prompt", "another prompt")
        assert "good" in verdicts(fake, api_key=KEY, samples=samples)["cached tokens"]
        assert {headers["Authorization"] for _, headers, _ in fake.seen} == {f"Bearer {KEY}"}
        assert {"/v1/models", "/metrics", "/v1/completions", "/tokenize"} <= {path for path, _, _ in fake.seen}

    def test_whose_names_would_paint_the_terminal(self, fake: FaultyServer) -> None:
        fake.models = {"data": [{"id": "\x1b[31mred"}]}
        assert findings(fake)["server"].found.isprintable()


class TestPrefixCaching:
    ON, OFF = page(), page(gauge(enable_prefix_caching="False"))

    @pytest.mark.parametrize(
        ("metrics", "caching", "reporting", "verdict", "said"),
        [
            (ON, True, True, "good", "32 of 48 tokens"),
            (
                OFF,
                False,
                True,
                "bad",
                "off: every prompt is computed from its first token on start vLLM with --enable-prefix-caching",
            ),
            # By experiment.
            (None, True, True, "good", "tokens of a prompt were cached when it was repeated"),
            (None, False, True, "bad", "--disable-radix-cache"),
            (ON, True, False, "good", "as the server's metrics say"),
            (None, True, False, "unknown", "--enable-prompt-tokens-details"),
        ],
        ids=["on", "off", "found", "missed", "said", "unknown"],
    )
    def test_is_what_answers_or_else_metrics_say(
        self, fake: FaultyServer, metrics: str | None, caching: bool, reporting: bool, verdict: str, said: str
    ) -> None:
        fake.metrics, fake.caching, fake.reporting = metrics, caching, reporting
        found = findings(fake)
        assert found["prefix caching"].verdict == verdict
        assert said in f"{found['prefix caching'].found} {found['prefix caching'].advice}"
        first, second, *_ = fake.bodies("/v1/completions")
        assert first["prompt"] == second["prompt"] and first["max_tokens"] == 1
        if metrics == self.OFF:
            assert found["cached tokens"].verdict == "good"

    def test_is_tried_until_two_requests_meet_in_one_engine(self, fake: FaultyServer) -> None:
        three = {"num_gpu_blocks": 3 * 10_001}
        fake.engines, fake.metrics = 3, page(*[gauge(engine=number, **three) for number in range(3)])
        found = findings(fake)
        assert found["prefix caching"].verdict == found["cached tokens"].verdict == "good"
        assert "each of 3 engines" in found["capacity"].found
        assert len(fake.bodies("/v1/completions")) == 4

    def test_is_tried_with_a_new_prompt_each_time(self, fake: FaultyServer) -> None:
        findings(fake)
        findings(fake)
        prompts = [str(body["prompt"]) for body in fake.bodies("/v1/completions")]
        assert len(set(prompts)) == 2


@pytest.mark.parametrize(
    ("metrics", "verdict", "said"),
    [
        (page(), "good", "160,000 tokens in blocks of 16: about 80 prompts"),
        # Small below eight prompts.
        (page(gauge(num_gpu_blocks=1001)), "good", "about 8 prompts of 2,000 tokens None"),
        (page(gauge(num_gpu_blocks=1000)), "warning", "--gpu-memory-utilization"),
        (page(gauge(num_gpu_blocks=11)), "warning", "--gpu-memory-utilization"),
        ("sglang:num_running_reqs 0.0\n", "unknown", "RAGORDER_CAPACITY_TOKENS"),
    ],
)
def test_capacity_is_in_tokens_blocks_and_prompts(fake: FaultyServer, metrics: str, verdict: str, said: str) -> None:
    fake.metrics = metrics
    found = findings(fake)["capacity"]
    assert found.verdict == verdict
    assert said in f"{found.found} {found.advice}"


class TestCachedTokens:
    @pytest.mark.parametrize(
        ("changes", "verdict", "said"),
        [
            ({"reporting": False}, "warning", ["--enable-prompt-tokens-details", "--enable-cache-report"]),
            ({"caching": False}, "warning", ["replicas"]),
            # Asked for in the form that the server takes.
            *(({"completions": form}, "good", []) for form in ("ids", "text", "chat")),
            ({"completions": "none"}, "unknown", ["HTTP 404"]),
            ({"hangs": {"/v1/completions"}}, "unknown", ["--timeout"]),
        ],
    )
    def test_are_judged_by_what_the_server_reports(
        self, fake: FaultyServer, changes: dict[str, Any], verdict: str, said: list[str]
    ) -> None:
        for name, value in changes.items():
            setattr(fake, name, value)
        found = findings(fake, timeout_s=1 if fake.hangs else 5)["cached tokens"]
        assert found.verdict == verdict
        assert [words for words in said if words not in f"{found.found} {found.advice}"] == []

    @pytest.mark.parametrize("usage", [None, 7, {}, {"prompt_tokens_details": {"cached_tokens": "many"}}])
    def test_are_not_reported_in_any_form_that_could_be_read(self, fake: FaultyServer, usage: Any) -> None:
        fake.raw["/v1/completions"] = json.dumps({"usage": usage}).encode()
        assert verdicts(fake)["cached tokens"] == "warning"

    def test_are_asked_for_with_a_prompt_that_fits(self, fake: FaultyServer) -> None:
        fake.models = {"data": [{"id": "fake", "max_model_len": 40}]}
        findings(fake)
        assert len(fake.bodies("/v1/completions")[0]["prompt"]) == 39


class TestKVEvents:
    @staticmethod
    def config_in(finding: Finding) -> Any:
        return json.loads(str(finding.advice).split("--kv-events-config '")[1].split("'")[0])

    @pytest.mark.parametrize(
        ("host", "engines", "published", "there"),
        [
            ("127.0.0.1", 1, "ipc:///tmp/vllm-events", "ipc:///tmp/vllm-events"),
            ("127.0.0.1", 2, "tcp://*:5557", "tcp://127.0.0.1:5557"),
            ("gpu7", 1, "tcp://*:5557", "tcp://gpu7:5557"),
            ("fe80::7", 1, "tcp://*:5557", "tcp://[fe80::7]:5557"),
        ],
    )
    def test_are_advised_without_a_topic(self, host: str, engines: int, published: str, there: str) -> None:
        """It would have to be given twice. ipc is for one engine on the same machine."""
        (finding,) = check_events(None, host, engines, list, 1.0)
        config = self.config_in(finding)
        assert (finding.verdict, config["enable_kv_cache_events"]) == ("unknown", True)
        assert "LRU" in finding.found
        assert (config["endpoint"], config.keys() & {"topic"}) == (published, set())
        assert f"--events-endpoint {there} --replay-endpoint tcp://" in str(finding.advice)

    @pytest.mark.parametrize("replay", [True, False])
    @pytest.mark.parametrize("silent", [True, False])
    def test_are_advised_once(self, fake: FaultyServer, publish: Publish, replay: bool, silent: bool) -> None:
        endpoint = publish().endpoint if silent else f"tcp://127.0.0.1:{free_port()}"
        events = Events(endpoint, f"tcp://127.0.0.1:{free_port()}" if replay else None)
        found = findings(fake, events=events, timeout_s=1 if silent else 0.3)
        advice = [str(found[check].advice) for check in ("KV events", "event replay")]
        assert [text.count("enable_kv_cache_events") for text in advice] == [1, 0]
        assert "replay_endpoint" in advice[1]

    @pytest.mark.parametrize(("dialect", "rank"), [("vLLM", 0), ("older vLLM", 0), ("SGLang", 0), ("vLLM", 2)])
    def test_arrive_and_are_repeated(self, fake: FaultyServer, publish: Publish, dialect: str, rank: int) -> None:
        """Also of one rank of several, with its own endpoints: an external balancer gives each its server."""
        publisher = publish(dialect=dialect, ports=True)
        publisher.rank = rank
        fake.on_tokens = publisher.serve
        events = Events(publisher.endpoint, publisher.replay_endpoint, publisher.topic.decode())
        found = verdicts(fake, events=events)
        assert found["KV events"] == found["event replay"] == "good"

    def test_kv_events_are_distinguished_from_other_messages(self, fake: FaultyServer, publish: Publish) -> None:
        publisher = publish()

        def tell(token_ids: list[int]) -> None:
            for frames in ([b"kv-events"], [b"", b"1", b"\xc1"], [b"", b"12345678", msgspec.msgpack.encode([1, [7]])]):
                publisher.send(*frames)
            publisher.serve(token_ids[::-1])
            publisher.serve(token_ids)

        fake.on_tokens = tell
        assert verdicts(fake, events=Events(publisher.endpoint))["KV events"] == "good"

    def test_of_another_server_are_not_ours(self, fake: FaultyServer, publish: Publish) -> None:
        publisher = publish()
        fake.on_tokens = lambda token_ids: publisher.serve(token_ids[::-1])
        events = Events(publisher.endpoint, publisher.replay_endpoint)
        found = findings(fake, events=events, timeout_s=2)
        assert found["KV events"].verdict == "bad"
        assert "this server's own endpoint" in str(found["KV events"].advice)
        assert found["event replay"].verdict == "unknown"

    def test_of_a_topic_that_was_not_asked_for(self, fake: FaultyServer, publish: Publish) -> None:
        publisher = publish(topic="tenant-7")
        fake.on_tokens = publisher.serve
        found = findings(fake, events=Events(publisher.endpoint, topic="kv-events"))["KV events"]
        assert found.verdict == "bad"
        assert '--events-topic "tenant-7"' in str(found.advice)

    @pytest.mark.parametrize("web", [False, True], ids=["nobody", "a web server"])
    def test_are_not_published_by_anybody(self, fake: FaultyServer, web: bool) -> None:
        endpoint = fake.base_url.replace("http", "tcp") if web else f"tcp://127.0.0.1:{free_port()}"
        found = findings(fake, events=Events(endpoint, endpoint), timeout_s=0.3)
        assert found["KV events"].verdict == found["event replay"].verdict == "bad"
        assert "no publisher" in found["KV events"].found
        assert "--kv-events-config" in str(found["KV events"].advice)

    @pytest.mark.parametrize("endpoint", ["tcp://*:5557", "127.0.0.1:5557", "", "tcp://host:port"])
    def test_cannot_be_listened_to_at_what_is_no_endpoint(self, fake: FaultyServer, endpoint: str) -> None:
        found = findings(fake, events=Events(endpoint, endpoint))
        assert found["KV events"].verdict == "bad"
        assert "tcp://HOST:PORT" in str(found["KV events"].advice)

    def test_are_not_repeated(self, fake: FaultyServer, publish: Publish) -> None:
        publisher = publish()
        fake.on_tokens, publisher.kept = publisher.serve, False
        found = findings(fake, events=Events(publisher.endpoint, publisher.replay_endpoint))
        assert found["KV events"].verdict == "good"
        assert found["event replay"].verdict == "bad"
        assert "buffer_steps" in str(found["event replay"].advice)

    def test_are_listened_to_at_every_engine(self, fake: FaultyServer, publish: Publish) -> None:
        two = {"num_gpu_blocks": 2 * 10_001}
        fake.metrics = page(gauge(engine=0, **two), gauge(engine=1, **two))
        publisher = publish()
        fake.on_tokens = publisher.serve
        address, _, port = publisher.endpoint.rpartition(":")
        assert verdicts(fake, events=Events(f"{address}:{int(port) - 1}"))["KV events"] == "good"

    def test_are_unknown_of_a_server_that_takes_no_token_ids(self, fake: FaultyServer, publish: Publish) -> None:
        fake.completions = "text"
        assert verdicts(fake, events=Events(publish().endpoint))["KV events"] == "unknown"


class TestWhatAnswers:
    """Advice is for what answers: vLLM's options help vLLM alone."""

    def test_the_proxy_sends_one_to_its_upstream(self, fake: FaultyServer) -> None:
        fake.raw["/ragorder/health"] = b'{"status":"ok"}'
        fake.metrics = "ragorder_requests_total 1.0\n"
        found = findings(fake)
        assert found["server"].verdict == "good" and found["server"].found.endswith("this is ragorder serve")
        assert found["capacity"].found == "this is ragorder serve, whose /metrics are its own"
        assert "--disable-log-stats" not in str(list(found.values()))
        for check in ("server", "capacity", "KV events"):
            assert "check the server that it forwards to" in (found[check].advice or "")
        assert found["prefix caching"].verdict == "good", "what is seen through the proxy stands"

    def test_ragorders_own_engine_and_other_servers_get_no_options_of_vllm(self, fake: FaultyServer) -> None:
        fake.models["data"][0]["owned_by"] = "ragorder"
        fake.metrics = "other 1.0\n"
        found = findings(fake)
        assert {found[check].verdict for check in ("capacity", "KV events")} == {"good"}
        assert "vLLM" not in str(list(found.values()))
        fake.models["data"][0]["owned_by"] = "llamacpp"
        fake.metrics, fake.reporting = None, False
        found = findings(fake)
        assert not any("--" in (finding.advice or "") for finding in found.values())
        assert "start vLLM" not in str(list(found.values()))

    @pytest.mark.parametrize("owner", ["vllm", "sglang"])
    def test_vllm_and_sglang_get_theirs(self, fake: FaultyServer, owner: str) -> None:
        fake.models["data"][0]["owned_by"] = owner
        fake.caching = fake.reporting = False
        fake.metrics = None
        assert "--enable-prefix-caching" in (findings(fake)["prefix caching"].advice or "")

    def test_a_page_at_every_path_is_no_proxy(self, fake: FaultyServer) -> None:
        fake.raw["/ragorder/health"] = b"<html>"
        assert "ragorder serve" not in findings(fake)["server"].found

    def test_an_advice_is_printed_once(self, fake: FaultyServer) -> None:
        options = ("--events-endpoint", f"tcp://127.0.0.1:{free_port()}", "--timeout", "1")
        said = doctor(fake.base_url, *options).output
        assert "event replay" in said
        assert said.count("--kv-events-config '") == 1


@pytest.mark.vllm
class TestARealServer:
    @pytest.fixture(scope="class")
    def events(self, vllm_server: Any) -> Events:
        return Events(vllm_server.events_endpoint, vllm_server.replay_endpoint, vllm_server.events_topic)

    def test_passes_every_check_but_that_it_is_small(self, vllm_server: Any, events: Events) -> None:
        samples = (chat(SYSTEM * 3, "[paris]\n…"), chat(SYSTEM * 3, "[rome]\n…"))
        found = {finding.check: finding for finding in examine(vllm_server.base_url, events=events, samples=samples)}
        assert {check for check, finding in found.items() if finding.verdict != "good"} == {"capacity"}
        assert found.keys() >= {"server", "prefix caching", "cached tokens", "KV events", "event replay"}
        assert f"{vllm_server.capacity_tokens:,} tokens in blocks of 32" in found["capacity"].found
        assert "64 of 96 tokens" in found["prefix caching"].found


ADDRESSES = ("", "localhost:8000", "ftp://host", "http://", "http://me:secret@host:port", "me:secret@host:8000")


class TestTheCommand:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Prompts:
        (tmp_path / "one.txt").write_text(f"2026-11-20\n{SYSTEM}", "utf-8")
        (tmp_path / "two.json").write_text(json.dumps(chat("2026-11-21\n", SYSTEM)), "utf-8")
        return ["--prompt", tmp_path / "one.txt", "--prompt", tmp_path / "two.json"]

    def test_says_yes_to_a_good_server_and_no_to_a_bad_one_and_paints_no_markup(self, fake: FaultyServer) -> None:
        fake.models = {"data": [{"id": "[red]model[/red]"}]}
        done = doctor(fake.base_url)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.count("✓") == 4
        assert "?" in done.stdout and "[red]model[/red]" in done.stdout
        fake.metrics = page(gauge(enable_prefix_caching="False", num_gpu_blocks=9))
        done = doctor(fake.base_url)
        assert done.exit_code == 1
        assert all(each in done.stdout for each in ("✗", "!", "--enable-prefix-caching"))

    def test_never_breaks_what_is_to_be_copied(self, fake: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        line = next(line for line in doctor(fake.base_url).stdout.splitlines() if "--kv-events-config" in line)
        json.loads(line.split("--kv-events-config '")[1].split("'")[0])

    def test_writes_json(self, fake: FaultyServer, prompts: Prompts) -> None:
        done = doctor(fake.base_url, "--json", *prompts)
        assert done.exit_code == 1
        text, messages = fake.bodies("/tokenize")
        assert text["prompt"].startswith("2026-11-20") and messages["messages"] == chat("2026-11-21\n", SYSTEM)
        found = json.loads(done.stdout)["findings"]
        assert {"server", "capacity", "shared prefix"} <= {finding["check"] for finding in found}
        assert all(finding.keys() == {"check", "verdict", "found", "advice"} for finding in found)

    @pytest.mark.parametrize("text", ["[d1] a document", "[1, 2]", "{}", "[]", "[" * 100_000])
    def test_takes_for_text_what_is_not_messages(self, fake: FaultyServer, tmp_path: Path, text: str) -> None:
        for name, content in (("a", text), ("b", text + " ")):
            (tmp_path / name).write_text(content, "utf-8")
        doctor(fake.base_url, "--prompt", tmp_path / "a", "--prompt", tmp_path / "b")
        assert fake.bodies("/tokenize")[0]["prompt"] == text

    def test_hands_on_where_documents_begin(self, fake: FaultyServer, tmp_path: Path) -> None:
        for name in ("Alice", "Bob"):
            (tmp_path / name).write_text(f"{SYSTEM}For {name}.\n<doc>…", "utf-8")
        options = ["--prompt", tmp_path / "Alice", "--prompt", tmp_path / "Bob"]
        assert doctor(fake.base_url, *options).exit_code == 0
        assert doctor(fake.base_url, *options, "--document-marker", "<doc>").exit_code == 1

    def test_takes_key_and_events_from_the_environment(
        self, fake: FaultyServer, publish: Publish, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publisher = publish(topic="ours")
        fake.key, fake.on_tokens = KEY, publisher.serve
        monkeypatch.setenv("RAGORDER_API_KEY", KEY)
        monkeypatch.setenv("RAGORDER_EVENTS_ENDPOINT", publisher.endpoint)
        monkeypatch.setenv("RAGORDER_REPLAY_ENDPOINT", publisher.replay_endpoint)
        monkeypatch.setenv("RAGORDER_EVENTS_TOPIC", "ours")
        done = doctor(fake.base_url)
        assert done.exit_code == 0
        assert done.stdout.count("✓") == 6
        assert KEY not in done.output

    def test_logs_neither_prompt_nor_key(
        self, fake: FaultyServer, prompts: Prompts, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG):
            doctor(fake.base_url.replace("//", "//me:secret@"), *prompts)
            doctor(fake.base_url, *prompts, "--api-key", KEY)
        assert caplog.records
        for hidden in (KEY, "secret", "bWU6c2VjcmV0", "2026-11-2", SYSTEM[:20]):
            assert hidden not in caplog.text

    @pytest.mark.parametrize(
        ("arguments", "said", "status"),
        [
            *(([address], "write http://", 2) for address in ADDRESSES),
            *((["URL", "--api-key", key], "key", 2) for key in ("ключ-secret", "two\nlines-secret")),
            (["http://127.0.0.1:9"], "http://127.0.0.1:9", 1),
            (["URL", "--prompt", "ONE"], "twice", 2),
            (["URL", *["--prompt", "ONE"] * 3], "twice", 2),
            (["URL", "--prompt", "nothing.txt"], "nothing.txt", 2),
            (["URL", "--replay-endpoint", "tcp://h:1"], "--events-endpoint", 2),
            (["URL", "--document-marker", "["], "--prompt", 2),
        ],
    )
    def test_refuses_what_it_cannot_do(
        self, fake: FaultyServer, prompts: Prompts, arguments: list[str], said: str, status: int
    ) -> None:
        known = {"URL": fake.base_url, "ONE": str(prompts[1])}
        refused = refusal(*(known.get(each, each) for each in arguments), status=status)
        assert said in refused and "secret" not in refused
        assert fake.seen == []

    def test_takes_a_key_and_a_time(self, fake: FaultyServer) -> None:
        fake.key = KEY
        done = doctor(fake.base_url, "--api-key", KEY)
        assert done.exit_code == 0 and KEY not in done.output
        said = refusal(fake.base_url, "--api-key", KEY + "2", status=1)
        assert "401" in said and KEY not in said
        fake.hangs.add("/v1/models")
        assert "within 0.2 s" in refusal(fake.base_url, "--timeout", "0.2", status=1)

    @pytest.mark.parametrize("content", [b"\xff\xfe", b'[{"content": "no role"}]', b'[{"role": "user"}, 7]'])
    def test_refuses_a_prompt_that_it_cannot_read(self, fake: FaultyServer, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "odd").write_bytes(content)
        assert "odd" in refusal(fake.base_url, "--prompt", tmp_path / "odd", "--prompt", tmp_path / "odd", status=2)
        assert fake.seen == []

    def test_says_which_extra_is_missing(self, python: Callable[..., Any]) -> None:
        command = ("-c", "from ragorder.cli import main; main(prog_name='ragorder')", "doctor")
        assert python(*command, "--help", blocked=LIVE_PACKAGES).returncode == 0
        done = python(*command, "http://127.0.0.1:1", blocked=LIVE_PACKAGES)
        assert done.returncode == 1
        assert done.stderr == "Error: talking to a server needs httpx2: in a clone of ragorder, pip install '.[live]'\n"
