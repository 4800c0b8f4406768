"""Examples in the docstrings of public classes: they parse, and those of the core run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

PACKAGES = (
    *("ragorder", "ragorder.ordering", "ragorder.clouds", "ragorder.pipelining", "ragorder.adapters.dspy"),
    *("ragorder.adapters.haystack", "ragorder.adapters.http_client", "ragorder.adapters.langchain"),
    *("ragorder.adapters.llama_index", "ragorder.adapters.observing", "ragorder.adapters.openai"),
    *("ragorder.adapters.openai.pipelined", "ragorder.adapters.vllm.async_engine"),
    *("ragorder.adapters.vllm.cache_config", "ragorder.adapters.vllm.kv_events"),
    *("ragorder.kernels.cache", "ragorder.kernels.engine", "ragorder.kernels.store"),
    *("ragorder.trie.registry", "ragorder.trie.residency.blocks", "ragorder.trie.tree"),
)
# Classes that a caller receives and does not make.
RESULTS = {
    *("AsyncOrderedStream", "Borrowed", "ChatTurn", "CloudRequest", "Contents", "KVLease", "Node", "OrderedStream"),
    *("PathContents", "PipelinedStream", "SyncStream"),
}
RUNNABLE = (
    *("Batch", "CacheAwareQueue", "Document", "EngineBlocks", "EngineLoad", "KnowledgeTree", "Metrics"),
    *("ObservedOrderer", "Orderer", "Ordering", "Settings", "StagedHNSW", "StagedIVF", "Tracing"),
)


def public_classes(package: str) -> Iterator[type[Any]]:
    """Classes that a caller makes: no protocols, errors, enumerations or records."""
    module: Any = import_module(package)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == package]
    for name in getattr(module, "__all__", own):
        value = getattr(module, name)
        if name.startswith("_") or name in RESULTS or not inspect.isclass(value):
            continue
        if issubclass(value, BaseException | tuple | Enum) or getattr(value, "_is_protocol", False):
            continue
        record = hasattr(value, "__dataclass_fields__") and not hasattr(value, "generate")
        if value.__module__.startswith("ragorder") and (not record or name in ("Document", "Ordering")):
            yield value


def example(cls: type[Any]) -> str:
    """The indented lines of a class's docstring."""
    lines = inspect.cleandoc(cls.__doc__ or "").split("\n")
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


@pytest.mark.parametrize("package", PACKAGES)
def test_public_classes_have_an_example_that_parses(package: str) -> None:
    pytest.importorskip(package)
    for cls in public_classes(package):
        code = example(cls)
        assert code, f"{cls.__name__} has no example"
        ast.parse(f"async def example():\n{textwrap.indent(code, '    ')}")


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_example_runs(name: str) -> None:
    cls = next(each for package in PACKAGES for each in public_classes(package) if each.__name__ == name)
    exec(example(cls), surroundings(cls))  # noqa: S102


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
