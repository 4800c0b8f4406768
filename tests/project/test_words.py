"""Plain words: what a reader of code, help and docs must not have to decode."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import every_command

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ragorder", "trie", "pipelining", "kernels", "adapters", "examples")
FORBIDDEN = re.compile(
    r"\b(?i:behind|in front of|taken over|ahead of need|anew|of which|of whom|so many|as far as|all the same)\b"
    r"|\bnone: "
)
IN_PROSE = re.compile(rf"{FORBIDDEN.pattern}|\b(?i:as many|whatever|none:)(?!\w)")
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
# The index includes the README; claims.toml makes the claims.
PAGES += [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("index.md", "claims.md")]


def found(text: str) -> list[str]:
    return [text[max(0, match.start() - 30) : match.end() + 30] for match in FORBIDDEN.finditer(text)]


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_plain(folder: str) -> None:
    others = set(FOLDERS) | {"eval"}
    files = [
        path
        for path in sorted((ROOT / folder).rglob("*.py"))
        if folder != "ragorder" or path.relative_to(ROOT).parts[1] not in others
    ]
    assert files
    said = {str(path.relative_to(ROOT)): words for path in files if (words := found("\n".join(docstrings(path))))}
    assert not said


@pytest.mark.parametrize("folder", ["eval", "benchmarks"])
def test_reports_and_suites_are_plain(folder: str) -> None:
    said = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        said[str(path)] = found("\n".join(texts).replace("none: ", ""))
    said |= {str(path): found(path.read_text("utf-8")) for path in sorted((ROOT / folder).rglob("*.toml"))}
    assert len(said) > 50
    assert {path: words for path, words in said.items() if words} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_plain(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    assert [line for line in prose.splitlines() if IN_PROSE.search(line)] == []


def test_help_is_plain() -> None:
    said = {}
    for path, command in every_command():
        texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        # A policy may have the name none.
        if words := found("\n".join(texts).replace("none: ", "")):
            said[path] = words
    assert not said
