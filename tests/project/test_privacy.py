"""Private names, which tests read in `support.inside` alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ragorder", "trie", "pipelining", "adapters", "kernels", "eval", "benchmarks")
PRIVATE = r"_[a-zA-Z]\w*"
DEFINED = re.compile(rf"(?:^\s*|\b(?:def|class) |\bself\.)({PRIVATE})", re.MULTILINE)
OF_NAMED_TUPLES = {"_replace", "_asdict"}
ALLOWED = Counter({"tests/eval/test_harness.py": 1})
"""Reads by file: there may be fewer, never more."""


def reads(node: ast.AST) -> Iterator[str]:
    """Return what this node takes by name: of an object that is not the code's own, by a string, or of a module."""
    match node:
        case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super"))):
            return
        case ast.Attribute(_, name):
            yield name
        case ast.Call(ast.Name(function) | ast.Attribute(_, function), [_, *_]) if function.endswith(("attr", "patch")):
            texts = (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
            yield from (text.rpartition(".")[2] for text in texts)
        case ast.ImportFrom(str(module), names) if module.startswith("ragorder"):
            yield from (*module.split("."), *(each.name for each in names))


def test_no_test_reads_a_private_name_of_the_product() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    private = {name for path in files for name in DEFINED.findall(path.read_text("utf-8"))} - OF_NAMED_TUPLES
    private |= {path.stem for path in files if re.fullmatch(PRIVATE, path.stem)}
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != ROOT / "tests" / "support" / "inside.py":
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            names = {name: node.lineno for node in nodes for name in reads(node) if name in private}
            found += [f"{path.relative_to(ROOT)}:{line}: {name}" for name, line in names.items()]
    assert Counter(each.partition(":")[0] for each in found) <= ALLOWED, found
