"""How `ragorder serve` runs: what it is told, asks its server and says; its log, HTTPS, metrics of its process."""

from __future__ import annotations

import logging
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.http_server import PageServer
from support.rings import grid
from support.sent_requests import CERTIFICATES, TEMPLATE
from support.serve_process import SERVE, Served, ServeProcess, launching

from ragorder import Document, PromptBuilder
from ragorder.adapters.proxy import Timeouts
from ragorder.adapters.proxy.access import THIS_MACHINE
from ragorder.cli.options import Option
from ragorder.cli.serve import serve as serve_command
from ragorder.trie.profile import LINEAR

NOWHERE = ("--upstream", "http://127.0.0.1:9")
SIZES = ("--capacity-tokens", "4096", "--block-size", "16")
METRICS = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="129",engine="0",enable_prefix_caching="True"} 1.0\n'
CLOUD = ("--upstream", "https://api.anthropic.com")
Run = Callable[..., Served]
Launch = Callable[..., ServeProcess]


@dataclass
class Upstream:
    """A server with a page of metrics, or without one."""

    url: str = ""
    metrics: str | None = None
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()

    def page(path: str, headers: Any) -> tuple[int, str]:
        upstream.keys.append(headers["Authorization"])
        found = {"/health": "pong", "/metrics": upstream.metrics}.get(path.partition("?")[0])
        return (404, "") if found is None else (200, found)

    with PageServer(page) as server:
        upstream.url = server.base_url
        yield upstream


@pytest.fixture
def run(run_serve: Run, upstream: Upstream) -> Run:
    """Run `ragorder serve` for this server, or the one that is given, up to the moment from which it would serve."""

    def run(*options: str, **environment: str) -> Served:
        given = () if "--upstream" in options else ("--upstream", upstream.url)
        return run_serve(*given, *options, **environment)

    return run


class TestTheCache:
    def test_is_what_the_servers_metrics_say(self, run: Run, upstream: Upstream) -> None:
        upstream.metrics = METRICS
        served = run("--upstream-api-key", "up")
        assert (served.orderer.settings.block_size, served.orderer.settings.capacity_tokens) == (32, 4096)
        assert upstream.keys == ["Bearer up"]
        assert "4,096 tokens (from the server's /metrics), blocks of 32 (from" in served.said
        assert "Warning" not in served.said

    def test_is_what_is_given_otherwise(self, run: Run, upstream: Upstream) -> None:
        upstream.metrics = METRICS
        served = run("--block-size", "64")
        assert (served.orderer.settings.block_size, served.orderer.settings.capacity_tokens) == (64, 4096)
        assert "blocks of 64 (given)" in served.said
        served = run("--capacity-tokens", "unlimited", RAGORDER_BLOCK_SIZE="128")
        assert (served.orderer.settings.block_size, served.orderer.settings.capacity_tokens) == (128, None)
        assert "unlimited tokens (given)" in served.said

    def test_is_assumed_with_a_warning(self, run: Run, upstream: Upstream) -> None:
        said = run().said
        assert "262,144 tokens (assumed), blocks of 16 (assumed)" in said
        assert "give --capacity-tokens and --block-size" in said
        assert "give --block-size" in run("--capacity-tokens", "9").said
        assert "Warning" not in run("--capacity-tokens", "9", "--block-size", "9").said
        assert len(upstream.keys) == 2, "a server is not asked what is known"

    @pytest.mark.parametrize(
        ("metrics", "said"),
        [
            (METRICS.replace("True", "False"), "--enable-prefix-caching"),
            (METRICS.replace('engine="0"', 'engine="0",mamba_cache_mode="align"'), "hybrid"),
            (METRICS + METRICS.replace('engine="0"', 'engine="1"'), "2 engines"),
        ],
        ids=["reuses nothing", "hybrid", "several engines"],
    )
    def test_of_another_kind_than_ordered_for_is_warned_of(
        self, metrics: str, said: str, run: Run, upstream: Upstream
    ) -> None:
        upstream.metrics = metrics
        assert said in run().said

    def test_may_have_tiers(self, run: Run, tmp_path: Path) -> None:
        profile = tmp_path / "profile.json"
        replace(LINEAR, loads={"host": 1e-6, "disk": 1e-4}).to_file(profile)
        tiers = {"RAGORDER_HOST_TOKENS": "8K", "RAGORDER_DISK_TOKENS": "100k", "RAGORDER_TIER_POLICY": "lru"}
        served = run("--tiers", "--profile", str(profile), *SIZES, **tiers)
        assert "Cache: 100,000 tokens (given)" in served.said
        settings = served.orderer.settings
        assert (settings.host_tokens, settings.disk_tokens, settings.tier_policy) == (8192, 100_000, "lru")
        assert settings.profile == profile


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "value", "setting"),
        [
            ("--keep-first", "2", 2),
            ("--keep-last", "3", 3),
            ("--max-displacement", "1", 1),
            ("--max-gain-lost", "0.1", 0.1),
            ("--moves", "prefix", "prefix"),
            ("--best", "last", "last"),
            # These are no options.
            ("RAGORDER_MIN_GAIN", "50", 50),
            ("RAGORDER_BEST_TOKENS", "64", 64),
        ],
    )
    def test_of_the_orderer(self, option: str, value: str, setting: float | str, run: Run) -> None:
        served = run(option, value) if option.startswith("-") else run(**{option: value})
        name = option.removeprefix("--").removeprefix("RAGORDER_").replace("-", "_").lower()
        assert getattr(served.orderer.settings, name) == setting

    def test_of_templates_have_escapes_and_files(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "template"
        file.write_text(r"<d>\n{text}</d>", "utf-8")
        options = ["--document-template", r"[{id}]\t\\n{text}\n", "--question-template", "Q: {query}"]
        served = run(*options, "--template", f"@{file}")
        content = served.app["builder"].build("why", [Document("1", "one")]).messages[-1]["content"]
        assert content == "[1]\t\\none\nQ: why"
        assert served.app["template"][0].find(r"<d>\n1</d><d>\n2</d>") is not None
        assert run("--template", r"<d>\n{text}</d>").app["template"][0].find("<d>\n1</d><d>\n2</d>") is not None
        documents = [Document("1", "one")]
        plain = run().app
        assert plain["builder"].build("q", documents).messages == PromptBuilder("").build("q", documents).messages
        assert plain["template"] == []

    @pytest.mark.parametrize(
        ("name", "count", "warns"),
        [("anythingllm", 1, False), ("open-webui", 1, True), ("auto", 1, False), ("none", 0, False)],
    )
    def test_of_templates_may_be_names_and_say_what_their_numbers_mean(
        self, name: str, count: int, warns: bool, run: Run
    ) -> None:
        served = run("--template", name)
        assert len(served.app["template"]) == count
        assert ("numbers of documents stay at their places" in served.said) == warns
        assert served.app["finds_native"] == (name != "none")

    def test_of_what_is_sent(self, run: Run) -> None:
        names = ("number_by_place", "stable_tools", "repeated")
        assert [run().app[name] for name in names] == [False, False, None]
        app = run("--number-by-place", "--stable-tools").app
        assert (app["number_by_place"], app["stable_tools"]) == (True, True)
        assert run("--template", TEMPLATE, "--number-by-place").app["number_by_place"] is True
        assert run("--template", TEMPLATE, "--dedup", r"(see {id})\n").app["repeated"] is not None

    def test_of_a_tokenizer(self, run: Run, model_folder: Path) -> None:
        assert "Lengths: estimated at four characters a token" in run(*SIZES).said
        served = run(*SIZES, "--tokenizer", str(model_folder))
        assert served.app["builder"].document_ids(Document("1", "one"))
        assert served.app["tokenizer"] is not None
        assert "Lengths:" not in served.said

    def test_of_limits_and_times(self, run: Run) -> None:
        options = ["--body-limit", "0.5", "--bodies-limit", "1.5", "--max-connections", "9"]
        served = run(*options, "--read-timeout", "4.5", "--client-timeout", "7", "--grace", "7")
        assert (served.app["body_limit"], served.app["bodies_limit"]) == (1 << 19, 3 << 19)
        assert served.app["timeouts"] == Timeouts(10.0, 4.5, client_s=7.0)
        assert (served.config.http.client_s, served.config.http.limit) == (7.0, 9)
        assert served.config.timeout_graceful_shutdown == 7
        served = run()
        assert (served.app["body_limit"], served.app["bodies_limit"]) == (32 << 20, 256 << 20)
        assert served.app["timeouts"] == Timeouts(10.0, 600.0)
        assert (served.config.http.client_s, served.config.http.limit) == (30.0, 1024)
        assert (served.app["admission"], served.app["topic_header"]) == (None, None)

    def test_of_keys_come_from_the_environment_too(self, run: Run) -> None:
        served = run("--api-key", "a", "--upstream-api-key", "b")
        assert (served.app["api_key"], served.app["upstream_api_key"]) == ("a", "b")
        served = run(RAGORDER_PROXY_API_KEY="c", RAGORDER_UPSTREAM_API_KEY="d")
        assert (served.app["api_key"], served.app["upstream_api_key"]) == ("c", "d")
        assert run("--api-key", "k", RAGORDER_PROXY_API_KEY="").app["api_key"] == "k"
        assert run().app["api_key"] is None

    def test_of_the_tries_reach_the_fleet(self, run: Run) -> None:
        two = [*NOWHERE, "--upstream", "http://127.0.0.1:10", *SIZES]
        assert run(*two, "--tries-timeout", "90s").app["timeouts"].all_tries_s == 90
        assert run(*two, "--read-timeout", "15m").app["timeouts"].all_tries_s == 900
        assert run(*two).app["timeouts"].all_tries_s == 600

    def test_of_the_queue(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        queues: list[Any] = []
        monkeypatch.setattr(
            "ragorder.adapters.proxy.AdmissionQueue", lambda limit, registry, **given: queues.append((limit, given))
        )
        run("--max-in-flight", "3")
        run("--max-in-flight", "3", "--max-waiting", "7")
        assert queues == [(3, {}), (3, {"max_waiting": 7})]


class TestWhereItListens:
    def test_is_this_machine_alone(self, run: Run) -> None:
        served = run()
        assert served.address[0] == "127.0.0.1" and served.no_delay
        config = served.config
        assert not (config.access_log or config.server_header or config.date_header or config.proxy_headers)
        assert "8100" in run("--help").said

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
    def test_on_loopback_needs_no_key(self, host: str, run: Run) -> None:
        assert "--api-key" not in run("--host", host, "--block-size", "16").said

    def test_without_a_key_is_warned_of_elsewhere(self, run: Run) -> None:
        assert "give --api-key" in run("--host", "0.0.0.0").said  # noqa: S104
        assert "give --api-key" not in run("--host", "0.0.0.0", "--api-key", "k").said  # noqa: S104

    def test_checks_hosts_on_loopback(self, run: Run) -> None:
        assert run().app["hosts"] == THIS_MACHINE
        assert run("--host", "0.0.0.0").app["hosts"] is None  # noqa: S104
        hosts = run("--allow-host", "proxy.example", "--allow-host", "b").app["hosts"]
        assert hosts == THIS_MACHINE | {"proxy.example", "b"}

    def test_is_said(self, run: Run) -> None:
        said = run(*SIZES).said
        assert "Cache: 4,096 tokens (given), blocks of 16 (given)" in said
        assert "Mode: documents are ordered for the cache" in said
        assert "Page: http://127.0.0.1:" in said
        assert "Mode: shadow" in run("--shadow").said


class TestMarks:
    @pytest.mark.parametrize(
        ("options", "marks"),
        [
            ([], False),
            (["--marks"], True),
            (CLOUD, True),
            (["--upstream", "https://api.anthropic.com/v1", "--no-marks"], None),
            (["--upstream", "https://api.openai.com/v1"], True),
            (["--upstream", "https://api.anthropic.com.example.org"], False),
        ],
    )
    def test_are_set_for_clouds(self, options: list[str], marks: bool | None, run: Run) -> None:
        served = run("--capacity-tokens", "9", "--block-size", "9", *options)
        assert served.app["marks"] is marks
        # What such a cache lacks was not marked, which says nothing about its size.
        assert served.orderer.settings.feedback is not bool(marks)
        assert (served.app["clouds"] is not None) is bool(marks)

    @pytest.mark.parametrize(
        ("metrics", "options", "heeds"), [(METRICS, [], False), ("", [], True), ("", ["--no-marks"], False)]
    )
    def test_of_clients_count_unless_the_server_is_an_engine(
        self, metrics: str, options: list[str], heeds: bool, run: Run, upstream: Upstream
    ) -> None:
        upstream.metrics = metrics
        assert run(*options).app["marks"] is (None if heeds else False)

    def test_are_said_and_need_no_size(self, run: Run) -> None:
        said = run("--marks").said
        assert "cache_control" in said[said.index("Mode:") :]
        assert "by the rules of each request's model" in said and "Warning" not in said

    def test_of_a_known_cloud_are_by_its_rules(self, run: Run, tmp_path: Path) -> None:
        prices = tmp_path / "prices.toml"
        prices.write_text('date = "2027-01-01"\n[per_million]\n"claude-opus-5" = 7\n', "utf-8")
        served = run(*CLOUD, "--marks-ttl", "1h", RAGORDER_PRICES=str(prices))
        found = served.app["clouds"].of("claude-opus-5")
        assert (found.provider, found.rules.ttl) == ("anthropic", "1h")
        cost = found.orderer.order([Document("a", "x" * 9000)]).cost
        assert (cost.price, cost.prices_date) == (7.0, "2027-01-01")
        assert served.app["clouds"].of("gpt-5.6") is None
        assert "Warning: the size" not in served.said, "it has no such metrics"


TWO = ["--upstream", "http://127.0.0.1:8", *NOWHERE]


class TestWhatIsWrong:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--api-key", " "], "--api-key: the key is empty"),
            (["--upstream-api-key", " "], "--upstream-api-key: the key is empty"),
            (["--api-key", "k", "--allow-host", "b"], "--allow-host cannot be combined with --api-key"),
            (["--template", "{text}"], "--template: a template needs visible text"),
            (["--template", "@/does/not/exist"], "No such file"),
            (["--template", "@."], "Is a directory"),
            (["--template", f"@{sys.executable}"], "not UTF-8"),
            (["--template", "<d>{text}</d>", "--number-by-place"], "--number-by-place: --template has no {id}"),
            (["--dedup", "{id}"], "--dedup requires --template"),
            (["--template", "<d>{text}</d>", "--dedup", "{id}"], "--dedup: a reference names a document by its id"),
            (["--template", TEMPLATE, "--dedup", "above"], "--dedup: the reference needs {id}"),
            (["--template", TEMPLATE, "--dedup", "{id}", "--number-by-place"], "cannot be combined with --number-by"),
            (["--document-template", "{id}"], "--document-template must contain {text}"),
            (["--question-template", "{"], "--question-template: "),
            (["--tokenizer", "/does/not/exist"], "--tokenizer: "),
            (["--capacity-tokens", "0"], "'--capacity-tokens': 0 is not in the range x>=1"),
            (["--block-size", "0"], "'--block-size': 0 is not in the range x>=1"),
            (["--keep-first", "1", "--keep-last", "1"], "exclude each other"),
            (["--body-limit", "0"], "--body-limit"),
            (["--upstream", "ftp://x"], "--upstream: 'ftp://x' is not the URL"),
            (["--upstream", "ftp://x", *SIZES], "--upstream: 'ftp://x' is not the URL"),
            *(
                (["--upstream", each], f"write http://{each}")
                for each in ("localhost:8000", "127.0.0.1:8/v1", "gpu-1.lan")
            ),
            *((["--upstream", f"http://{each}"], "is not the URL of a server") for each in ("gpu..lan", "g" * 64)),
            ([*NOWHERE, *NOWHERE, *SIZES], "--upstream: the same server twice"),
            (["--upstream-api-key", "ä"], "--upstream: the API key"),
            (["--host", "203.0.113.1"], "203.0.113.1 port 0"),
            (["--host", "no.such.host.invalid"], "no.such.host.invalid port 0"),
            (["--tries-timeout", "90s"], "--tries-timeout requires several replicas"),
            (["--max-waiting", "5"], "--max-waiting requires --max-in-flight"),
            (["--topic-header", "a b"], "--topic-header: 'a b' cannot be"),
            (["--topic-secret", "s"], "--topic-secret requires --topic-header"),
            (["--profile", "none"], "--profile requires --tiers"),
            (["--marks-ttl", "1h"], "--marks-ttl requires --marks"),
            (["--upstream", "https://api.openai.com", "--marks-ttl", "1h"], "openai has no TTL"),
            (["--workers", "2", *SIZES], "workers that do not share orders lose cache hits"),
            (["--workers", "2", "--shadow"], "workers that do not share orders lose cache hits"),
            (
                ["--workers", "2", "--shared-orders", "redis://127.0.0.1:6379/0", "--max-in-flight", "3"],
                "--max-in-flight is a limit of one queue",
            ),
            (["--workers", "2", *TWO], "give one --upstream"),
            (["--workers", "2", "--data-parallel-ranks", "2"], "give one --upstream"),
            (["--config", "/does/not/exist.toml"], "No such file"),
        ],
        ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
    )
    def test_on_the_command_line_is_refused(self, options: list[str], said: str, run: Run) -> None:
        served = run(*options)
        assert served.exit_code != 0 and served.config is None
        assert said in served.said
        assert "Traceback" not in served.said

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            *(
                (name, key, f"{name}: the key is empty")
                for name in ("RAGORDER_PROXY_API_KEY", "RAGORDER_UPSTREAM_API_KEY")
                for key in ("", " ", "\n")
            ),
            ("RAGORDER_MIN_GAIN", "-1", "RAGORDER_MIN_GAIN: "),
            ("RAGORDER_TIER_POLICY", "oldest", "RAGORDER_TIER_POLICY: "),
            ("RAGORDER_SERVE_PORT", "geheim", "'--port': the value of RAGORDER_SERVE_PORT is no whole number"),
            ("RAGORDER_BLOCK_SIZE", "geheim", "--block-size"),
            ("RAGORDER_SERVE_PROFILE", "none", "--profile requires --tiers"),
        ],
    )
    def test_in_the_environment_is_refused_without_its_value(self, name: str, value: str, said: str, run: Run) -> None:
        served = run(*NOWHERE, **{name: value})
        assert served.exit_code == 2 and served.config is None
        assert said in served.said and "geheim" not in served.said

    def test_prices_that_are_not_there_are_named(self, run: Run) -> None:
        served = run("--marks", RAGORDER_PRICES="absent.toml")
        assert served.exit_code != 0 and "absent.toml" in served.said

    def test_a_port_that_is_taken(self, run: Run, upstream: Upstream) -> None:
        said = run("--port", upstream.url.rpartition(":")[2]).said
        assert "Address already in use" in said and "give another --host or --port" in said

    @pytest.mark.parametrize("module", grid(["uvicorn", "httpx2", "starlette", "msgspec"], 1))
    def test_a_missing_package_is_named_with_the_extra(self, module: str, python: Any) -> None:
        done = python(*SERVE[1:], *NOWHERE, blocked=(module,))
        assert done.returncode == 1
        assert done.stderr == f"Error: serving needs {module}: in a clone of ragorder, pip install '.[proxy]'\n"

    def test_more_connections_than_files_are_refused_by_number(self) -> None:
        """In a process with a limit of its own."""

        def few() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

        def said(*options: str) -> str:
            # An address that cannot be had ends what is accepted, too.
            command = [*SERVE, *NOWHERE, *SIZES, "--host", "192.0.2.1", *options]
            done = subprocess.run(command, preexec_fn=few, capture_output=True, text=True, timeout=120, check=False)
            return " ".join(done.stderr.split())

        assert (
            "--max-connections: the system's limit of open files allows 224 connections, not 2,000: raise it "
            "(ulimit -Hn), or give at most 224" in said("--max-connections", "2000")
        )
        assert "Warning: the system's limit of open files allows 224 connections, not 1,024" in said()
        assert "limit of open files" not in said("--max-connections", "224")


FILE = """
upstream = ["http://127.0.0.1:9"]
port = 0
capacity-tokens = "16K"
block_size = 32
read-timeout = "90s"
shadow = true
allow-host = ["a.example", "b.example"]
max-in-flight = 4
document-template = "{text}\\n"
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def file(content: str) -> str:
        (tmp_path / "serve.toml").write_text(content, "utf-8")
        return str(tmp_path / "serve.toml")

    return file


File = Callable[[str], str]


class TestConfigFile:
    def test_has_options_by_their_names(self, run_serve: Run, file: File) -> None:
        served = run_serve("--config", file(FILE))
        settings = served.orderer.settings
        assert (settings.capacity_tokens, settings.block_size) == (16_384, 32)
        assert served.app["timeouts"].read_s == 90
        assert served.orderer.shadow and served.app["admission"] is not None
        assert {"a.example", "b.example"} < served.app["hosts"]
        assert served.app["upstream"] == "http://127.0.0.1:9"
        assert served.app["builder"].document_text(Document("1", "one")) == "one\n"

    def test_yields_to_the_environment_and_that_to_the_command_line(self, run_serve: Run, file: File) -> None:
        path = file(FILE)
        variables = {"RAGORDER_SERVE_CONFIG": path, "RAGORDER_SERVE_READ_TIMEOUT": "2m", "RAGORDER_BLOCK_SIZE": "64"}
        served = run_serve(**variables)
        assert (served.app["timeouts"].read_s, served.orderer.settings.block_size) == (120, 64)
        served = run_serve("--read-timeout", "3m", "--block-size", "8", **variables)
        assert (served.app["timeouts"].read_s, served.orderer.settings.block_size) == (180, 8)
        assert not run_serve(**variables, RAGORDER_SERVE_SHADOW="false").orderer.shadow

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("upstrem = 'http://127.0.0.1:9'", "the name of its entry 1 is no option: did you mean upstream?"),
            ("port = 1\nconfig = 'other.toml'", "the name of its entry 2 is no option"),
            ("geheim-7f3a9c = 1", "the name of its entry 1 is no option"),
            ("port = 'geheim'", "'--port': the value in the file of --config is no whole number"),
            ("block-size = 'geheim'", "'--block-size': the value in the file of --config is no whole number"),
            ("moves = 'geheim'", "'--moves': the value in the file of --config is not one of"),
            ("read-timeout = 'geheim'", "'--read-timeout': the value in the file of --config is no duration"),
            ("upstream = 'geheim'", "--upstream"),
            ("port = [1]", "port: write a text or a number"),
            ("port = true", "port: write a text or a number"),
            ("shadow = 1", "shadow: write true or false"),
            ("upstream = [true]", "upstream: write a text or a number, or a list of them"),
            ("[serve]\nport = 1", "the name of its entry 1 is no option"),
            ("api-key = 'geheim", "not TOML (end of document)"),
            ("[geheim]\n[geheim]", "not TOML (line 2, column"),
            ("port = " + "[" * 100_000, "nested too deeply"),
            ("port = " + "9" * 5_000, "cannot be read"),
            ("api-key = ' '", "--api-key: the key is empty"),
            ("model = 'random'", "the name of its entry 1 is no option"),
            ("max-waiting = 3", "--max-waiting requires --max-in-flight"),
        ],
        ids=lambda text: text.partition("\n")[0][:40],
    )
    def test_that_is_wrong_is_refused(self, content: str, reason: str, run_serve: Run, file: File) -> None:
        upstream = () if content.startswith("upstream") else NOWHERE
        served = run_serve(*upstream, "--config", file(content))
        assert served.exit_code == 2
        assert reason in served.said
        assert "geheim" not in served.said


class TestEnvironment:
    def test_has_a_variable_for_every_option(self) -> None:
        options = [each for each in serve_command.params if isinstance(each, Option)]
        assert len(options) > 40
        named = {each.opts[0]: each.envvar or each.variable for each in options}
        assert [name for name, variable in named.items() if variable is None] == []
        assert named["--read-timeout"] == "RAGORDER_SERVE_READ_TIMEOUT"
        assert named["--capacity-tokens"] == "RAGORDER_CAPACITY_TOKENS"
        assert named["--api-key"] == "RAGORDER_PROXY_API_KEY"
        variables = [str(each) for each in named.values()]
        assert len(set(variables)) == len(variables)

    def test_gives_options_of_every_kind(self, run_serve: Run) -> None:
        served = run_serve(
            RAGORDER_SERVE_UPSTREAM="http://127.0.0.1:9",
            RAGORDER_SERVE_PORT="0",
            RAGORDER_SERVE_SHADOW="1",
            RAGORDER_SERVE_ALLOW_HOST="a.example b.example",
            RAGORDER_SERVE_GRACE="7s",
            RAGORDER_CAPACITY_TOKENS="4096",
            RAGORDER_BLOCK_SIZE="16",
        )
        assert served.orderer.shadow and served.config.timeout_graceful_shutdown == 7
        assert {"a.example", "b.example"} < served.app["hosts"]

    def test_is_named_by_the_help(self, run_serve: Run) -> None:
        said = run_serve("--help").said
        assert "RAGORDER_SERVE_ and its name" in said and "--config FILE" in said


@pytest.fixture
def launch(upstream: Upstream) -> Iterator[Launch]:
    with launching(ServeProcess, *SERVE, "--port", "0", "--upstream", upstream.url, *SIZES, PYTHONPATH="") as launch:
        yield launch


class TestLog:
    def test_has_a_line_for_each_answer_on_demand_and_metrics_of_the_process(self, launch: Launch) -> None:
        process = launch("--access-log", "--log-level", "error")
        page = httpx2.get(f"{process.url}/metrics", verify=CERTIFICATES).text
        for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"):
            found = re.search(rf"^process_{name} (\S+)$", page, re.MULTILINE)
            assert found is not None and float(found[1]) > 0, name
        body = {"model": "m", "messages": [{"role": "user", "content": "secret"}]}
        with httpx2.Client(base_url=process.url, verify=CERTIFICATES) as client:
            client.get("/health?key=secret", headers={"x": "secret"})
            client.post("/v1/chat/completions?key=secret", json=body)
            client.get("/line%0Abreak")
        lines = process.stop().splitlines()
        assert len(lines) == 4
        answers = ("GET /metrics 200", "GET /health 200", "POST /v1/chat/completions 501", "GET /line%0Abreak 404")
        for line, said in zip(lines, answers, strict=True):
            assert re.fullmatch(rf"\S+ \S+ INFO ragorder.access: {said} \d\.\d{{3}} s", line), line

    def test_level_is_that_of_this_package(self, run_serve: Run) -> None:
        """Other packages' lines have headers in them."""
        before = logging.getLogger("httpcore2").getEffectiveLevel()
        try:
            assert run_serve(*SIZES, "--log-level", "info").exit_code == 0
            assert logging.getLogger("ragorder").getEffectiveLevel() == logging.INFO
            # Ray, in another test, may have lowered it.
            assert logging.getLogger("httpcore2").getEffectiveLevel() == before
        finally:
            logging.getLogger("ragorder").setLevel(logging.NOTSET)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificate")
class TestHTTPS:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> tuple[Path, Path]:
        files = tmp_path / "certificate.pem", tmp_path / "key.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
        subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
        return files

    def test_is_served_with_the_certificate(self, certificate: tuple[Path, Path], launch: Launch) -> None:
        process = launch("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]))
        assert process.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx2.get(f"{process.url}/ragorder/ready", verify=trusted).json() == {"status": "ready"}
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(process.url, verify=CERTIFICATES)
        with pytest.raises(httpx2.TransportError):
            httpx2.get(process.url.replace("https", "http"), verify=CERTIFICATES)
        assert process.stop() == ""

    @pytest.mark.slow
    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    def test_connections_without_a_handshake_are_in_the_limits(
        self, loop: str, certificate: tuple[Path, Path], upstream: Upstream
    ) -> None:
        """The system allows the process fewer files than there are such connections."""
        command = SERVE
        if loop == "uvloop":
            pytest.importorskip("uvloop")
        else:
            command = (*SERVE[:2], f"import sys; sys.modules['uvloop'] = None; {SERVE[2]}", *SERVE[3:])
        given = ("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--port", "0")
        limits = ("--upstream", upstream.url, "--max-connections", "20", "--client-timeout", "5s")
        with launching(ServeProcess, *command, *SIZES, PYTHONPATH="") as launch, ExitStack() as until_done:
            process = launch(*given, *limits)
            resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (100, 100))
            trusted = ssl.create_default_context(cafile=str(certificate[0]))
            silent = [
                until_done.enter_context(socket.create_connection(process.address, timeout=60)) for _ in range(200)
            ]
            page = httpx2.get(f"{process.url}/metrics", verify=trusted, timeout=60).text
            files = re.search(r"^process_open_fds (\S+)$", page, re.MULTILINE)
            assert files is not None and float(files[1]) < 100
            with suppress(ConnectionResetError):
                assert silent[-1].recv(1) == b"", "it has as long as a header"
            assert process.stop() == ""

    @pytest.mark.slow
    def test_a_connection_that_is_kept_does_not_use_up_the_grace(
        self, certificate: tuple[Path, Path], launch: Launch
    ) -> None:
        process = launch("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--grace", "20")
        with httpx2.Client(verify=ssl.create_default_context(cafile=str(certificate[0]))) as client:
            assert client.get(f"{process.url}/ragorder/health").status_code == 200
            assert process.stop() == ""

    @pytest.mark.slow
    def test_one_file_may_have_both(self, certificate: tuple[Path, Path], launch: Launch) -> None:
        certificate[0].write_bytes(certificate[0].read_bytes() + certificate[1].read_bytes())
        assert launch("--ssl-certfile", str(certificate[0])).url.startswith("https://")

    def test_without_what_it_needs_is_refused(
        self, certificate: tuple[Path, Path], run_serve: Run, tmp_path: Path
    ) -> None:
        encrypted = tmp_path / "encrypted.pem"
        command = ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", certificate[1], "-out", encrypted]
        subprocess.run(command, check=True, capture_output=True)
        for options, reason in (
            (["--ssl-keyfile", str(certificate[1])], "--ssl-keyfile requires --ssl-certfile"),
            (["--ssl-certfile", str(certificate[0])], "no certificate with its key"),
            (["--ssl-certfile", str(certificate[1])], "no certificate with its key"),
            (["--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(encrypted)], "the key is encrypted"),
            (["--ssl-certfile", str(tmp_path / "none")], "does not exist"),
        ):
            served = run_serve(*SIZES, *options)
            assert served.exit_code == 2 and reason in served.said
