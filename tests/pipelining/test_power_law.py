"""The time of a batch by its size is learnt from batches that ran."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragorder.pipelining.batching import PowerLaw

SIZES = (1, 4, 16, 64)


@given(st.floats(1e-4, 1e3), st.floats(0, 2), st.sets(st.integers(1, 512), min_size=2))
@example(2.0, 0.5, {511, 512})
def test_a_law_is_found_again_from_its_times(a: float, c: float, sizes: set[int]) -> None:
    law = PowerLaw(a, c)
    fitted = PowerLaw.fit([(size, law(size)) for size in sizes])
    assert fitted.c == pytest.approx(c, abs=1e-6)
    assert fitted.a == pytest.approx(a, rel=1e-5)


def test_errors_weigh_by_their_ratio() -> None:
    """Twice too long and half as long as it should be make up for each other."""
    samples = [(size, 3 * math.sqrt(size) * factor) for size in SIZES for factor in (0.5, 2.0)]
    assert PowerLaw.fit(samples).c == pytest.approx(0.5)
    assert PowerLaw.fit(samples).a == pytest.approx(3)


def test_time_that_falls_with_the_size_counts_as_constant() -> None:
    law = PowerLaw.fit([(1, 4.0), (16, 1.0)])
    assert law.c == 0
    assert law(1) == law(64) == pytest.approx(2)


def test_one_size_says_how_long_and_leaves_the_exponent() -> None:
    law = PowerLaw(1.0, 0.6)
    for _ in range(50):
        law.learn(8, 5.0)
    assert law.c == 0.6
    assert law(8) == pytest.approx(5)


def test_a_machine_that_changed_is_learnt() -> None:
    rng = random.Random(0)
    law = PowerLaw.fit([(size, 2 * size**0.4) for size in SIZES])
    for _ in range(1000):
        size = rng.choice(SIZES)
        law.learn(size, 6 * size**0.8 * rng.uniform(0.9, 1.1))
    assert law.c == pytest.approx(0.8, abs=0.02)
    assert law.a == pytest.approx(6, rel=0.05)


def test_an_interrupted_batch_counts_four_times_at_most() -> None:
    laws = [PowerLaw.fit([(size, 2 * size**0.5) for size in SIZES * 8]) for _ in range(2)]
    for law, seconds in zip(laws, (4 * laws[0](16), 1e6), strict=True):
        law.learn(16, seconds)
    assert (laws[0].a, laws[0].c) == pytest.approx((laws[1].a, laws[1].c))


def test_noise_between_two_sizes_that_are_nearly_one_ends_no_learning() -> None:
    law = PowerLaw(1.0, 0.5)
    for _ in range(15):
        law.learn(63, 0.3)
    law.learn(64, 10.0)
    assert all(0 < law(size) < math.inf for size in (1, 64, 4096))
    for _ in range(1000):
        for size in SIZES:
            law.learn(size, 2 * size**0.5)
    assert law.c == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("samples", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)]])
def test_a_fit_takes_two_sizes(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="at least two batch sizes"):
        PowerLaw.fit(samples)


@pytest.mark.parametrize("sample", [(0, 1.0), (-1, 1.0), (2, 0.0), (2, -1.0), (2, math.nan), (2, math.inf)])
def test_bad_samples_are_refused(sample: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="a positive size and time"):
        PowerLaw.fit([(1, 1.0), sample])
    law = PowerLaw(1.0)
    with pytest.raises(ValueError, match="a positive size and time"):
        law.learn(*sample)
    assert (law.a, law.c) == (1.0, 1.0)


@pytest.mark.parametrize(("a", "c"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, -0.1), (1.0, math.inf)])
def test_bad_parameters_are_refused(a: float, c: float) -> None:
    with pytest.raises(ValueError, match="a > 0 and c >= 0"):
        PowerLaw(a, c)
