"""Plans of a batch for several engines, in memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ragorder import Document, Orderer
from ragorder.eval.data.workloads import make_workload
from ragorder.shards import plan_shards


def requests(number: int = 200) -> list[list[Document]]:
    workload = make_workload("mix8", 0, requests=number)
    return [[workload.documents[each] for each in ranking] for ranking in workload.rankings[:number]]


class TestPlanShards:
    def test_every_request_is_served_once_with_the_callers_own_documents(self) -> None:
        given = requests()
        shards = plan_shards(given, 3)
        assert len(shards) == 3
        orderings = [ordering for shard in shards for ordering in shard]
        assert sorted(ordering.index for ordering in orderings) == list(range(len(given)))
        for ordering in orderings:
            documents = given[ordering.index]
            assert [id(documents[rank]) for rank in ordering.permutation] == list(map(id, ordering.documents))
            assert sorted(ordering.permutation) == list(range(len(documents)))

    def test_says_what_a_request_shares_with_the_one_before(self) -> None:
        (shard,) = plan_shards([[Document(each, tokens=10) for each in "abc"]] * 2 + [[Document("a", tokens=10)]], 1)
        for before, ordering in pairwise(shard):
            shared = ordering.prefix_documents
            assert shared > 0 and before.documents[:shared] == ordering.documents[:shared]
            assert ordering.cached_tokens == 10 * shared
        assert (shard[0].prefix_documents, shard[0].cached_tokens) == (0, 0)

    def test_each_engine_hits_as_the_plan_says(self) -> None:
        """An orderer with a cache of little more than one prompt, for each shard, predicts the same hits."""
        for shard in plan_shards(requests(), 3):
            mirror = Orderer(capacity_tokens=6 * 220, block_size=1, prefix_tokens=0, suffix_tokens=0)
            for ordering in shard:
                predicted = mirror.predict_cached_tokens(ordering.documents)[0]
                assert predicted >= ordering.cached_tokens
                mirror.record(ordering.documents)

    def test_a_document_twice_is_there_twice(self) -> None:
        twice = [Document("a"), Document("b"), Document("a")]
        for ordering in plan_shards([twice, twice[::-1]], 1)[0]:
            assert sorted(each.id for each in ordering.documents) == ["a", "a", "b"]

    def test_any_objects_are_documents_with_callables(self) -> None:
        shards = plan_shards([["a", "b"], ["b", "c"]], 1, key=str, tokens=len)
        assert [ordering.documents[0] for ordering in shards[0]] == ["b", "b"]

    def test_other_objects_and_less_than_one_shard_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"Document\(id, text\)"):
            plan_shards([["a"]], 2)
        with pytest.raises(ValueError, match="at least 1"):
            plan_shards([[Document("a")]], 0)
