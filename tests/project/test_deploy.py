"""deploy/: the image, compose, and every command in it, held to the product."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.deployment import DEPLOY, OVERLAYS, ROOT, arguments, containers, documents, render, tool, variables
from support.http_server import PageServer
from support.serve_process import ServeProcess, launching

from ragorder.cli import main
from ragorder.cli.proxy import ServerSettings
from ragorder.cli.serve import serve
from ragorder.settings import Settings

FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PORT = ServerSettings.model_fields["port"].default


def instructions() -> list[tuple[str, str]]:
    """The Containerfile's, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


def pinned() -> dict[str, str]:
    """Versions in constraints.txt by package."""
    lines = (DEPLOY / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def asked() -> list[str]:
    """Requirements of ragorder and of the extras that the image has, extras of extras too."""
    (extras,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("EXTRAS")]
    names = extras.removeprefix("EXTRAS=").split(",")
    texts = list(PROJECT["project"]["dependencies"])
    for name in names:
        for text in PROJECT["project"]["optional-dependencies"][name]:
            if text.startswith("ragorder["):
                names += Requirement(text).extras
            else:
                texts.append(text)
    return texts


def said() -> dict[str, list[str]]:
    """Commands of ragorder in the README and the comments, by the command."""
    text = "\n".join(path.read_text("utf-8") for path in FILES if path.suffix != ".json").replace("\\\n", " ")
    found = re.findall(r"(?:\bragorder(?::[\d.]+)? +)(serve|route|engine|doctor|stats|replay)\b([^\n`'|#]*)", text)
    return {f"{name} {rest}": [name, *shlex.split(rest)] for name, rest in found}


def commands(where: str) -> list[list[str]]:
    """Every command that compose or an overlay starts."""
    if where == "compose":
        (compose,) = documents(DEPLOY / "compose.yaml")
        return [compose["services"]["ragorder"]["command"]]
    manifests = render(DEPLOY / where)
    return [arguments(container, manifests) for container in containers(manifests, "ragorder")]


def passes(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def parsed(command: list[str]) -> click.Context:
    """Parse a command as click does; TestServed sees that it serves, too."""
    name, *options = command
    assert name in ("serve", "route")
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found.make_context(name, options)


class TestImage:
    def test_its_bases_are_one_pinned_image_that_runs_the_command_without_root_on_its_port(self) -> None:
        bases = [rest for word, rest in instructions() if word == "FROM"]
        assert bases == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
        (pinned,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("PYTHON_IMAGE")]
        image, tag = pinned.removeprefix("PYTHON_IMAGE=").rsplit(":", 1)
        assert image == "docker.io/library/python"
        version = re.match(r"\d+\.\d+\.\d+", tag)
        assert version is not None
        assert Requirement(f"python{PROJECT['project']['requires-python']}").specifier.contains(version[0])
        last = dict(instructions())
        assert last["USER"] == "10001:10001"
        assert last["EXPOSE"] == str(PORT)
        assert last["ENTRYPOINT"] == '["ragorder"]'
        words = re.findall(r'"([^"]*)"', last["CMD"])
        assert main.get_command(click.Context(main), words[0]) is serve

    def test_is_built_from_all_that_the_package_is_made_of(self) -> None:
        ignored = (DEPLOY / "Containerfile.dockerignore").read_text("utf-8").splitlines()
        assert "*" in ignored
        kept = {line[1:] for line in ignored if line.startswith("!")}
        folders = set(PROJECT["tool"]["setuptools"]["package-dir"].values())
        files = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "MANIFEST.in"}
        assert kept == folders | files | {"deploy/constraints.txt"}
        assert [name for name in kept if not (ROOT / name).exists()] == []

    def test_pins_what_pyproject_asks_for(self) -> None:
        pins = pinned()
        for requirement in map(Requirement, asked()):
            assert requirement.specifier.contains(Version(pins[canonicalize_name(requirement.name)])), requirement

    @pytest.mark.slow
    def test_pins_every_package(self) -> None:
        """As pip resolves the pins in an empty environment: what is installed here may be newer than they are."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--dry-run"]
        options = ["--ignore-installed", "--quiet", "--report", "-", "-c", str(DEPLOY / "constraints.txt")]
        done = subprocess.run([*pip, *options, *asked()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        chosen = [each["metadata"] for each in json.loads(done.stdout)["install"]]
        assert {canonicalize_name(each["name"]): each["version"] for each in chosen} == pinned()

    def test_hadolint_finds_nothing(self) -> None:
        passes(tool("hadolint"), DEPLOY / "Containerfile")


class TestCommands:
    @pytest.mark.parametrize("where", ["compose", *OVERLAYS])
    def test_every_option_exists_and_has_a_value_that_it_takes(self, where: str) -> None:
        contexts = [parsed(command) for command in commands(where)]
        found = [context.params for context in contexts]
        # Beside an engine, before a router, or both.
        fronts = {"compose": 0, "kubernetes/base": 0, "kubernetes/front": 1, "routers/dynamo": 0}.get(where, 1)
        assert sum(context.info_name == "route" for context in contexts) == fronts
        assert len(found) == 1 + (where.startswith("routers/") and where != "routers/dynamo")
        for params in found:
            assert params["port"] == PORT
            # A container's loopback device is reached from inside of it alone.
            assert params["host"] == "0.0.0.0"  # noqa: S104
            assert isinstance(params["upstream"], str) or len(params["upstream"]) == 1

    def test_no_command_wants_both_a_key_and_names(self) -> None:
        for overlay in OVERLAYS:
            manifests = render(DEPLOY / overlay)
            for container in containers(manifests, "ragorder"):
                allowed = parsed(arguments(container, manifests)).params["allow_host"]
                assert not (allowed and "RAGORDER_PROXY_API_KEY" in variables(container, manifests)), overlay

    def test_those_in_words_have_options_that_exist(self) -> None:
        assert len(said()) >= 5
        for text, (name, *words) in said().items():
            command = main.get_command(click.Context(main), name)
            assert command is not None
            known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
            shown = {word for word in words if word.startswith("--")}
            assert shown <= known, text

    def test_variables_are_the_products(self) -> None:
        known = {f"RAGORDER_{name.upper()}" for name in Settings.model_fields}
        for name in ("serve", "route", "doctor"):
            command = main.get_command(click.Context(main), name)
            assert command is not None
            for param in command.params:
                known |= {param.envvar} if isinstance(param.envvar, str) else set(param.envvar or ())
        named = {name for path in FILES for name in re.findall(r"\bRAGORDER_[A-Z_]+\b", path.read_text("utf-8"))}
        assert "RAGORDER_PROXY_API_KEY" in named
        assert named <= known


class TestCompose:
    @pytest.fixture
    def services(self) -> dict[str, Any]:
        (compose,) = documents(DEPLOY / "compose.yaml")
        found: dict[str, Any] = compose["services"]
        return found

    def test_has_four_services_of_pinned_images_that_publish_on_this_machine_only(
        self, services: dict[str, Any]
    ) -> None:
        assert set(services) == {"vllm", "ragorder", "prometheus", "grafana"}
        published = [port for each in services.values() for port in each.get("ports", [])]
        assert sorted(published) == ["127.0.0.1:3000:3000", f"127.0.0.1:{PORT}:{PORT}", "127.0.0.1:9090:9090"]
        for name, each in services.items():
            image = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", each["image"])
            tag = image.rpartition(":")[2]
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), name

    def test_the_engine_is_a_version_that_the_product_knows(self, services: dict[str, Any]) -> None:
        found = re.search(r"vllm-openai:v([\d.]+)", services["vllm"]["image"])
        assert found is not None
        wanted = Requirement(PROJECT["project"]["optional-dependencies"]["vllm"][0])
        assert wanted.specifier.contains(found[1])
        (image,) = {each["image"] for name in OVERLAYS for each in containers(render(DEPLOY / name), "vllm")}
        assert image.endswith(f":v{found[1]}")

    def test_the_proxy_runs_without_rights_after_the_engine_and_mounts_are_read_only(
        self, services: dict[str, Any]
    ) -> None:
        proxy = services["ragorder"]
        assert proxy["read_only"] is True
        assert proxy["cap_drop"] == ["ALL"]
        assert all("no-new-privileges:true" in each["security_opt"] for each in services.values())
        assert proxy["depends_on"]["vllm"]["condition"] == "service_healthy"
        assert proxy["image"].endswith(f":{PROJECT['project']['version']}")
        assert (DEPLOY / proxy["build"]["context"]).resolve() == ROOT
        assert (ROOT / proxy["build"]["dockerfile"]).is_file()
        mounted = [volume for each in services.values() for volume in each.get("volumes", []) if volume[0] == "."]
        assert len(mounted) == 3
        for source, _, mode in (volume.split(":") for volume in mounted):
            assert (DEPLOY / source).is_dir()
            assert mode == "ro"

    def test_the_proxy_answers_the_name_by_which_prometheus_asks(self, services: dict[str, Any]) -> None:
        (scraping,) = documents(DEPLOY / "prometheus" / "prometheus.yml")
        jobs = {each["job_name"]: each["static_configs"][0]["targets"] for each in scraping["scrape_configs"]}
        assert jobs == {"ragorder": [f"ragorder:{PORT}"], "vllm": ["vllm:8000"]}
        assert "ragorder" in parsed(services["ragorder"]["command"]).params["allow_host"]

    def test_is_compose_by_its_schema(self) -> None:
        pytest.importorskip("check_jsonschema")
        check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
        passes(*check, DEPLOY / "compose.yaml")


@pytest.fixture(scope="module")
def engine() -> Iterator[PageServer]:
    """As much of an engine as the proxy asks for when it starts and when it is probed."""
    sizes = 'block_size="16",num_gpu_blocks="1001",engine="0",enable_prefix_caching="True"'
    pages = {
        "/health": "",
        "/metrics": f"vllm:cache_config_info{{{sizes}}} 1.0\n",
        "/metrics/": "vllm:num_requests_waiting 3.0\n",
    }
    with PageServer(lambda path, _: (200, pages[path]) if path in pages else (404, "")) as server:
        yield server


@pytest.mark.slow
class TestServed:
    """The containers' commands in processes, on free ports and with an engine of this machine."""

    @pytest.mark.parametrize("where", ["compose", "kubernetes/base", "kubernetes/front", "routers/dynamo"])
    def test_it_answers_its_probes_and_keeps_the_rest_for_its_clients(self, where: str, engine: PageServer) -> None:
        httpx2 = pytest.importorskip("httpx2")
        (command,) = commands(where)
        command[command.index("--upstream") + 1] = engine.base_url
        command[command.index("--port") + 1] = "0"
        environment = {}
        if where != "compose":
            manifests = render(DEPLOY / where)
            (container,) = containers(manifests, "ragorder")
            every = variables(container, manifests).items()
            environment = {name: f"test-{value}" for name, value in every if "RAGORDER" in name}
        with launching(ServeProcess, sys.executable, "-m", "ragorder", *command, **environment) as launch:
            process = launch()
            url = f"http://127.0.0.1:{process.url.rpartition(':')[2]}"
            with httpx2.Client(base_url=url) as client:
                assert client.get("/ragorder/health").status_code == 200
                assert client.get("/ragorder/ready").status_code == 200
                if key := environment.get("RAGORDER_PROXY_API_KEY"):
                    assert client.get("/metrics").status_code == 401
                    client.headers["Authorization"] = f"Bearer {key}"
                else:
                    assert client.get("/metrics", headers={"Host": "elsewhere"}).status_code == 403
                    assert client.get("/metrics", headers={"Host": "ragorder:8100"}).status_code == 200
                assert "ragorder_order_seconds" in client.get("/metrics").text
                # What llm-d's picker scrapes through the proxy.
                assert client.get("/metrics/").text == "vllm:num_requests_waiting 3.0\n"
            assert process.stop() == ""
