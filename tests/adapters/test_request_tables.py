"""Arrow tables of requests: rows dealt to shards, and a shard planned, as tasks of any framework do it."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")

from ragorder.adapters.request_tables import RequestColumns
from ragorder.eval.data.workloads import make_workload
from ragorder.trie.plan import plan
from ragorder.trie.shards import ShardPaths, shared_documents


def in_shards(table: Any, shards: int, columns: RequestColumns = RequestColumns(), parts: int = 4) -> list[Any]:  # noqa: B008
    """The planned table of each shard; columns and paths reach the task of each part by pickle."""
    paths = pickle.dumps((columns, ShardPaths.of(columns.requests(table), shards)))
    length = -(-table.num_rows // parts)
    dealt = []
    for first in range(0, table.num_rows, length):
        there, known = pickle.loads(paths)  # noqa: S301
        dealt.append(there.deal(table.slice(first, length), known))
    rows = pyarrow.concat_tables(dealt)
    chosen = [
        [place for place, each in enumerate(rows["shard"].to_pylist()) if each == shard] for shard in range(shards)
    ]
    return [columns.plan(rows.take(pyarrow.array(places, pyarrow.int64()))) for places in chosen]


def saved(orders: list[Any]) -> int:
    return sum(shared_documents(before, order) for before, order in pairwise([[], *orders]))


def test_every_row_comes_once_and_shards_save_nearly_what_one_plan_saves() -> None:
    rankings = [
        [f"d{each}" for each in ranking] for ranking in make_workload("mix64", 0, requests=1500).rankings[:1500]
    ]
    numbers = list(range(len(rankings)))
    source = pyarrow.table(
        {"id": numbers, "documents": rankings, "note": [None if each % 2 else each for each in numbers]}
    )
    shards = in_shards(source, 4)
    rows = {row["id"]: row for shard in shards for row in shard.to_pylist()}
    assert len(rows) == sum(shard.num_rows for shard in shards) == len(rankings)
    for number, ranking in enumerate(rankings):
        assert rows[number]["documents"] == [ranking[rank] for rank in rows[number]["permutation"]]
        assert sorted(rows[number]["permutation"]) == list(range(5))
        assert rows[number]["note"] == (None if number % 2 else number)
    at_once = plan(rankings, {name: 256 for ranking in rankings for name in ranking})
    assert sum(saved(shard["documents"].to_pylist()) for shard in shards) >= 0.95 * saved(
        [order for _, order in at_once]
    )


def test_objects_keep_their_type_and_tenants_stand_together() -> None:
    objects = [[{"id": f"d{each}", "text": f"text {each}"} for each in (number % 7, 8, 9)] for number in range(60)]
    tenants = [f"tenant-{number % 3}" for number in range(60)]
    source = pyarrow.table({"id": list(range(60)), "documents": objects, "tenant": tenants})
    for shard in in_shards(source, 2, RequestColumns(scope="tenant")):
        assert shard.schema.field("documents").type == source.schema.field("documents").type
        there = shard["tenant"].to_pylist()
        assert len(set(there)) == 1 + sum(one != other for one, other in pairwise(there))
        for row in shard.to_pylist():
            assert row["documents"] == [objects[row["id"]][rank] for rank in row["permutation"]]


def test_lengths_count_where_objects_tell_them() -> None:
    """A long document in common is worth more than a short one."""
    rows = [[{"id": "long", "tokens": 900}, {"id": f"short-{number % 2}", "tokens": 30}] for number in range(8)]
    (shard,) = in_shards(pyarrow.table({"documents": rows}), 1)
    assert [row[0]["id"] for row in shard["documents"].to_pylist()] == ["long"] * 8


def test_an_empty_table_is_planned() -> None:
    empty = pyarrow.table({"documents": pyarrow.array([], pyarrow.list_(pyarrow.string()))})
    columns = RequestColumns()
    dealt = columns.deal(empty, ShardPaths.of([], 4))
    assert columns.plan(dealt).column_names == ["documents", "shard", "permutation"]


@pytest.mark.parametrize(
    ("table", "columns", "said"),
    [
        ({"documents": [["a"]]}, RequestColumns(documents="passages"), "no column 'passages': name one of documents"),
        ({"documents": [["a"]]}, RequestColumns(scope="tenant"), "no column 'tenant'"),
        ({"documents": [[{"name": "a"}]]}, RequestColumns(), "must have lists of ids, or of objects"),
        ({"documents": [["a"]], "shard": [1]}, RequestColumns(), "'shard', which the plan adds: rename it"),
        ({"documents": [["a"]], "permutation": [1]}, RequestColumns(), "'permutation', which the plan adds"),
    ],
)
def test_unreadable_tables_are_refused(table: dict[str, Any], columns: RequestColumns, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        columns.deal(pyarrow.table(table), ShardPaths.of([], 1))


def test_without_pyarrow_the_extra_is_named(python: Any) -> None:
    done = python("-c", "import ragorder.adapters.request_tables", blocked=("pyarrow",))
    assert "ragorder.adapters.request_tables needs pyarrow: in a clone of ragorder, pip install '.[ray]'" in done.stderr
