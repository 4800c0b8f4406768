"""How `ragorder serve` runs: options from files and the environment, its log, HTTPS, metrics of its process."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from click.testing import CliRunner
from support.http_server import PageServer
from support.requests import CERTIFICATES
from support.rings import grid
from support.serve_process import ServeProcess, launching

from ragorder import Document
from ragorder.adapters.proxy import make_app
from ragorder.cli.options import Option
from ragorder.cli.serve import serve as serve_command

COMMAND = (sys.executable, "-c", "from ragorder.cli.serve import serve; serve()", "--port", "0")
SIZES = ("--capacity-tokens", "4096", "--block-size", "16")


class Served:
    """What the command was about to serve, and what it said."""

    def __init__(self) -> None:
        self.app: dict[str, Any] = {}
        self.server: dict[str, Any] = {}
        self.orderer: Any = None
        self.said = ""
        self.exit_code = 0


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    """Runs the command up to the moment from which it would serve."""
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)

    def serve(*options: str, **environment: str) -> Served:
        served = Served()

        def make(orderer: Any, **given: Any) -> Any:
            served.orderer, served.app = orderer, given
            return make_app(orderer, **given)

        def run(app: Any, listening: Any, **given: Any) -> None:
            served.server = given

        monkeypatch.setattr("ragorder.adapters.proxy.make_app", make)
        monkeypatch.setattr("ragorder.adapters.http_server.server.run_server", run)
        result = CliRunner().invoke(serve_command, list(options), env=environment)
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        served.said, served.exit_code = " ".join(result.output.split()), result.exit_code
        return served

    return serve


@pytest.fixture
def upstream() -> Iterator[str]:
    def page(path: str, _: Any) -> tuple[int, str]:
        return (200, "pong") if path.partition("?")[0] == "/health" else (404, "")

    with PageServer(page) as server:
        yield server.base_url


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


class TestConfigFile:
    def test_has_options_by_their_names(self, serve: Callable[..., Served], file: Callable[[str], str]) -> None:
        served = serve("--config", file(FILE))
        settings = served.orderer.settings
        assert (settings.capacity_tokens, settings.block_size) == (16_384, 32)
        assert served.app["timeouts"].read_s == 90
        assert served.orderer.shadow and served.app["admission"] is not None
        assert {"a.example", "b.example"} < served.app["hosts"]
        assert served.app["upstream"] == "http://127.0.0.1:9"
        assert served.app["builder"].document_text(Document("1", "one")) == "one\n"

    def test_comes_behind_the_environment_and_that_behind_the_command_line(
        self, serve: Callable[..., Served], file: Callable[[str], str]
    ) -> None:
        path = file(FILE)
        variables = {"RAGORDER_SERVE_CONFIG": path, "RAGORDER_SERVE_READ_TIMEOUT": "2m", "RAGORDER_BLOCK_SIZE": "64"}
        served = serve(**variables)
        assert (served.app["timeouts"].read_s, served.orderer.settings.block_size) == (120, 64)
        served = serve("--read-timeout", "3m", "--block-size", "8", **variables)
        assert (served.app["timeouts"].read_s, served.orderer.settings.block_size) == (180, 8)
        assert not serve(**variables, RAGORDER_SERVE_SHADOW="false").orderer.shadow

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
    def test_that_is_wrong_is_refused(
        self, content: str, reason: str, serve: Callable[..., Served], file: Callable[[str], str]
    ) -> None:
        upstream = [] if content.startswith("upstream") else ["--upstream", "http://127.0.0.1:9"]
        served = serve(*upstream, "--config", file(content))
        assert served.exit_code == 2
        assert reason in served.said
        assert "geheim" not in served.said

    def test_that_is_not_there_is_refused(self, serve: Callable[..., Served], tmp_path: Path) -> None:
        served = serve("--config", str(tmp_path / "none.toml"))
        assert served.exit_code == 2 and "No such file" in served.said


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

    def test_gives_options_of_every_kind(self, serve: Callable[..., Served]) -> None:
        served = serve(
            RAGORDER_SERVE_UPSTREAM="http://127.0.0.1:9",
            RAGORDER_SERVE_PORT="0",
            RAGORDER_SERVE_SHADOW="1",
            RAGORDER_SERVE_ALLOW_HOST="a.example b.example",
            RAGORDER_SERVE_GRACE="7s",
            RAGORDER_CAPACITY_TOKENS="4096",
            RAGORDER_BLOCK_SIZE="16",
        )
        assert served.orderer.shadow and served.server["grace_s"] == 7
        assert {"a.example", "b.example"} < served.app["hosts"]

    def test_with_a_wrong_value_is_named_without_it(self, serve: Callable[..., Served]) -> None:
        served = serve("--upstream", "http://127.0.0.1:9", RAGORDER_SERVE_PORT="geheim", RAGORDER_BLOCK_SIZE="16")
        assert "'--port': the value of RAGORDER_SERVE_PORT is no whole number" in served.said
        served = serve("--upstream", "http://127.0.0.1:9", RAGORDER_BLOCK_SIZE="geheim")
        assert served.exit_code == 2 and "--block-size" in served.said and "geheim" not in served.said

    def test_of_this_command_contradicts_as_the_command_line_does(self, serve: Callable[..., Served]) -> None:
        served = serve("--upstream", "http://127.0.0.1:9", RAGORDER_SERVE_PROFILE="none")
        assert served.exit_code == 2 and "--profile requires --tiers" in served.said

    def test_is_named_by_the_help(self, serve: Callable[..., Served]) -> None:
        said = serve("--help").said
        assert "RAGORDER_SERVE_ and its name" in said and "--config FILE" in said


@pytest.fixture
def launch(upstream: str) -> Iterator[Callable[..., ServeProcess]]:
    with launching(ServeProcess, *COMMAND, "--upstream", upstream, *SIZES, PYTHONPATH="") as launch:
        yield launch


class TestLog:
    def test_has_a_line_for_each_answer_on_demand(self, launch: Callable[..., ServeProcess]) -> None:
        process = launch("--access-log", "--log-level", "error")
        body = {"model": "m", "messages": [{"role": "user", "content": "secret"}]}
        with httpx2.Client(base_url=process.url, verify=CERTIFICATES) as client:
            client.get("/health?key=secret", headers={"x": "secret"})
            client.post("/v1/chat/completions?key=secret", json=body)
            client.get("/line%0Abreak")
        lines = process.stop().splitlines()
        assert len(lines) == 3
        for line, said in zip(
            lines, ("GET /health 200", "POST /v1/chat/completions 501", "GET /line%0Abreak 404"), strict=True
        ):
            assert re.fullmatch(rf"\S+ \S+ INFO ragorder.access: {said} \d\.\d{{3}} s", line), line

    def test_level_is_that_of_this_package(self, serve: Callable[..., Served]) -> None:
        """Other packages' lines have headers in them."""
        try:
            assert (
                serve("--upstream", "http://127.0.0.1:9", *SIZES, "--port", "0", "--log-level", "info").exit_code == 0
            )
            assert logging.getLogger("ragorder").getEffectiveLevel() == logging.INFO
            assert logging.getLogger("httpcore2").getEffectiveLevel() >= logging.WARNING
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

    def test_is_served_with_the_certificate(
        self, certificate: tuple[Path, Path], launch: Callable[..., ServeProcess]
    ) -> None:
        process = launch("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]))
        assert process.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx2.get(f"{process.url}/ragorder/ready", verify=trusted).json() == {"status": "ready"}
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(process.url, verify=CERTIFICATES)
        with pytest.raises(httpx2.TransportError):
            httpx2.get(process.url.replace("https", "http"), verify=CERTIFICATES)
        assert process.stop() == ""

    @pytest.mark.parametrize("loop", grid(["asyncio", "uvloop"], 1))
    def test_connections_without_a_handshake_are_in_the_limits(
        self, loop: str, certificate: tuple[Path, Path], upstream: str
    ) -> None:
        """The system allows the process fewer files than there are such connections."""
        command = COMMAND
        if loop == "uvloop":
            pytest.importorskip("uvloop")
        else:
            command = (*COMMAND[:2], f"import sys; sys.modules['uvloop'] = None; {COMMAND[2]}", *COMMAND[3:])
        given = ("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--upstream", upstream)
        limits = ("--max-connections", "20", "--client-timeout", "5s")
        with launching(ServeProcess, *command, *SIZES, PYTHONPATH="") as launch, ExitStack() as until_done:
            process = launch(*given, *limits)
            resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (100, 100))
            trusted = ssl.create_default_context(cafile=str(certificate[0]))
            address = ("127.0.0.1", int(process.url.rpartition(":")[2]))
            silent = [until_done.enter_context(socket.create_connection(address, timeout=60)) for _ in range(200)]
            page = httpx2.get(f"{process.url}/metrics", verify=trusted, timeout=60).text
            files = re.search(r"^process_open_fds (\S+)$", page, re.MULTILINE)
            assert files is not None and float(files[1]) < 100
            with suppress(ConnectionResetError):
                assert silent[-1].recv(1) == b"", "it has as long as a header"
            assert process.stop() == ""

    @pytest.mark.slow
    def test_a_connection_that_is_kept_does_not_use_up_the_grace(
        self, certificate: tuple[Path, Path], launch: Callable[..., ServeProcess]
    ) -> None:
        process = launch("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]), "--grace", "20")
        with httpx2.Client(verify=ssl.create_default_context(cafile=str(certificate[0]))) as client:
            assert client.get(f"{process.url}/ragorder/health").status_code == 200
            assert process.stop() == ""

    @pytest.mark.slow
    def test_one_file_may_have_both(self, certificate: tuple[Path, Path], launch: Callable[..., ServeProcess]) -> None:
        certificate[0].write_bytes(certificate[0].read_bytes() + certificate[1].read_bytes())
        assert launch("--ssl-certfile", str(certificate[0])).url.startswith("https://")

    def test_without_what_it_needs_is_refused(
        self, certificate: tuple[Path, Path], serve: Callable[..., Served], tmp_path: Path
    ) -> None:
        given = ("--upstream", "http://127.0.0.1:9", *SIZES, "--port", "0")
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
            served = serve(*given, *options)
            assert served.exit_code == 2 and reason in served.said


def test_metrics_of_the_process(launch: Callable[..., ServeProcess]) -> None:
    process = launch()
    page = httpx2.get(f"{process.url}/metrics", verify=CERTIFICATES).text
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"):
        found = re.search(rf"^process_{name} (\S+)$", page, re.MULTILINE)
        assert found is not None and float(found[1]) > 0, name


def test_what_it_assumes_of_lengths_is_said(serve: Callable[..., Served], model_folder: Path) -> None:
    given = ("--upstream", "http://127.0.0.1:9", *SIZES, "--port", "0")
    assert "Lengths: estimated at four characters a token" in serve(*given).said
    assert "Lengths:" not in serve(*given, "--tokenizer", str(model_folder)).said
