"""Ray Data: every row once with all its columns, each shard planned as well as at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("pyarrow")
ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from ragorder.adapters.ray_data import plan_dataset
from ragorder.eval.data.workloads import make_workload
from ragorder.trie.plan import plan
from ragorder.trie.shards import shared_documents

TOKENS = 200


@pytest.fixture(scope="module", autouse=True)
def quiet(ray_cluster: None) -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False


@pytest.fixture(scope="module")
def rankings() -> list[list[str]]:
    found = make_workload("mix64", 0, requests=1500).rankings[:1500]
    return [[f"d{number}" for number in ranking] for ranking in found]


def dataset(rankings: list[list[Any]], **columns: Any) -> Any:
    """Eight blocks; a column is a function of the number of its row."""
    rows = [
        {"id": f"q{number}", "documents": ranking, **{name: make(number) for name, make in columns.items()}}
        for number, ranking in enumerate(rankings)
    ]
    return ray.data.from_items(rows, override_num_blocks=8)


def in_shards(planned: Any) -> dict[int, list[dict[str, Any]]]:
    """The rows of each shard, in their order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in planned.take_all():
        found.setdefault(row["shard"], []).append(row)
    return found


def saved(orders: list[list[Any]]) -> int:
    pairs = zip([[], *orders], orders, strict=False)
    return TOKENS * sum(shared_documents(before, order) for before, order in pairs)


def test_every_row_comes_once_with_its_columns_and_all_its_documents(rankings: list[list[str]]) -> None:
    source = dataset(rankings, number=lambda number: None if number % 2 else number)
    found = in_shards(plan_dataset(source, 4, document_tokens=TOKENS))
    assert set(found) == {0, 1, 2, 3}
    rows = {row["id"]: row for shard in found.values() for row in shard}
    assert len(rows) == sum(map(len, found.values())) == len(rankings)
    for number, ranking in enumerate(rankings):
        row = rows[f"q{number}"]
        assert row["number"] == (None if number % 2 else number)
        assert list(row["documents"]) == [ranking[rank] for rank in row["permutation"]]
        assert sorted(row["permutation"]) == list(range(len(ranking)))


def test_a_shard_of_several_blocks_is_planned_whole(rankings: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of millions: Ray cuts blocks at 128 MiB, which an engine's pool may share out."""
    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "target_max_block_size", 4096)
    planned = plan_dataset(dataset(rankings), 1, document_tokens=TOKENS).materialize()
    assert planned.num_blocks() > 4
    (shard,) = in_shards(planned).values()
    at_once = plan(rankings, {name: TOKENS for ranking in rankings for name in ranking})
    assert saved([list(row["documents"]) for row in shard]) == saved([order for _, order in at_once])


def test_a_sample_is_enough(rankings: list[list[str]]) -> None:
    found = in_shards(plan_dataset(dataset(rankings), 4, sample=800))
    assert sum(map(len, found.values())) == len(rankings)
    sizes = sorted(map(len, found.values()))
    assert sizes[-1] <= 2 * sizes[0]


def test_objects_keep_their_fields_and_tenants_stand_together() -> None:
    objects = [[{"id": f"d{each}", "text": f"text {each}"} for each in (number % 7, 8, 9)] for number in range(60)]
    source = dataset(objects, tenant=lambda number: f"tenant-{number % 3}")
    for shard in in_shards(plan_dataset(source, 2, scope="tenant")).values():
        tenants = [row["tenant"] for row in shard]
        assert len(set(tenants)) == 1 + sum(one != other for one, other in pairwise(tenants))
        for row in shard:
            given = objects[int(row["id"][1:])]
            assert [dict(each) for each in row["documents"]] == [given[rank] for rank in row["permutation"]]


def test_rows_without_documents_and_with_repeated_ones_stay() -> None:
    given = [["a", "b"], [], ["b", "a", "b"], ["a"]] * 5
    found = in_shards(plan_dataset(dataset(given), 1))
    rows = {int(row["id"][1:]): list(row["documents"]) for row in found[0]}
    assert {number: sorted(documents) for number, documents in rows.items()} == {
        number: sorted(documents) for number, documents in enumerate(given)
    }


@pytest.mark.parametrize(
    ("documents", "options", "said"),
    [
        ([["a"]], {"documents": "passages"}, "passages"),
        ([[{"name": "a"}]], {}, "must have lists of ids, or of objects"),
        ([["a"]], {"scope": "tenant"}, "tenant"),
    ],
    ids=["column", "documents", "scope"],
)
def test_what_cannot_be_read_is_said(documents: list[list[Any]], options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        plan_dataset(dataset(documents), 2, **options).take_all()


def test_less_than_one_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_dataset(dataset([["a"]]), 0)
