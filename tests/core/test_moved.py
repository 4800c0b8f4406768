"""Old import paths and class names, for one release."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import Any

import pytest

from ragorder import _moved

EXTRAS = {"dspy": "dspy", "langchain": "langchain_core", "llama_index": "llama_index.core"}


@pytest.mark.parametrize(("old", "new"), _moved.MODULES.items())
def test_an_old_path_is_the_new_module_and_warns(old: str, new: str) -> None:
    if new.startswith("ragorder.kernels.cache"):
        pytest.importorskip("torch")
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {new}") as caught:
        module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None and module.__spec__.name == new
    assert len(caught) == 1
    # Only the first import warns.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(old)


def test_a_submodule_of_a_moved_package_is_loaded_once() -> None:
    old = importlib.import_module("ragorder.trie.replacement.lru")
    assert old is importlib.import_module("ragorder.kernels.policies.lru")


def test_the_warning_points_at_the_importing_line() -> None:
    sys.modules.pop("ragorder.adapters.observe", None)
    with pytest.warns(DeprecationWarning) as caught:
        from ragorder.adapters.observe import ObservedOrderer  # type: ignore[import-not-found, unused-ignore]
    from ragorder.adapters.observing import observed

    assert ObservedOrderer is observed.ObservedOrderer
    assert caught[0].filename == __file__


def test_other_missing_modules_stay_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ragorder\.adapters\.nothing"):
        importlib.import_module("ragorder.adapters.nothing")
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("ragorder.trie.stores.nothing")
    assert importlib.util.find_spec("ragorder.adapters.nothing") is None


@pytest.mark.parametrize(
    ("module", "old", "new"), [(module, *names) for module, table in _moved.NAMES.items() for names in table.items()]
)
def test_an_old_class_name_is_the_new_class_and_warns(module: str, old: str, new: str) -> None:
    pytest.importorskip(EXTRAS[module.rpartition(".")[2]])
    adapter: Any = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        assert getattr(adapter, old) is getattr(adapter, new)
    assert new in adapter.__all__ and old not in adapter.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = adapter.Nothing


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ragorder.adapters.doctor", "AddressError Events Finding PromptSample ServerError Verdict examine"),
        ("ragorder.adapters.vllm", "CacheConfig ServerError read_cache_config"),
        ("ragorder.adapters.langchain", "FeedbackHandler"),
        ("ragorder.adapters.llama_index", "CacheOrderPostprocessor FeedbackHandler"),
        ("ragorder.adapters.openai", "Answer AsyncOrderedClient AsyncOrderedStream OrderedClient OrderedStream"),
    ],
)
def test_modules_that_became_packages_still_have_their_names(module: str, names: str) -> None:
    pytest.importorskip(EXTRAS.get(module.rpartition(".")[2], "ragorder"))
    assert set(names.split()) <= set(vars(importlib.import_module(module)))


def test_the_old_paths_cost_the_core_nothing(python: Any) -> None:
    show = "import sys, ragorder; print([name for name in sys.modules if name.startswith('ragorder.adapters')])"
    assert python("-c", show).stdout.strip() == "[]"
