"""Times of the smallest pieces of work: what is measured, and what the report says of it."""

from __future__ import annotations

from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")


from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.benchmarks.hedra.search_costs import SearchCosts, cluster_ms, explained, scans


@pytest.fixture(scope="module")
def index() -> Any:
    return build_index(clustered(2000, 8, clusters=40, seed=0), 0.25)


def test_calls_scan_one_cluster_up_to_a_quarter_and_are_predicted_from_those_before(index: Any) -> None:
    rows = scans(index, clustered(5, 8, clusters=40, seed=1), 40)
    assert {len(column) for column in rows.values()} == {40}
    assert min(rows["codes"]) >= 0 and max(rows["codes"]) <= index.ntotal
    # Before the first call only a guess is known.
    assert rows["predicted_ms"][0] == pytest.approx(0.05 + 1e-4 * rows["codes"][0])
    assert min(rows["ms"]) > 0


def test_each_cluster_is_timed_by_itself(index: Any) -> None:
    assert len(cluster_ms(index, clustered(1, 8, clusters=40, seed=1)[0])) == index.nlist


def line(ms: list[float], predicted_ms: list[float]) -> Any:
    return SearchCosts.record(suite="mine", policy="scans", rows={"ms": ms, "predicted_ms": predicted_ms})


def test_what_is_explained_is_of_the_later_half() -> None:
    assert explained(line([9, 9, 1, 2, 3, 4], [0, 0, 0, 2, 3, 4])) == 1.0
    assert explained(line([9, 9, 9, 2, 3, 4], [0, 0, 0, 3, 3, 3])) == 0.0
