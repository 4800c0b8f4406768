"""Old import paths and class names, which keep working until 0.2 with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MODULES", "NAMES", "install", "renamed"]

MODULES = {
    "ragorder.adapters.connect": "ragorder.adapters.vllm.connect",
    "ragorder.adapters.kv_events": "ragorder.adapters.vllm.kv_events",
    "ragorder.adapters.metrics": "ragorder.adapters.observing.prometheus",
    "ragorder.adapters.observe": "ragorder.adapters.observing.observed",
    "ragorder.adapters.pipelined": "ragorder.adapters.openai.pipelined",
    "ragorder.adapters.stats": "ragorder.adapters.observing.stats",
    "ragorder.adapters.tier_stats": "ragorder.adapters.observing.tier_stats",
    "ragorder.adapters.tracing": "ragorder.adapters.observing.opentelemetry",
    "ragorder.adapters.vllm_async": "ragorder.adapters.vllm.async_engine",
    "ragorder.kernels.tiers": "ragorder.kernels.cache",
    "ragorder.trie.profile": "ragorder.kernels.profile",
    "ragorder.trie.replacement": "ragorder.kernels.policies",
    "ragorder.trie.stores": "ragorder.kernels.store",
}
NAMES = {
    "ragorder.adapters.dspy": {"CacheOrderedRetrieve": "CacheOrderRetriever"},
    "ragorder.adapters.langchain": {
        "CacheOrderedRetriever": "CacheOrderRetriever",
        "CacheReorder": "CacheOrderTransformer",
    },
    "ragorder.adapters.llama_index": {"CacheOrderedRetriever": "CacheOrderRetriever"},
}


class _MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _new_path(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = _new_path(old)
        _warn(f"{old} has moved to {new}")
        # The import system hands out what stands here afterwards: the new module itself, not a copy.
        sys.modules[old] = import_module(new)


def _new_path(old: str) -> str:
    """The new path of a module, or of a submodule of a moved package; "" for all others."""
    if not old.startswith("ragorder."):
        return ""
    package, rest = ".".join(old.split(".")[:3]), old.split(".")[3:]
    return ".".join([MODULES[package], *rest]) if package in MODULES else ""


def install() -> None:
    """Make the old paths importable. First in line, or Python would load submodules of a moved package twice."""
    if not any(type(finder).__qualname__ == _MovedModules.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())


def renamed(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` for its old names."""

    def old_name(name: str) -> Any:
        new = NAMES[module].get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name} is called {new} now")
        return getattr(sys.modules[module], new)

    return old_name


def _warn(text: str) -> None:
    # Frames of the import system are skipped: the warning points at the importing line.
    warnings.warn(f"{text}; the old name goes with ragorder 0.2", DeprecationWarning, stacklevel=3)
