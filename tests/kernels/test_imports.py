"""The parts of the optional backend that need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["store", "store.hashing", "profile_cache", "short_profile", "fusion.selection"])
def test_selections_store_and_profiles_need_no_torch(module: str) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'numpy', 'triton')))"
    code = f"{blocked}; import ragorder.kernels.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_mirrors_of_tiers_need_no_torch() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'numpy', 'triton')))"
    code = f"{blocked}; import ragorder.trie.mirror, ragorder.trie.policies, ragorder.trie.profile"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_store_without_xxhash_names_the_extra() -> None:
    code = "import sys; sys.modules['xxhash'] = None; import ragorder.kernels.store"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install '.[vllm]'" in done.stderr


def test_streamed_weights_need_neither_the_engine_nor_its_cache() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    code = (
        "import sys, ragorder.kernels.offload\n"
        "rooms = [f'ragorder.kernels.{name}' for name in ('engine', 'cache', 'paging', 'store', 'preprocessing')]\n"
        "assert not [name for name in sys.modules if name.startswith(tuple(rooms))]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_streamed_weights_without_torch_name_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; import ragorder.kernels.offload"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "streamed weights need torch: in a clone of ragorder, pip install '.[torch]'" in done.stderr
