"""Examples in the docstrings of classes: they parse, and those of the core run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ragorder", "trie", "pipelining", "kernels", "adapters")
# Their examples are a line of JSON and a command.
NO_PYTHON = {"OrderDocuments", "TraceLog"}
RUNNABLE = {
    "ragorder": ("Document", "Orderer", "Ordering", "Settings"),
    "ragorder.adapters.observing": ("Metrics", "ObservedOrderer", "Tracing"),
    "ragorder.ordering": ("Batch",),
    "ragorder.pipelining": ("CacheAwareQueue", "EngineLoad", "StagedHNSW", "StagedIVF"),
    "ragorder.trie.residency.blocks": ("EngineBlocks",),
    "ragorder.trie.tree": ("KnowledgeTree",),
}


def example(docstring: str | None) -> str:
    """The indented lines."""
    lines = inspect.cleandoc(docstring or "").split("\n")
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


def test_examples_parse() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    classes = [
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    examples = [example(ast.get_docstring(each)) for each in classes if each.name not in NO_PYTHON]
    assert sum(map(bool, examples)) > 50
    for code in examples:
        ast.parse(f"async def example():\n    pass\n{textwrap.indent(code, '    ')}")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in RUNNABLE.items() for name in names])
def test_the_example_runs(module: str, name: str) -> None:
    cls = getattr(import_module(module), name)
    code = example(cls.__doc__)
    assert code
    exec(code, surroundings(cls))  # noqa: S102


def surroundings(cls: type[Any]) -> dict[str, Any]:
    """The names that examples use without making them."""
    import ragorder
    from ragorder import pipelining
    from ragorder.adapters import observing

    documents = [ragorder.Document(name, name * 80) for name in "abc"]

    class Connected(ragorder.Orderer):
        @classmethod
        def for_vllm(cls, *_: Any, **__: Any) -> Any:
            return cls()

    return {
        **vars(ragorder),
        **vars(pipelining),
        **vars(inspect.getmodule(cls)),  # type: ignore[arg-type]
        "Orderer": Connected,
        "documents": documents,
        "generate": lambda *_: SimpleNamespace(cached_tokens=0),
        "generate_latest": lambda registry: registry,
        "index": flat_index(cls.__name__),
        "k": 5,
        "orderer": ragorder.Orderer(),
        "prompt_tokens": 2000,
        "queries": [[0.0] * 8],
        "question": "?",
        "requests": [documents, documents[::-1]],
        "serve": lambda *_: None,
        "url": "http://host:8000",
        **{name: getattr(observing, name) for name in observing.__all__},
    }


def flat_index(name: str) -> Any:
    if not name.startswith("Staged"):
        return None
    import faiss
    import numpy as np

    vectors = np.random.default_rng(0).random((200, 8), np.float32)
    index = faiss.index_factory(8, "HNSW8" if name == "StagedHNSW" else "IVF4,Flat")
    index.train(vectors)
    index.add(vectors)
    return index
