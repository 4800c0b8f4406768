"""Threads of FAISS in tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """FAISS on one thread: on small work its threads wait for each other longer than they work."""
    faiss = sys.modules.get("faiss")
    if faiss is None:
        yield
        return
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)
