"""The recipe for Spark of docs/batches.md, as it stands there."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.merge

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pyspark = pytest.importorskip("pyspark.sql")

from ragorder.eval.data.workloads import make_workload
from ragorder.trie.plan import plan
from ragorder.trie.shards import shared_documents

PAGE = Path(__file__).resolve().parents[2] / "docs" / "batches.md"


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    environment = pytest.MonkeyPatch()
    environment.setenv("PYSPARK_PYTHON", sys.executable)
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": "4"}
    builder = pyspark.SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()
    environment.undo()


def test_every_row_is_served_once_and_nearly_as_in_one_plan(spark: Any) -> None:
    rankings = [[f"d{n}" for n in ranking] for ranking in make_workload("mix64", 0, requests=1500).rankings[:1500]]
    frame = spark.createDataFrame(
        [(f"q{number}", ranking) for number, ranking in enumerate(rankings)], "id string, documents array<string>"
    )
    found = re.search(r"^### Spark\n.*?```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    code = found[1].replace("shards=64", "shards=4").replace("sample(0.1)", "sample(0.5, seed=0)")
    # As a script would have it, functions are sent to other processes by value.
    names: dict[str, Any] = {"__name__": "__main__", "spark": spark, "frame": frame}
    exec(compile(code, PAGE.name, "exec"), names)  # noqa: S102
    rows = names["planned"].collect()
    assert sorted(row["id"] for row in rows) == sorted(f"q{number}" for number in range(len(rankings)))
    shards: dict[int, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row["place"]):
        assert Counter(row["documents"]) == Counter(rankings[int(row["id"][1:])])
        shards.setdefault(row["shard"], []).append(row["documents"])
    assert set(shards) == {0, 1, 2, 3}
    at_once = saved([order for _, order in plan(rankings, {name: 256 for ranking in rankings for name in ranking})])
    assert sum(map(saved, shards.values())) >= 0.93 * at_once


def saved(orders: list[list[str]]) -> int:
    return sum(shared_documents(before, order) for before, order in zip([[], *orders], orders, strict=False))
