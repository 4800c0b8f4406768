"""Parts that several tests of pipelining share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def index() -> Any:
    """The small index of servers."""
    from support.workflow_server import small_index

    return small_index()


@pytest.fixture(scope="module")
def whole_index() -> Any:
    """Each search needs all clusters."""
    from support.workflow_server import small_index

    index = small_index()
    index.nprobe = 10
    return index


@pytest.fixture
def search(index: Any) -> Iterator[Any]:
    """A continuous search, one cluster a piece."""
    from support.workflow_server import SMALL_PIECES

    from ragorder.pipelining import ContinuousIVF
    from ragorder.pipelining.search import Budget

    with ContinuousIVF(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
        yield search


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
