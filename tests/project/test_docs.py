"""README and docs/: links, commands and figures."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from support.commands import every_command

from ragorder.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "results" / "README.md",
    ROOT / "notebooks" / "README.md",
]

# The index includes the README.
WRITTEN = [path for path in PAGES if path.parent.name == "docs" and path.stem != "index"]
# Options of other programs that a page names.
FOREIGN = {
    *("--allowed-origins", "--api-server-count", "--backend", "--call-minutes", "--context", "--custom-output-len"),
    *("--dataset-name", "--dataset-path", "--disable-shuffle", "--enable-prefix-caching"),
    *("--enable-prompt-tokens-details", "--enforce-eager", "--extra-index-url", "--family", "--fresh-process"),
    *("--group", "--into", "--kv-cache-memory-bytes", "--kv-events-config", "--kv-transfer-config"),
    *("--max-concurrency", "--max-num-batched-tokens", "--middleware", "--no-deps", "--no-oversample", "--num-prompts"),
    *("--prefix-cache-retention-interval", "--prefix-caching-hash-algo", "--prefix-match-unit", "--query"),
    *("--routing-logic", "--runs", "--served-model-name", "--session-key", "--skip-chat-template", "--small"),
    *("--softcap", "--sparse", "--split", "--window", "--write"),
}


def commands(text: str) -> list[list[str]]:
    """The `ragorder …` commands of a page's code blocks, continued lines joined, comments left out."""
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    found = re.findall(r"(?:^|&&) *(?:\w+=\S+ +)*ragorder ([^\n#|&]*)", blocks, re.MULTILINE)
    return [each.split() for each in found]


def code(path: Path) -> Iterator[str]:
    """The Python of a page, a notebook or an example."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".ipynb":
        yield from ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    else:
        yield from re.findall(r"```python\n(.*?)```", text, re.DOTALL)


SHOWN = [*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb")), *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_names_that_are_imported_from_ragorder_exist(path: Path) -> None:
    imports = re.compile(r"^ *from (ragorder[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
    for module, names in (found.groups() for text in code(path) for found in imports.finditer(text)):
        (statement,) = ast.parse(f"from {module} import {names}").body
        assert isinstance(statement, ast.ImportFrom)
        try:
            there = importlib.import_module(module)
        except ImportError as error:
            if (error.name or "").startswith("ragorder"):
                raise
            pytest.skip(f"{module} needs {error.name}")
        for name in statement.names:
            if not hasattr(there, name.name):
                importlib.import_module(f"{module}.{name.name}")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "deploy" / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_says_its_kind_and_opens_with_a_block_to_copy(page: Path) -> None:
    title, kind, rest = page.read_text("utf-8").split("\n\n", 2)
    assert title.startswith("# ")
    assert re.match(r"\*(Tutorial|How-to|Reference|Explanation): \S", kind)
    assert "```" in rest[:1500]


def named_commands(text: str) -> list[list[str]]:
    """The `ragorder …` commands that are named within sentences, also across lines."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [found.split() for found in re.findall(r"`ragorder\s+([a-z][^`|]*)`", prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    text = page.read_text("utf-8")
    for words in [*commands(text), *named_commands(text)]:
        command: click.Command = main
        while isinstance(command, click.Group) and words:
            name = words.pop(0)
            found = command.get_command(click.Context(command), name)
            assert found is not None, name
            command = found
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        shown = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert shown <= known | {"--help", "-h"}, (command.name, shown - known)


@cache
def options() -> set[str]:
    """Those of all commands."""
    params = [param for _, command in every_command() for param in command.params]
    return {"--help", *(name for param in params for name in (*param.opts, *param.secondary_opts))}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_an_option_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text("utf-8")))
    assert named - options() - FOREIGN == set()


def test_the_readme_fits_a_first_reading_and_says_what_is_not_measured() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 81
    parts = (
        *("docs/why.svg", "```python", "git clone", "make demo", "make test", "not on the package index"),
        *("| LangChain |", "ragorder serve", "**Does it help me?**", "It does not help agents"),
        *("ragorder replay --example", "**How many prompts move?**", "## Results"),
        *("**Not measured yet**: vLLM on a GPU", "| vLLM |", "docs/index.md"),
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)


def test_the_readme_shows_what_its_python_prints() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    program, printed = re.findall(r"```python\n(.*?\n)((?:# [^\n]*\n)+)```", text, re.DOTALL)[0]
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == printed.replace("# ", "")
