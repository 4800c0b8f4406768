"""Parts that several tests of pipelining share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def path(index: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the module's index."""
    from support.ivf import write

    return write(index, tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def flat() -> Any:
    from support.ivf import build

    return build("IVF24,Flat")


@pytest.fixture
def scanned() -> Callable[[], int]:
    """How many clusters FAISS has scanned."""
    import faiss

    faiss.cvar.indexIVF_stats.reset()
    return lambda: int(faiss.cvar.indexIVF_stats.nlist)
