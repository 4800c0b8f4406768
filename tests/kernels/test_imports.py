"""The parts of the optional backend that need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """What the code says on stderr, or nothing if it succeeds."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


def test_selections_store_mirrors_and_profiles_need_no_torch() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'numpy', 'triton')))"
    kernels = ("store", "store.hashing", "profile_cache", "short_profile", "fusion.selection")
    trie = ("mirror", "policies", "profile")
    modules = [*(f"ragorder.kernels.{name}" for name in kernels), *(f"ragorder.trie.{name}" for name in trie)]
    assert not run(f"{blocked}; import {', '.join(modules)}")


def test_a_store_without_xxhash_names_the_extra() -> None:
    code = "import sys; sys.modules['xxhash'] = None; import ragorder.kernels.store"
    assert "pip install '.[vllm]'" in run(code)


@pytest.mark.slow
def test_streamed_weights_need_neither_the_engine_nor_its_cache() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    code = (
        "import sys, ragorder.kernels.offload\n"
        "rooms = {f'ragorder.kernels.{name}' for name in ('engine', 'cache', 'paging', 'store', 'preprocessing')}\n"
        "assert not rooms & sys.modules.keys()"
    )
    assert not run(code)


def test_streamed_weights_without_torch_name_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; import ragorder.kernels.offload"
    assert "streaming weights needs torch: in a clone of ragorder, pip install '.[torch]'" in run(code)
