"""Ray Data: batches planned in shards on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.common.extras import needs
from ragorder.trie.shards import ShardPaths, ShardRequest

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset

    from ragorder.adapters.request_tables import RequestColumns

__all__ = ["plan_dataset"]

_USER = "ragorder.adapters.ray_data"


def plan_dataset(
    dataset: Dataset,
    shards: int,
    *,
    documents: str = "documents",
    scope: str | None = None,
    document_tokens: int = 256,
    sample: int = 1_000_000,
) -> Dataset:
    """Return a dataset's rows in serving order, shard by shard.

        planned = plan_dataset(ray.data.read_json("requests.jsonl"), shards=64)
        answers = processor(planned)  # ray.data.llm, or map_batches with an engine

    Columns as for `RequestColumns`. Rows get documents in prompt order, their retrieval ranks, from 0, as
    "permutation", and the shard's number as "shard". Join results by an id among the other columns.

    The dataset is read twice, once for popular documents in a `sample` of rows: `materialize` it if that is expensive.
    One task plans a shard, whose rows are adjacent. Each batch repeats a prefix: give engines at least 512 rows at a
    time.

    Raises ImportError, ValueError for less than one shard; a task raises ValueError for an unreadable column.
    """
    with needs("ray", _USER):
        import pyarrow  # noqa: F401
        import ray
    from ragorder.adapters.request_tables import SHARD, RequestColumns

    columns = RequestColumns(documents, scope, document_tokens)
    shared = ray.put(ShardPaths.of(_sampled(dataset, columns, sample), shards))

    def deal(table: Table) -> Table:
        return columns.deal(table, ray.get(shared))

    dealt = dataset.map_batches(deal, batch_format="pyarrow", batch_size=None)
    return dealt.groupby(SHARD, num_partitions=shards).map_groups(columns.plan, batch_format="pyarrow")


def _sampled(dataset: Dataset, columns: RequestColumns, most: int) -> list[ShardRequest]:
    import pyarrow

    kept: list[ShardRequest] = []
    every, first = 1, 0
    rows = dataset.select_columns(columns.names)
    for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
        places = range(-first % every, table.num_rows, every)
        first += table.num_rows
        kept += columns.requests(table.take(pyarrow.array(places, pyarrow.int64())))
        while len(kept) > max(1, most):
            kept, every = kept[::2], 2 * every
    return kept
