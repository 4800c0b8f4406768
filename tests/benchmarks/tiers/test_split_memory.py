"""Memory is split where generation and retrieval serve most workflows together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy")

from ragorder.benchmarks.hedra.tiers.memory import Throughput, split_memory

TOTAL = 400
FIGURES = st.floats(0.1, 100)


@st.composite
def throughputs(draw: st.DrawFn) -> Throughput:
    """Any measured curve, one that falls or wavers as well."""
    sizes = sorted(draw(st.sets(st.integers(0, TOTAL), min_size=1, max_size=6)))
    return Throughput(sizes, [draw(FIGURES) for _ in sizes])


@given(throughputs(), throughputs(), FIGURES, FIGURES)
def test_the_split_found_is_the_best_of_all(
    generation: Throughput, retrieval: Throughput, rate: float, other: float
) -> None:
    found = split_memory(TOTAL, generation, retrieval, (rate, other))
    best = max(min(generation(kv) / rate, retrieval(TOTAL - kv) / other) for kv in range(TOTAL + 1))
    assert found.served == pytest.approx(best)
    assert found.kv_bytes + found.index_bytes == TOTAL


def test_what_either_gains_from_memory_moves_the_split() -> None:
    """As printed, Eq. 2 would give all memory to the KV cache, whatever the index gains."""
    linear = Throughput([0, 100], [1, 101])
    flat = Throughput([0, 100], [50, 50])
    assert split_memory(100, linear, linear, (1, 1)).kv_bytes == 50
    assert split_memory(100, linear, flat, (1, 1)).kv_bytes == 100
    assert split_memory(100, flat, linear, (1, 1)).kv_bytes == 51


def test_a_workflow_of_two_retrievals_gives_retrieval_more() -> None:
    linear = Throughput([0, 100], [0.001, 100.001])
    split = split_memory(100, linear, linear, (1, 3))
    assert split.kv_bytes == 25
    assert split.served == pytest.approx(25, rel=1e-3)


def test_a_split_explains_itself() -> None:
    gib = 2**30
    split = split_memory(4 * gib, Throughput([0, 4 * gib], [1, 9]), Throughput([0, 4 * gib], [1, 9]), (10, 10))
    assert split.explain() == (
        "2.0 GiB for KV, 2.0 GiB for clusters: generation serves 5.0 of 10.0 requests a second, retrieval 5.0 of 10.0; "
        "generation is the limit, at 50 % of what is asked for"
    )


@pytest.mark.parametrize(
    ("sizes", "figures", "says"),
    [
        ([], [], "0 sizes with 0 figures"),
        ([1, 2], [1.0], "2 sizes with 1 figures"),
        ([2, 1], [1.0, 1.0], "sizes must ascend"),
        ([-1], [1.0], "sizes must ascend from 0"),
        ([1], [0.0], "must be positive requests a second"),
        ([1], [float("nan")], "must be positive requests a second"),
    ],
)
def test_curves_that_say_nothing_are_refused(sizes: list[int], figures: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Throughput(sizes, figures)


def test_so_are_no_memory_and_no_requests() -> None:
    flat = Throughput([0], [1.0])
    with pytest.raises(ValueError, match="total_bytes must be at least 1, got 0"):
        split_memory(0, flat, flat, (1, 1))
    with pytest.raises(ValueError, match="rates must be positive requests a second"):
        split_memory(1, flat, flat, (1, 0))
