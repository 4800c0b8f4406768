"""A batch planned on Spark, in shards by documents, each in a task.

    pip install . 'pyspark[sql]>=4'        # and a Java runtime
    python examples/spark_plan.py [REQUESTS.json]

A shard's rows stay together, in serving order, until Spark shuffles them again: write them, and have an engine read
each shard from first to last. Join answers with questions by id.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, IntegerType, LongType, StructField, StructType

from ragorder.adapters.request_tables import RequestColumns
from ragorder.trie.shards import ShardPaths, shared_documents


def plan(rows: DataFrame, shards: int, sample: float = 1.0) -> DataFrame:
    """The rows, shard by shard, in serving order, with "documents" in prompt order and two columns more. A `sample` of
    the rows tells which documents are popular."""
    columns = RequestColumns()
    counted = rows.select(*columns.names).sample(sample, seed=0).toArrow()
    shared = rows.sparkSession.sparkContext.broadcast(ShardPaths.of(columns.requests(counted), shards))

    def deal(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from columns.deal(pa.Table.from_batches([batch]), shared.value).to_batches()

    def planned(rows_of_shard: pa.Table) -> pa.Table:
        return columns.plan(rows_of_shard)

    with_shard = StructType([*rows.schema, StructField("shard", IntegerType())])
    with_both = StructType([*with_shard, StructField("permutation", ArrayType(LongType()))])
    return rows.mapInArrow(deal, with_shard).groupBy("shard").applyInArrow(planned, with_both)


def requests(count: int) -> Iterator[dict[str, Any]]:
    """Three of the twelve documents of a subject, as if retrieved."""
    draw = random.Random(0)
    for number in range(count):
        subject = draw.randrange(40)
        yield {"id": f"q{number}", "documents": [f"d{subject}-{each}" for each in draw.sample(range(12), 3)]}


def saved_documents(rows: DataFrame) -> int:
    """Return the documents that each row shares with the one before, whose KV the engine still has."""
    orders = [row.documents for row in rows.toLocalIterator()]
    return sum(shared_documents(before, order) for before, order in pairwise([[], *orders]))


def main(path: str | None) -> None:
    # Start Spark's workers with this Python instead of the first one on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        rows = spark.createDataFrame(list(requests(4000))) if path is None else spark.read.json(path)
        found = {"as they come": rows, "one plan": plan(rows, 1), "8 shards": plan(rows, 8).cache()}
        for label, ordered in found.items():
            print(f"{label:12} {saved_documents(ordered):6} documents shared with the row before")
        with tempfile.TemporaryDirectory() as folder:
            found["8 shards"].write.mode("overwrite").json(folder)
            print(f"{spark.read.json(folder).count()} of {rows.count()} rows written")
    finally:
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
