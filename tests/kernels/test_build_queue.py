"""The documents that wait to be preprocessed: those of most requests first."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from ragorder.kernels.engine.idle import BuildQueue


def drained(queue: BuildQueue) -> list[bytes]:
    found = []
    while (content := queue.take()) is not None:
        found.append(content)
    return found


def test_most_requests_come_first_and_among_equals_who_waits_longest() -> None:
    queue = BuildQueue()
    for content, requests in ((b"a", 2), (b"b", 5), (b"c", 2), (b"d", 5), (b"a", 3)):
        queue.put(content, requests)
    assert len(queue) == 4
    assert drained(queue) == [b"b", b"d", b"a", b"c"]
    assert len(queue) == 0 and queue.take() is None


def test_removed_documents_do_not_come() -> None:
    queue = BuildQueue()
    queue.put(b"a", 1)
    queue.put(b"b", 1)
    queue.remove(b"a")
    queue.remove(b"absent")
    assert drained(queue) == [b"b"]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.integers(0, 5))))
def test_it_is_a_sorted_list(puts: list[tuple[bytes, int]]) -> None:
    queue, order = BuildQueue(), dict[bytes, tuple[int, int]]()
    for number, (content, requests) in enumerate(puts):
        queue.put(content, requests)
        order[content] = -requests, number
    assert drained(queue) == sorted(order, key=order.__getitem__)
