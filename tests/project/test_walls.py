"""The walls of the house: which part imports which, in no circle, and how much an import loads."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ragorder import errors

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ragorder", "trie", "pipelining", "kernels", "adapters", "eval", "benchmarks")
# Adapters of other parts than the layer, and those of the layer that measure an engine with parts of the backend.
BACKEND = ("ragorder.adapters.embedded", "ragorder.adapters.vllm_tiers")
SYSTEMS = tuple(f"ragorder.adapters.{room}" for room in ("batching", "ray", "shared_orders", "workflows"))
MEASURING = {"ragorder.adapters.doctor.memory", "ragorder.adapters.vllm.server_profile"}
# What no import of the layer loads: the other parts, and its own rarer features.
LATE = (
    "ragorder.kernels",
    "ragorder.clouds",
    *(f"ragorder.pipelining.{room}" for room in ("batching", "placement", "search", "workflow")),
    *BACKEND,
    *SYSTEMS,
    "ragorder.scope.cloud_scope",
    "ragorder.scope.fused",
    "ragorder.trie.mirror",
    "ragorder.trie.plan",
)
REQUESTS = """
from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.reply import Reply

orderer, builder, documents = Orderer(strict=True), PromptBuilder(), [Document("a", "text")]
builder.build("question", orderer.order(documents)).openai()
turn = builder.turn("question", documents, orderer=orderer)
history = turn.confirm(turn.openai()["messages"][-1]["content"])
reply = Reply(builder.turn("next", documents, history=history, orderer=orderer).ordering)
reply.read({"choices": [{"delta": {"content": "answer"}, "finish_reason": "stop"}]})
assert reply.answer().text == "answer"
"""
LOADED = """
import sys
exec(sys.argv[1])
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "ragorder" and (file := getattr(module, "__file__", None)):
        print(name, len(open(file, encoding="utf-8").read().splitlines()))
"""


@cache
def modules() -> dict[str, Path]:
    """Files of our modules, by name."""
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder != "ragorder" or parts[1] not in FOLDERS:
                name = ".".join(parts if folder == "ragorder" else ("ragorder", *parts))
                found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each of ours imports, for type checkers and inside functions as well."""
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        whole = {each for each in found if each in modules()}
        # `from package import module` imports both, but the package is no part of a circle with its own modules.
        graph[name] = {each for each in whole if each != name and not name.startswith(f"{each}.")}
    return graph


@cache
def loaded(program: str) -> dict[str, int]:
    """The lines of each of our modules that a program loads."""
    command = [sys.executable, "-c", LOADED, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    rows = (line.split() for line in done.stdout.splitlines() if line.startswith("ragorder"))
    return {name: int(lines) for name, lines in rows}


def test_no_imports_are_circular() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("part", ["trie", "pipelining", "clouds", "the core"])
def test_the_layer_imports_nothing_of_the_backend(part: str) -> None:
    def belongs(name: str) -> bool:
        rooms = name.split(".")[1:2]
        if part == "the core":
            return not rooms or rooms[0] not in {*FOLDERS, "cli", "clouds"}
        return rooms == [part]

    own = {name: names for name, names in imports().items() if belongs(name)}
    assert own
    kernels = {name: {each for each in names if each.startswith("ragorder.kernels")} for name, names in own.items()}
    assert not {name: names for name, names in kernels.items() if names}


def test_adapters_of_the_layer_that_import_the_backend_are_named() -> None:
    others = (*BACKEND, *SYSTEMS)
    own = {name: names for name, names in imports().items() if name.startswith("ragorder.adapters.")}
    layer = {name: names for name, names in own.items() if not name.startswith(others)}
    assert layer.keys() < own.keys()
    found = {name for name, names in layer.items() if any(each.startswith("ragorder.kernels") for each in names)}
    assert found == MEASURING


def test_kernels_import_only_what_is_below_them() -> None:
    """import-linter does not look into a folder without an `__init__.py`."""
    own = {name: names for name, names in imports().items() if name.startswith("ragorder.kernels.")}
    below = {"kernels", "trie", "pipelining", "common", "errors"}
    assert own
    assert {each for names in own.values() for each in names if not {*each.split(".")[1:2]} <= below} == set()


@pytest.mark.parametrize(
    ("module", "needs", "lines"),
    [
        ("ragorder", None, 6_500),
        ("ragorder.adapters.dspy", "dspy", 6_500),
        ("ragorder.adapters.haystack", "haystack", 7_000),
        ("ragorder.adapters.langchain", "langchain_core", 8_000),
        ("ragorder.adapters.llama_index", "llama_index", 7_500),
        ("ragorder.adapters.openai", None, 9_500),
        ("ragorder.adapters.vllm.connect", None, 8_500),
        ("ragorder.adapters.proxy", "httpx2", 16_000),
    ],
)
def test_an_import_of_the_layer_loads_few_lines_and_no_other_part(module: str, needs: str | None, lines: int) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    found = loaded(f"import {module}")
    assert sum(found.values()) <= lines, sorted(found.items(), key=lambda each: -each[1])[:12]
    assert not [name for name in found if name.startswith((*LATE, "ragorder.turns"))]


def test_requests_to_an_engine_load_no_other_part() -> None:
    assert not [name for name in loaded(REQUESTS) if name.startswith(LATE)]


def test_the_tree_of_errors_is_drawn_whole() -> None:
    """In the docstring of `ragorder.errors`: each class with its module, below its base."""
    drawn: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines()[2:]:
        name, *module = line.split()
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [name]
        if module:
            drawn[name] = module[0], above[depth - 1]
    defined = {}
    for name, path in modules().items():
        if not name.startswith("ragorder.benchmarks"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.name[0] != "_":
                    defined[node.name] = name, ast.unparse(node.bases[0]).rpartition(".")[2]
    del defined["RagorderError"]
    assert drawn == defined
