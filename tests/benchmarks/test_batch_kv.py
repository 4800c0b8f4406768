"""Batches that a KV cache holds: how they are filled, by each order, and the table."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragorder.benchmarks.doll.batch_kv import POLICIES, SUFFIX_TOKENS, fill, measure
from ragorder.document import Document

DOCUMENTS = [Document(str(number), tokens=10 * (number + 1)) for number in range(6)]
requests = st.lists(
    st.lists(st.sampled_from(DOCUMENTS), max_size=4, unique_by=lambda each: each.id), min_size=1, max_size=20
)


def path(*numbers: int) -> list[Document]:
    return [DOCUMENTS[number] for number in numbers]


class TestABatch:
    def test_holds_a_document_once_after_the_same_documents(self) -> None:
        asked = [path(0, 1), path(0, 2), path(1, 0)]
        assert fill(asked, 10_000, shared=True) == ([3], 10 + 20 + 30 + 20 + 10 + 3 * SUFFIX_TOKENS)
        assert fill(asked, 10_000, shared=False) == ([3], 30 + 40 + 30 + 3 * SUFFIX_TOKENS)

    def test_ends_where_the_next_request_has_no_room(self) -> None:
        asked = [path(0, 1), path(0, 1), path(0, 1)]
        assert fill(asked, 30 + 2 * SUFFIX_TOKENS, shared=True) == ([2, 1], 60 + 3 * SUFFIX_TOKENS)
        assert fill(asked, 2 * (30 + SUFFIX_TOKENS), shared=False)[0] == [2, 1]

    def test_has_at_least_one_request(self) -> None:
        assert fill([path(5), path(5)], 1, shared=True)[0] == [1, 1]

    @given(requests, st.integers(1, 1000))
    def test_is_the_trie_of_its_requests(self, asked: Any, capacity: int) -> None:
        sizes, total = fill(asked, capacity, shared=True)
        assert sum(sizes) == len(asked)
        begin = expected = 0
        for size in sizes:
            batch = asked[begin : begin + size]
            nodes = {
                tuple(each.id for each in request[: end + 1]): request[end]
                for request in batch
                for end in range(len(request))
            }
            tokens = sum(each.token_count for each in nodes.values()) + size * SUFFIX_TOKENS
            assert tokens <= capacity or size == 1
            expected += tokens
            begin += size
        assert total == expected
        apart, alone = fill(asked, capacity, shared=False)
        assert len(sizes) <= len(apart)
        assert total <= alone


class TestOrders:
    def asked(self) -> list[list[Document]]:
        """Pairs of requests have three documents in common, and come far apart, by ranks that differ."""
        found = []
        for turn in range(2):
            for group in range(20):
                shared = [Document(f"{group} {each}", tokens=100) for each in range(3)]
                found.append([*(reversed(shared) if turn else shared), Document(f"{turn} {group}", tokens=100)])
        return found

    def test_serve_each_request_once(self) -> None:
        for policy in POLICIES:
            sizes, facts = measure(policy, self.asked(), 4000)
            assert sum(sizes) == 40
            assert facts["served_tokens"] == 40 * (400 + SUFFIX_TOKENS)

    def test_put_requests_that_share_into_one_batch(self) -> None:
        counts = {policy: len(measure(policy, self.asked(), 4 * 400 + 8 * SUFFIX_TOKENS)[0]) for policy in POLICIES}
        assert counts["order_batch"] < counts["retrieval"] <= counts["sum"]
