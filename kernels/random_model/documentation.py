"""Documentation of Python's standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SKIPPED = {"antigravity", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "this", "turtledemo"}
_MINIMUM, _MAXIMUM = 600, 1200  # characters, 150 to 300 tokens

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Entry:
    """A module (`name` is empty), class, function, or method (`owner` is its class)."""

    module: str
    name: str
    owner: str
    signature: str
    text: str
    parameters: Sequence[str] = ()

    @property
    def title(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def spoken(self) -> str:
        return self.name if "." in self.name else self.title


class Chunk(NamedTuple):
    id: str
    title: str
    text: str


def library_modules() -> dict[str, Path]:
    return dict(_modules(Path(sysconfig.get_path("stdlib")), ""))


def _modules(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name == "__init__.py" and package:
            yield package, path
        elif path.name.startswith("_") or path.stem in _SKIPPED:
            continue
        elif path.suffix == ".py":
            yield f"{package}.{path.stem}".lstrip("."), path
        elif (path / "__init__.py").is_file():
            yield from _modules(path, f"{package}.{path.name}".lstrip("."))


def read_entries(module: str, path: Path) -> list[Entry]:
    return list(_entries(module, path))


def _entries(module: str, path: Path) -> Iterator[Entry]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    text = ast.get_docstring(tree)
    if text:
        yield Entry(module, "", "", module, text)
    known: set[str] = set()
    for node in _definitions(tree):
        if node.name in known:
            continue
        known.add(node.name)
        if isinstance(node, ast.ClassDef):
            yield from _class_entries(module, node)
        else:
            yield from _function_entry(module, node.name, "", node)


def _class_entries(module: str, node: ast.ClassDef) -> Iterator[Entry]:
    methods: dict[str, _Function] = {}
    for child in node.body:
        if isinstance(child, _Function) and (child.name not in methods or not ast.get_docstring(methods[child.name])):
            methods[child.name] = child
    constructor = methods.get("__init__")
    parts = [ast.get_docstring(node), ast.get_docstring(constructor) if constructor else None]
    text = "\n\n".join(part for part in parts if part)
    parameters = _parameters(constructor) if constructor else []
    if text:
        signature = f"class {module}.{node.name}{_arguments(constructor) if constructor else ''}"
        yield Entry(module, node.name, node.name, signature, text, parameters)
    for name, method in methods.items():
        if not name.startswith("_"):
            yield from _function_entry(module, f"{node.name}.{name}", node.name, method)


def _function_entry(module: str, name: str, owner: str, node: _Function) -> Iterator[Entry]:
    text = ast.get_docstring(node)
    if text:
        yield Entry(module, name, owner, f"{module}.{name}{_arguments(node)}", text, _parameters(node))


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | _Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | _Function):
            if not child.name.startswith("_"):
                yield child
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _definitions(child)


def _arguments(node: _Function) -> str:
    return f"({re.sub(r'^(self|cls)(, /)?(, |$)', '', ast.unparse(node.args))})"


def _parameters(node: _Function) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def chunks_of(module: str, entries: Iterable[Entry]) -> Iterator[Chunk]:
    """Pack neighbouring entries into chunks; split a long one at its paragraphs."""
    counts: dict[str, int] = {}
    batch: list[tuple[Entry, str]] = []
    size = 0

    def flush() -> Chunk:
        entry = batch[0][0]
        number = counts[entry.name] = counts.get(entry.name, 0) + 1
        suffix = f"/{number}" if entry.name and number > 1 else ""
        text = "\n\n".join(part for _, part in batch)
        return Chunk(f"{module}#{entry.name or number}{suffix}", entry.title, text)

    for entry in entries:
        for number, body in enumerate(_pieces(entry.text)):
            part = f"{entry.signature if number == 0 else entry.title + ' (continued)'}\n{body}"
            starts_class = number == 0 and entry.owner == entry.name
            if batch and (size + len(part) > _MAXIMUM or (starts_class and size >= _MINIMUM)):
                yield flush()
                batch, size = [], 0
            batch.append((entry, part))
            size += len(part) + 2
    if batch:
        yield flush()


def _pieces(text: str) -> list[str]:
    pieces = [""]
    for paragraph in re.split(r"\n\s*\n", text):
        separator = "\n\n"
        for part in [paragraph] if len(paragraph) <= _MAXIMUM else paragraph.splitlines():
            if pieces[-1] and len(pieces[-1]) + len(part) > _MAXIMUM - 100:
                pieces.append("")
            pieces[-1] += (separator if pieces[-1] else "") + part
            separator = "\n"
    return pieces
