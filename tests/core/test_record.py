"""Requests that were served elsewhere, by the same engine."""

from __future__ import annotations

import pytest

from ragorder import Document, Orderer

DOCUMENTS = [Document(name, tokens=100) for name in "abcd"]


def orderer() -> Orderer:
    return Orderer(capacity_tokens=10_000, block_size=16, strict=True)


class TestARecord:
    def test_counts_as_a_request_that_was_ordered_here(self) -> None:
        here, there = orderer(), orderer()
        for documents in (DOCUMENTS[:3], [DOCUMENTS[3], *DOCUMENTS[2::-1]]):
            ordering = here.order(documents, scope="acme")
            ordering.confirm()
            there.record(documents, permutation=ordering.permutation, scope="acme")
        assert there.tree_size == here.tree_size
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            expected = here.predict_cached_tokens(documents, scope="acme")
            assert there.predict_cached_tokens(documents, scope="acme") == expected != (0, 400)

    def test_without_a_permutation_is_in_prompt_order(self) -> None:
        there = orderer()
        there.record(DOCUMENTS[2::-1])
        assert [each.id for each in there.order(DOCUMENTS[:3]).documents] == ["c", "b", "a"]

    def test_may_be_given_as_any_iterable(self) -> None:
        there = orderer()
        there.record(each for each in DOCUMENTS[:3])
        assert there.predict_cached_tokens(DOCUMENTS[:3])[0] == 288
        with pytest.raises(TypeError, match="Document"):
            Orderer().record(each for each in [object()])

    def test_with_another_permutation_is_refused(self) -> None:
        there = orderer()
        with pytest.raises(ValueError, match="exactly once"):
            there.record(DOCUMENTS[:3], permutation=[0, 1, 1])
        assert there.tree_size == orderer().tree_size
