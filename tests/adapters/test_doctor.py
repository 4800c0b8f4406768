"""`ragorder doctor` and what a server says of its cache: against a real vLLM, and against servers with every fault."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run_command
from support.http_server import Handler, LocalServer
from support.rings import length

from ragorder.adapters.doctor import AddressError, Events, Finding, examine
from ragorder.adapters.doctor.events import check_events
from ragorder.adapters.vllm.cache_config import CacheConfig, ServerError, read_cache_config
from ragorder.cli import main

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")
zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

BLOCK = 16
KEY = "sk-never-to-be-seen"
END = (-1).to_bytes(8, "big", signed=True)
LIVE_PACKAGES = ("httpx2", "prometheus_client", "zmq", "msgspec")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "300")


def gauge(**labels: object) -> str:
    """vLLM's own line about one engine's cache; a label given as None is left out."""
    known = {
        "block_size": BLOCK,
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": BLOCK,
        "enable_prefix_caching": "True",
        "engine": 0,
        "hash_block_size": "None",
        "kv_cache_size_tokens": 10_001 * BLOCK,
        "num_gpu_blocks": 10_001,
    } | labels
    inside = ",".join(f'{name}="{value}"' for name, value in known.items() if value is not None)
    return f"vllm:cache_config_info{{{inside}}} 1.0\n"


def page(*gauges: str) -> str:
    head = "# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n"
    return 'vllm:num_requests_running{engine="0"} 0.0\n' + head + "".join(gauges or (gauge(),))


class FakeServer(LocalServer):
    """As much of an OpenAI-compatible server as the doctor asks for, faults included, on a socket of its own."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.models: Any = {"data": [{"id": "fake", "max_model_len": 8192}]}
        self.metrics: str | None = page()
        self.caching = True
        self.reporting = True
        self.completions = "ids"
        self.tokenizes = True
        self.engines = 1
        self.key: str | None = None
        self.status: dict[str, int] = {}
        self.raw: dict[str, bytes] = {}
        self.hangs: set[str] = set()
        self.on_tokens: Callable[[list[int]], None] = lambda token_ids: None
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self._caches: dict[int, set[str]] = {}
        self._served = 0
        self._lock = Lock()
        self._gone = Event()

    def stop(self) -> None:
        self._gone.set()
        super().stop()

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, _, body in self.seen if seen == path]

    def respond(self, handler: Handler, body: Any) -> None:
        path = handler.path
        self.seen.append((path, dict(handler.headers), body))
        if path in self.hangs:
            self._gone.wait(60)
        allowed = self.key is None or handler.headers.get("Authorization") == f"Bearer {self.key}"
        status, content = (self.status.get(path, 0), b"") if allowed else (401, b"")
        if not status:
            status, content = (200, self.raw[path]) if path in self.raw else self._route(path, body)
        handler.answer(status, content)

    def _route(self, path: str, body: Any) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps(self.models).encode()
        if path == "/metrics" and self.metrics is not None:
            return 200, self.metrics.encode()
        if path == "/tokenize" and self.tokenizes:
            text = (
                body["prompt"]
                if "prompt" in body
                else "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
            )
            return 200, json.dumps({"tokens": [ord(char) for char in text]}).encode()
        if path == "/v1/completions" and self.completions in ("ids", "text"):
            if isinstance(body["prompt"], list) and self.completions == "text":
                return 400, b""
            return 200, self._complete(body["prompt"])
        if path == "/v1/chat/completions" and self.completions == "chat":
            return 200, self._complete(body["messages"][0]["content"])
        return 404, b""

    def _complete(self, prompt: Any) -> bytes:
        with self._lock:
            self._served += 1
            cache = self._caches.setdefault(self._served % self.engines, set())
        hit = (len(prompt) - 1) // BLOCK * BLOCK if self.caching and str(prompt) in cache else 0
        cache.add(str(prompt))
        if isinstance(prompt, list):
            self.on_tokens(prompt)
        details = {"cached_tokens": hit} if self.reporting else None
        return json.dumps({"usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": details}}).encode()


class _Handler(Handler):
    protocol_version = "HTTP/1.0"
    server: FakeServer

    def do_GET(self) -> None:
        self.server.respond(self, None)

    def do_POST(self) -> None:
        self.server.respond(self, self.read_json())


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class Publisher:
    """Publishes the blocks of every prompt that its server computes, as KV events."""

    def __init__(self, topic: str = "kv-events", *, arrays: bool = False, replays: bool = True) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._router = self._context.socket(zmq.ROUTER)
        self.replay_endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._topic, self._arrays, self._replays = topic.encode(), arrays, replays
        self._sent: list[bytes] = []
        self._gone = Event()
        self._thread = Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._gone.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def tell(self, token_ids: list[int]) -> None:
        whole = token_ids[: len(token_ids) // BLOCK * BLOCK]
        hashes = list(range(len(whole) // BLOCK))
        if self._arrays:
            event: Any = ["BlockStored", hashes, None, whole, BLOCK, None]
        else:
            event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": whole}
        payload = msgspec.msgpack.encode([time.time(), [{"type": "AllBlocksCleared"}, event], 0])
        self._sent.append(payload)
        self._socket.send_multipart([self._topic, (len(self._sent) - 1).to_bytes(8, "big"), payload])

    def babble(self) -> None:
        for frames in ([b"kv-events"], [b"", b"1", b"\xc1"], [b"", b"12345678", msgspec.msgpack.encode([1, [7]])]):
            self._socket.send_multipart(frames)

    def _repeat(self) -> None:
        while not self._gone.is_set():
            if self._router.poll(20):
                client, _, start = self._router.recv_multipart()
                for number in range(int.from_bytes(start, "big"), len(self._sent) if self._replays else 0):
                    self._router.send_multipart(
                        [client, b"", self._topic, number.to_bytes(8, "big"), self._sent[number]]
                    )
                self._router.send_multipart([client, b"", b"", END, b""])


Publish = Callable[..., Publisher]
Prompts = list[str | Path]


@pytest.fixture
def publish() -> Iterator[Publish]:
    with ExitStack() as stack:

        def make(topic: str = "kv-events", **options: bool) -> Publisher:
            publisher = Publisher(topic, **options)
            stack.callback(publisher.close)
            return publisher

        yield make


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def findings(server: FakeServer, **options: Any) -> dict[str, Finding]:
    """Findings by check. Every one of them is complete."""
    found = examine(server.base_url, **{"timeout_s": 5.0} | options)
    for finding in found:
        assert finding.found
        assert finding.verdict == "good" or finding.advice
    assert len({finding.check for finding in found}) == len(found)
    return {finding.check: finding for finding in found}


def verdicts(server: FakeServer, **options: Any) -> dict[str, str]:
    return {check: finding.verdict for check, finding in findings(server, **options).items()}


def chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


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


def sized(num_gpu_blocks: int, *engines: int) -> list[dict[str, Any]]:
    """Labels of engines with so many blocks each."""
    return [
        {"engine": number, "num_gpu_blocks": num_gpu_blocks, "kv_cache_size_tokens": blocks * BLOCK}
        for number, blocks in enumerate(engines)
    ]


ALL = 10_000 * BLOCK
# Labels, and the configuration.
GAUGES: dict[str, tuple[list[dict[str, Any]], CacheConfig]] = {
    "without the null block": (sized(129, 129), CacheConfig(BLOCK, 128 * BLOCK, True, 1)),
    # As vLLM 0.32 says it with --data-parallel-size 2 and 129 blocks in each engine: the sum of both.
    "one engine of two": (sized(258, 129, 129), CacheConfig(BLOCK, 128 * BLOCK, True, 2)),
    "the smallest engine": (sized(140, 90, 50), CacheConfig(BLOCK, 50 * BLOCK, True, 2)),
    "two processes": ([{"concurrency": "2.0"}, {"concurrency": "2.1"}], CacheConfig(BLOCK, ALL, True, 1)),
    "blocks over GPUs": (
        [{"effective_attention_block_size": 64, "num_gpu_blocks": 101, "kv_cache_size_tokens": None}],
        CacheConfig(64, 100 * 64, True, 1),
    ),
    "a block for each kind of layer": ([{"kv_cache_size_tokens": 5000}], CacheConfig(BLOCK, 5000, True, 1)),
    "an older version": (
        [dict.fromkeys(("effective_attention_block_size", "kv_cache_size_tokens", "engine", "hash_block_size"))],
        CacheConfig(BLOCK, ALL, True, 1),
    ),
    "off": ([{"enable_prefix_caching": "False"}], CacheConfig(BLOCK, ALL, False, 1)),
    "undecided": ([{"enable_prefix_caching": "None"}], CacheConfig(BLOCK, ALL, None, 1)),
    "unsaid": ([{"enable_prefix_caching": None}], CacheConfig(BLOCK, ALL, None, 1)),
}


class TestWhatAServerSaysOfItsCache:
    @pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "?key=1"])
    def test_is_found_however_its_address_is_written(self, fake: FakeServer, end: str) -> None:
        assert read_cache_config(fake.base_url + end) == CacheConfig(BLOCK, 10_000 * BLOCK, True, 1)
        assert [path for path, _, _ in fake.seen] == ["/metrics"]

    def test_is_asked_for_below_a_path(self, fake: FakeServer) -> None:
        fake.raw["/llm/metrics"] = page().encode()
        assert read_cache_config(f"{fake.base_url}/llm/v1").block_size == BLOCK

    @pytest.mark.parametrize("name", GAUGES)
    def test_is_read_from_metrics(self, fake: FakeServer, name: str) -> None:
        labels, config = GAUGES[name]
        fake.metrics = page(*(gauge(**each) for each in labels))
        assert read_cache_config(fake.base_url) == config

    def test_is_asked_for_with_the_key_or_the_user_of_the_address(self, fake: FakeServer) -> None:
        read_cache_config(fake.base_url.replace("//", "//me:secret@"))
        assert fake.seen[0][1]["Authorization"] == "Basic bWU6c2VjcmV0"
        fake.key = KEY
        assert read_cache_config(fake.base_url, api_key=f"{KEY}\n").engines == 1


class TestAServerThatDoesNotSay:
    def complaint(self, server: FakeServer, **options: Any) -> str:
        with pytest.raises(ServerError) as caught:
            read_cache_config(server.base_url.replace("//", "//me:secret@"), **options)
        assert server.base_url in str(caught.value)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_because_it_hangs_or_is_gone(self, fake: FakeServer) -> None:
        fake.hangs.add("/metrics")
        assert "within 0.2 s" in self.complaint(fake, timeout_s=0.2)
        fake.stop()
        assert "check host and port" in self.complaint(fake)

    @pytest.mark.parametrize(
        ("status", "said"), [(401, "RAGORDER_API_KEY"), (403, "RAGORDER_API_KEY"), (503, "HTTP 503")]
    )
    def test_because_of_a_status(self, fake: FakeServer, status: int, said: str) -> None:
        fake.status["/metrics"] = status
        assert said in self.complaint(fake)

    @pytest.mark.parametrize(
        ("metrics", "said"),
        [
            (None, "capacity_tokens"),
            (b"python_info 1.0\n", "--disable-log-stats"),
            (b"sglang:num_running_reqs 0.0\n", "SGLang"),
            (b"vllm:num_requests_running 0.0\n", "version"),
            (page(gauge(num_gpu_blocks=1)).encode(), "--kv-cache-memory-bytes"),
            (b"vllm:cache_config_info{block", "capacity_tokens"),
            (b"vllm:cache_config_info{} x\n", "capacity_tokens"),
            (b"\xff\x00", "capacity_tokens"),
        ],
        ids=["no page", "no metrics of vLLM", "SGLang", "another version", "no blocks", "cut", "no number", "bytes"],
    )
    def test_because_of_its_metrics(self, fake: FakeServer, metrics: bytes | None, said: str) -> None:
        fake.metrics = None
        if metrics is not None:
            fake.raw["/metrics"] = metrics
        assert said in self.complaint(fake)

    @pytest.mark.parametrize("value", ["None", "", "0", "-1", "1e9", "9" * 5000, None])
    @pytest.mark.parametrize("label", ["num_gpu_blocks", "block_size"])
    def test_because_a_size_is_not_set_yet(self, fake: FakeServer, label: str, value: str | None) -> None:
        fake.metrics = page(gauge(**{"effective_attention_block_size": "None", label: value}))
        assert label in self.complaint(fake)

    @pytest.mark.parametrize(
        ("pieces", "timeout_s", "said"),
        [
            ([b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", *[b"#"] * 100], 0.3, "within"),
            ([b"SSH-2.0-OpenSSH\r\n"], 5.0, "no answer in HTTP"),
        ],
        ids=["never ends", "not HTTP"],
    )
    def test_because_of_what_it_sends(self, pieces: list[bytes], timeout_s: float, said: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def send() -> None:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    for piece in pieces:
                        client.sendall(piece)
                        time.sleep(0.05)

            Thread(target=send, daemon=True).start()
            with pytest.raises(ServerError, match=said):
                read_cache_config(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=timeout_s)

    @pytest.mark.parametrize(
        "address", ["", "localhost:8000", "ftp://host", "http://", "http://me:secret@host:port", "me:secret@host:8000"]
    )
    def test_because_there_is_no_such_address(self, address: str) -> None:
        with pytest.raises(AddressError, match="write http://") as caught:
            read_cache_config(address)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("key", ["ключ-secret", "two\nlines-secret"])
    def test_because_no_header_takes_the_key(self, fake: FakeServer, key: str) -> None:
        with pytest.raises(AddressError, match="key") as caught:
            read_cache_config(fake.base_url, api_key=key)
        assert "secret" not in str(caught.value)

    def test_is_always_an_error_of_the_server(self, fake: FakeServer) -> None:
        labels = st.dictionaries(st.sampled_from(["block_size", "num_gpu_blocks", "engine"]), st.text())

        @settings(max_examples=length(50, 10))
        @given(labels, st.text())
        def read(values: dict[str, str], tail: str) -> None:
            fake.raw["/metrics"] = page(gauge(**values) + tail).encode("utf-8", "replace")
            try:
                assert read_cache_config(fake.base_url).capacity_tokens > 0
            except ServerError as error:
                assert fake.base_url in str(error)

        read()


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
        self, fake: FakeServer, models: list[str], options: Any, asked: str, verdict: str, said: str
    ) -> None:
        if models:
            fake.models = {"data": [{"id": name} for name in models]}
        served = findings(fake, **options)["server"]
        assert served.verdict == verdict and said in f"{served.found} {served.advice}"
        assert ("asked for" in served.found) == (len(models) > 1 and not options)
        assert {body["model"] for body in fake.bodies("/v1/completions")} == {asked}

    @pytest.mark.parametrize("models", [{"data": []}, {}, [], {"data": [{"name": 1}, 7]}, None, 404, 500])
    def test_that_lists_no_model(self, fake: FakeServer, models: Any) -> None:
        fake.models, status = models, models if isinstance(models, int) else 0
        fake.status["/v1/models"] = status
        found = findings(fake)
        assert found["server"].verdict == "bad"
        assert not status or f"HTTP {status}" in found["server"].found
        assert found["cached tokens"].verdict == "unknown"
        assert fake.bodies("/v1/completions") == []
        assert verdicts(fake, model="fake")["server"] == "warning"
        assert {body["model"] for body in fake.bodies("/v1/completions")} == {"fake"}

    def test_of_another_kind(self, fake: FakeServer) -> None:
        fake.raw = {"/v1/models": b"<html>", "/metrics": b"<html>", "/v1/completions": b"[" * 100_000}
        found = verdicts(fake, model="any")
        assert found.pop("server") == "warning"
        assert set(found.values()) == {"unknown"}

    def test_is_given_the_key_everywhere(self, fake: FakeServer) -> None:
        fake.key = KEY
        samples = ("one prompt", "another prompt")
        assert "good" in verdicts(fake, api_key=KEY, samples=samples)["cached tokens"]
        assert {headers["Authorization"] for _, headers, _ in fake.seen} == {f"Bearer {KEY}"}
        assert {"/v1/models", "/metrics", "/v1/completions", "/tokenize"} <= {path for path, _, _ in fake.seen}

    def test_whose_names_would_paint_the_terminal(self, fake: FakeServer) -> None:
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
        self, fake: FakeServer, metrics: str | None, caching: bool, reporting: bool, verdict: str, said: str
    ) -> None:
        fake.metrics, fake.caching, fake.reporting = metrics, caching, reporting
        found = findings(fake)
        assert found["prefix caching"].verdict == verdict
        assert said in f"{found['prefix caching'].found} {found['prefix caching'].advice}"
        first, second, *_ = fake.bodies("/v1/completions")
        assert first["prompt"] == second["prompt"] and first["max_tokens"] == 1
        if metrics == self.OFF:
            assert found["cached tokens"].verdict == "good"

    def test_is_tried_until_two_requests_meet_in_one_engine(self, fake: FakeServer) -> None:
        three = {"num_gpu_blocks": 3 * 10_001}
        fake.engines, fake.metrics = 3, page(*[gauge(engine=number, **three) for number in range(3)])
        found = findings(fake)
        assert found["prefix caching"].verdict == found["cached tokens"].verdict == "good"
        assert "each of 3 engines" in found["capacity"].found
        assert len(fake.bodies("/v1/completions")) == 4

    def test_is_tried_with_a_new_prompt_each_time(self, fake: FakeServer) -> None:
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
def test_capacity_is_in_tokens_blocks_and_prompts(fake: FakeServer, metrics: str, verdict: str, said: str) -> None:
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
        self, fake: FakeServer, changes: dict[str, Any], verdict: str, said: list[str]
    ) -> None:
        for name, value in changes.items():
            setattr(fake, name, value)
        found = findings(fake, timeout_s=1 if fake.hangs else 5)["cached tokens"]
        assert found.verdict == verdict
        assert [words for words in said if words not in f"{found.found} {found.advice}"] == []

    @pytest.mark.parametrize("usage", [None, 7, {}, {"prompt_tokens_details": {"cached_tokens": "many"}}])
    def test_are_not_reported_in_any_form_that_could_be_read(self, fake: FakeServer, usage: Any) -> None:
        fake.raw["/v1/completions"] = json.dumps({"usage": usage}).encode()
        assert verdicts(fake)["cached tokens"] == "warning"

    def test_are_asked_for_with_a_prompt_that_fits(self, fake: FakeServer) -> None:
        fake.models = {"data": [{"id": "fake", "max_model_len": 40}]}
        findings(fake)
        assert len(fake.bodies("/v1/completions")[0]["prompt"]) == 39


class TestKVEvents:
    def test_are_not_looked_for_without_an_endpoint(self, fake: FakeServer) -> None:
        found = findings(fake)["KV events"]
        assert found.verdict == "unknown"
        assert "LRU" in found.found
        assert self.config_in(found)["enable_kv_cache_events"] is True
        assert "--events-endpoint ipc:///tmp/vllm-events " in str(found.advice)

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
        assert (config["endpoint"], config.keys() & {"topic"}) == (published, set())
        assert f"--events-endpoint {there} --replay-endpoint tcp://" in str(finding.advice)

    @pytest.mark.parametrize("replay", [True, False])
    @pytest.mark.parametrize("silent", [True, False])
    def test_are_advised_once(self, fake: FakeServer, publish: Publish, replay: bool, silent: bool) -> None:
        endpoint = publish(replays=False).endpoint if silent else f"tcp://127.0.0.1:{free_port()}"
        events = Events(endpoint, f"tcp://127.0.0.1:{free_port()}" if replay else None)
        found = findings(fake, events=events, timeout_s=1 if silent else 0.3)
        advice = [str(found[check].advice) for check in ("KV events", "event replay")]
        assert [text.count("enable_kv_cache_events") for text in advice] == [1, 0]
        assert "replay_endpoint" in advice[1]

    @pytest.mark.parametrize("arrays", [False, True])
    def test_arrive_and_are_repeated(self, fake: FakeServer, publish: Publish, arrays: bool) -> None:
        publisher = publish(arrays=arrays)
        fake.on_tokens = publisher.tell
        events = Events(publisher.endpoint, publisher.replay_endpoint, "kv-events")
        found = verdicts(fake, events=events)
        assert found["KV events"] == found["event replay"] == "good"

    def test_kv_events_are_distinguished_from_other_messages(self, fake: FakeServer, publish: Publish) -> None:
        publisher = publish()

        def tell(token_ids: list[int]) -> None:
            publisher.babble()
            publisher.tell(token_ids[::-1])
            publisher.tell(token_ids)

        fake.on_tokens = tell
        assert verdicts(fake, events=Events(publisher.endpoint))["KV events"] == "good"

    def test_of_another_server_are_not_ours(self, fake: FakeServer, publish: Publish) -> None:
        publisher = publish()
        fake.on_tokens = lambda token_ids: publisher.tell(token_ids[::-1])
        events = Events(publisher.endpoint, publisher.replay_endpoint)
        found = findings(fake, events=events, timeout_s=2)
        assert found["KV events"].verdict == "bad"
        assert "this server's own endpoint" in str(found["KV events"].advice)
        assert found["event replay"].verdict == "unknown"

    def test_of_a_topic_that_was_not_asked_for(self, fake: FakeServer, publish: Publish) -> None:
        publisher = publish("tenant-7")
        fake.on_tokens = publisher.tell
        found = findings(fake, events=Events(publisher.endpoint, topic="kv-events"))["KV events"]
        assert found.verdict == "bad"
        assert '--events-topic "tenant-7"' in str(found.advice)

    @pytest.mark.parametrize("web", [False, True], ids=["nobody", "a web server"])
    def test_are_not_published_by_anybody(self, fake: FakeServer, web: bool) -> None:
        endpoint = fake.base_url.replace("http", "tcp") if web else f"tcp://127.0.0.1:{free_port()}"
        found = findings(fake, events=Events(endpoint, endpoint), timeout_s=0.3)
        assert found["KV events"].verdict == found["event replay"].verdict == "bad"
        assert "no publisher" in found["KV events"].found
        assert "--kv-events-config" in str(found["KV events"].advice)

    @pytest.mark.parametrize("endpoint", ["tcp://*:5557", "127.0.0.1:5557", "", "tcp://host:port"])
    def test_cannot_be_listened_to_at_what_is_no_endpoint(self, fake: FakeServer, endpoint: str) -> None:
        found = findings(fake, events=Events(endpoint, endpoint))
        assert found["KV events"].verdict == "bad"
        assert "tcp://HOST:PORT" in str(found["KV events"].advice)

    def test_are_not_repeated(self, fake: FakeServer, publish: Publish) -> None:
        publisher = publish(replays=False)
        fake.on_tokens = publisher.tell
        found = findings(fake, events=Events(publisher.endpoint, publisher.replay_endpoint))
        assert found["KV events"].verdict == "good"
        assert found["event replay"].verdict == "bad"
        assert "buffer_steps" in str(found["event replay"].advice)

    def test_are_listened_to_at_every_engine(self, fake: FakeServer, publish: Publish) -> None:
        two = {"num_gpu_blocks": 2 * 10_001}
        fake.metrics = page(gauge(engine=0, **two), gauge(engine=1, **two))
        publisher = publish()
        fake.on_tokens = publisher.tell
        address, _, port = publisher.endpoint.rpartition(":")
        assert verdicts(fake, events=Events(f"{address}:{int(port) - 1}"))["KV events"] == "good"

    def test_are_unknown_of_a_server_that_takes_no_token_ids(self, fake: FakeServer, publish: Publish) -> None:
        fake.completions = "text"
        assert verdicts(fake, events=Events(publish().endpoint))["KV events"] == "unknown"


VOLATILE = {
    "a date": ["Today is 2026-11-20.", "Today is 2026-11-21."],
    "a date ": ["Date: 20 November 2026", "Date: 3 December 2026"],
    "a date  ": ["Nov 20, 2026", "Nov 21, 2026"],
    "a date   ": ["On 11/20/2026:", "On 12/20/2026:"],
    "a day of the week": ["Today is Monday.", "Today is Tuesday."],
    "a clock time": ["It is 14:03:59 now.", "It is 14:04:01 now."],
    "a UUID": ["id 123e4567-e89b-12d3-a456-426614174000", "id 123e4567-e89b-12d3-a456-426614174001"],
    "an id": ["trace 9f86d081884c7d65", "trace 9f86d081884c7d66"],
    "a time stamp": ["now=1795265429", "now=1795265430"],
    "a user, session or request": ["User: Alice\n", "User: Bob\n"],
    "a number in a document's header": ["Document [3]: text", "Document [1]: text"],
    "a number in a document's header ": ["[12] text", "[4] text"],
    "a retrieval score": ["[doc-a] (score: 0.91)", "[doc-a] (score: 0.88)"],
}
SYSTEM = "You answer questions from the documents that follow, and from nothing else. "


class TestWhatAnswers:
    """Advice is for what answers: vLLM's options help vLLM alone."""

    def test_the_proxy_sends_one_to_its_upstream(self, fake: FakeServer) -> None:
        fake.raw["/ragorder/health"] = b'{"status":"ok"}'
        fake.metrics = "ragorder_requests_total 1.0\n"
        found = findings(fake)
        assert found["server"].verdict == "good" and found["server"].found.endswith("this is ragorder serve")
        assert found["capacity"].found == "this is ragorder serve, whose /metrics are its own"
        assert "--disable-log-stats" not in str(list(found.values()))
        for check in ("server", "capacity", "KV events"):
            assert "check the server that it forwards to" in (found[check].advice or "")
        assert found["prefix caching"].verdict == "good", "what is seen through the proxy stands"

    def test_ragorders_own_engine_and_other_servers_get_no_options_of_vllm(self, fake: FakeServer) -> None:
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
    def test_vllm_and_sglang_get_theirs(self, fake: FakeServer, owner: str) -> None:
        fake.models["data"][0]["owned_by"] = owner
        fake.caching = fake.reporting = False
        fake.metrics = None
        assert "--enable-prefix-caching" in (findings(fake)["prefix caching"].advice or "")

    def test_a_page_at_every_path_is_no_proxy(self, fake: FakeServer) -> None:
        fake.raw["/ragorder/health"] = b"<html>"
        assert "ragorder serve" not in findings(fake)["server"].found

    def test_an_advice_is_printed_once(self, fake: FakeServer) -> None:
        options = ("--events-endpoint", f"tcp://127.0.0.1:{free_port()}", "--timeout", "1")
        said = doctor(fake.base_url, *options).output
        assert "event replay" in said
        assert said.count("--kv-events-config '") == 1


BRIEF = "Be brief.\n[paris]\n…", "Be brief.\n[rome]\n…"
ALICE_AND_BOB = chat(f"{SYSTEM}You help Alice.", "[d1]\ntext"), chat(f"{SYSTEM}You help Bob.", "[d1]\ntext")
FOR_ALICE_AND_BOB = f"{SYSTEM}For Alice.\n[d1]\n…", f"{SYSTEM}For Bob.\n[d1]\n…"
DAYS = f"{SYSTEM}[d1]\n2026-11-20 saw rain", f"{SYSTEM}[d1]\n2026-11-21 saw snow"
PROMPTS: dict[str, Any] = {
    # Samples, the document marker, verdicts, and words of findings or advice.
    "a date at the beginning": (
        tuple(f"2026-11-{day}\n{SYSTEM}\nDocuments:\n[d1]\ntext" for day in (20, 21)),
        None,
        {"shared prefix": "bad", "volatile text": "bad"},
        ["share 9 tokens, 0 whole blocks of 16", "into the question"],
    ),
    "less than a block": (BRIEF, None, {"shared prefix": "warning"}, ["--document-marker"]),
    "less than a block before documents": (BRIEF, "[", {"shared prefix": "good"}, []),
    "inside the system prompt": (ALICE_AND_BOB, None, {"shared prefix": "warning"}, ["inside the system prompt"]),
    "inside documents in the system prompt": (ALICE_AND_BOB, "You help", {"shared prefix": "good"}, []),
    "one system prompt is longer": (
        (chat(SYSTEM, "[d1]"), chat(f"{SYSTEM}More.", "[d1]")),
        None,
        {},
        ["inside the system prompt"],
    ),
    "after the system prompt": (
        (chat(SYSTEM, "[paris]\n…"), chat(SYSTEM, "[rome]\n…")),
        None,
        {"shared prefix": "good", "volatile text": "good"},
        [],
    ),
    "before the documents": (FOR_ALICE_AND_BOB, None, {"shared prefix": "good"}, []),
    "before the documents, with a marker": (FOR_ALICE_AND_BOB, "[d", {"shared prefix": "bad"}, []),
    "where the documents begin": (
        (f"{SYSTEM}\n[paris]\nParis is…", f"{SYSTEM}\n[rome]\nRome was…"),
        None,
        {"shared prefix": "good", "volatile text": "good"},
        [f"share {len(SYSTEM) + 2} tokens, {(len(SYSTEM) + 2) // BLOCK} whole blocks"],
    ),
    "a date in the system prompt": (
        tuple(chat(f"{SYSTEM}It is 2026-11-{day}.", "[d1]") for day in (20, 21)),
        None,
        {"shared prefix": "bad", "volatile text": "bad"},
        [],
    ),
    "dates somewhere": (DAYS, None, {"volatile text": "warning"}, []),
    "dates of documents": (DAYS, "[d", {"volatile text": "good"}, []),
    "documents with their rank": (
        (f"{SYSTEM}\n[3] text", f"{SYSTEM}\n[1] text"),
        "[",
        {"volatile text": "warning"},
        ["document_template"],
    ),
    "no document marker": ((f"{SYSTEM}[d1]", f"{SYSTEM}[d2]"), "<doc", {"document marker": "unknown"}, []),
    "the same": ((SYSTEM, SYSTEM), None, {"shared prefix": "unknown"}, []),
}


class TestTwoPrompts:
    @pytest.mark.parametrize("name", PROMPTS)
    def test_are_judged_by_where_they_part(self, fake: FakeServer, name: str) -> None:
        samples, marker, verdicts, said = PROMPTS[name]
        found = findings(fake, samples=samples, document_marker=marker)
        assert {check: found[check].verdict for check in verdicts} == verdicts
        words = " ".join(f"{each.found} {each.advice}" for each in found.values())
        assert [text for text in said if text not in words] == []
        sent = [{"model": "fake", "prompt" if isinstance(each, str) else "messages": each} for each in samples]
        assert fake.bodies("/tokenize") == sent or name == "the same"

    @pytest.mark.parametrize("kind", VOLATILE)
    def test_that_part_over_what_changes_with_every_request(self, fake: FakeServer, kind: str) -> None:
        first, second = VOLATILE[kind]
        found = findings(fake, samples=(f"{first} Be brief.", f"{second} Be brief."))
        assert kind.strip() in found["volatile text"].found
        assert found["volatile text"].verdict in ("bad", "warning")

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("[paris]\ntext", "[rome]\ntext"),
            ("User: who built it?\n", "User: what is it?\n"),
            ("In 1889 it was", "In 1925 it was"),
            ("of 12 towers", "of 300 towers"),
            ("Monuments", "Moonlight"),
            ("decade", "facade"),
            ("[eiffel-1]", "[eiffel-2]"),
        ],
    )
    def test_that_part_over_ordinary_text(self, fake: FakeServer, one: str, other: str) -> None:
        assert verdicts(fake, samples=(f"{SYSTEM}\n{one}", f"{SYSTEM}\n{other}"))["volatile text"] == "good"

    @pytest.mark.parametrize("tokens", [None, [1, 2], {"tokens": 7}])
    def test_that_the_server_does_not_tokenise(self, fake: FakeServer, tokens: Any) -> None:
        fake.tokenizes = False
        if tokens is not None:
            fake.raw["/tokenize"] = json.dumps(tokens).encode()
        found = findings(fake, samples=("x" * 400 + "1", "x" * 400 + "2"))["shared prefix"]
        assert "share 100 tokens (estimated" in found.found

    def test_with_contents_in_parts_for_a_server_whose_blocks_are_unknown(self, fake: FakeServer) -> None:
        fake.metrics, fake.tokenizes = None, False
        prompts = [[{"role": "user", "content": [{"type": "text", "text": f"{SYSTEM}{end}"}, 7]}] for end in "ab"]
        found = findings(fake, samples=(prompts[0], prompts[1]))["shared prefix"].found
        assert "share" in found and "blocks of 16 (assumed)" in found

    def test_are_quoted_with_forty_characters_each(self, fake: FakeServer) -> None:
        found = findings(fake, samples=("a" * 100 + "b" * 100, "a" * 100 + "c" * 100))["volatile text"].found
        for char in "bc":
            assert f'"{"a" * 14}{char * 26}"' in found

    def test_are_quoted_without_control_characters(self, fake: FakeServer) -> None:
        fake.tokenizes = False

        @settings(max_examples=length(30, 10))
        @given(st.text(), st.text(min_size=1), st.text(min_size=1))
        def quote(head: str, one: str, other: str) -> None:
            found = findings(fake, samples=(head + one, head + other))
            if one != other:
                assert found["volatile text"].found.isprintable()
                assert len(found["volatile text"].found) < 2 * 40 + 120

        quote()


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


class TestTheCommand:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Prompts:
        (tmp_path / "one.txt").write_text(f"2026-11-20\n{SYSTEM}", "utf-8")
        (tmp_path / "two.json").write_text(json.dumps(chat("2026-11-21\n", SYSTEM)), "utf-8")
        return ["--prompt", tmp_path / "one.txt", "--prompt", tmp_path / "two.json"]

    def test_says_yes_to_a_good_server_and_no_to_a_bad_one_and_paints_no_markup(self, fake: FakeServer) -> None:
        fake.models = {"data": [{"id": "[red]model[/red]"}]}
        done = doctor(fake.base_url)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.count("✓") == 4
        assert "?" in done.stdout and "[red]model[/red]" in done.stdout
        fake.metrics = page(gauge(enable_prefix_caching="False", num_gpu_blocks=9))
        done = doctor(fake.base_url)
        assert done.exit_code == 1
        assert all(each in done.stdout for each in ("✗", "!", "--enable-prefix-caching"))

    def test_never_breaks_what_is_to_be_copied(self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        line = next(line for line in doctor(fake.base_url).stdout.splitlines() if "--kv-events-config" in line)
        json.loads(line.split("--kv-events-config '")[1].split("'")[0])

    def test_writes_json(self, fake: FakeServer, prompts: Prompts) -> None:
        done = doctor(fake.base_url, "--json", *prompts)
        assert done.exit_code == 1
        text, messages = fake.bodies("/tokenize")
        assert text["prompt"].startswith("2026-11-20") and messages["messages"] == chat("2026-11-21\n", SYSTEM)
        found = json.loads(done.stdout)["findings"]
        assert {"server", "capacity", "shared prefix"} <= {finding["check"] for finding in found}
        assert all(finding.keys() == {"check", "verdict", "found", "advice"} for finding in found)

    @pytest.mark.parametrize("text", ["[d1] a document", "[1, 2]", "{}", "[]", "[" * 100_000])
    def test_takes_for_text_what_is_not_messages(self, fake: FakeServer, tmp_path: Path, text: str) -> None:
        for name, content in (("a", text), ("b", text + " ")):
            (tmp_path / name).write_text(content, "utf-8")
        doctor(fake.base_url, "--prompt", tmp_path / "a", "--prompt", tmp_path / "b")
        assert fake.bodies("/tokenize")[0]["prompt"] == text

    def test_hands_on_where_documents_begin(self, fake: FakeServer, tmp_path: Path) -> None:
        for name in ("Alice", "Bob"):
            (tmp_path / name).write_text(f"{SYSTEM}For {name}.\n<doc>…", "utf-8")
        options = ["--prompt", tmp_path / "Alice", "--prompt", tmp_path / "Bob"]
        assert doctor(fake.base_url, *options).exit_code == 0
        assert doctor(fake.base_url, *options, "--document-marker", "<doc>").exit_code == 1

    def test_takes_key_and_events_from_the_environment(
        self, fake: FakeServer, publish: Publish, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publisher = publish("ours")
        fake.key, fake.on_tokens = KEY, publisher.tell
        monkeypatch.setenv("RAGORDER_API_KEY", KEY)
        monkeypatch.setenv("RAGORDER_EVENTS_ENDPOINT", publisher.endpoint)
        monkeypatch.setenv("RAGORDER_REPLAY_ENDPOINT", publisher.replay_endpoint)
        monkeypatch.setenv("RAGORDER_EVENTS_TOPIC", "ours")
        done = doctor(fake.base_url)
        assert done.exit_code == 0
        assert done.stdout.count("✓") == 6
        assert KEY not in done.output

    def test_logs_neither_prompt_nor_key(
        self, fake: FakeServer, prompts: Prompts, caplog: pytest.LogCaptureFixture
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
            *(([address], "write http://", 2) for address in ("localhost:8000", "ftp://host", "http://")),
            (["http://127.0.0.1:9"], "http://127.0.0.1:9", 1),
            (["URL", "--prompt", "ONE"], "twice", 2),
            (["URL", *["--prompt", "ONE"] * 3], "twice", 2),
            (["URL", "--prompt", "nothing.txt"], "nothing.txt", 2),
            (["URL", "--replay-endpoint", "tcp://h:1"], "--events-endpoint", 2),
            (["URL", "--document-marker", "["], "--prompt", 2),
        ],
    )
    def test_refuses_what_it_cannot_do(
        self, fake: FakeServer, prompts: Prompts, arguments: list[str], said: str, status: int
    ) -> None:
        known = {"URL": fake.base_url, "ONE": str(prompts[1])}
        assert said in refusal(*(known.get(each, each) for each in arguments), status=status)
        assert fake.seen == []

    def test_takes_a_key_and_a_time(self, fake: FakeServer) -> None:
        fake.key = KEY
        done = doctor(fake.base_url, "--api-key", KEY)
        assert done.exit_code == 0 and KEY not in done.output
        said = refusal(fake.base_url, "--api-key", KEY + "2", status=1)
        assert "401" in said and KEY not in said
        fake.hangs.add("/v1/models")
        assert "within 0.2 s" in refusal(fake.base_url, "--timeout", "0.2", status=1)

    @pytest.mark.parametrize("content", [b"\xff\xfe", b'[{"content": "no role"}]', b'[{"role": "user"}, 7]'])
    def test_refuses_a_prompt_that_it_cannot_read(self, fake: FakeServer, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "odd").write_bytes(content)
        assert "odd" in refusal(fake.base_url, "--prompt", tmp_path / "odd", "--prompt", tmp_path / "odd", status=2)
        assert fake.seen == []

    def test_says_which_extra_is_missing(self, python: Callable[..., Any]) -> None:
        command = ("-c", "from ragorder.cli import main; main(prog_name='ragorder')", "doctor")
        assert python(*command, "--help", blocked=LIVE_PACKAGES).returncode == 0
        done = python(*command, "http://127.0.0.1:1", blocked=LIVE_PACKAGES)
        assert done.returncode == 1
        assert done.stderr == "Error: talking to a server needs httpx2: in a clone of ragorder, pip install '.[live]'\n"
