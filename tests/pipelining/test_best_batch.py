"""The time of a batch is learnt from batches that ran; the next one is that with which all are answered soonest."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragorder.pipelining.batching import PowerLaw, best_batch

MOST = 14
LAWS = st.builds(PowerLaw, st.floats(0.01, 100), st.floats(0, 1.6))
# As measured: grows or not, and jumps where another tier of memory is needed.
MEASURED = st.lists(st.floats(0.1, 10), min_size=MOST, max_size=MOST).map(lambda times: lambda size: times[size - 1])
TIMES = st.one_of(LAWS, MEASURED)
SIZES = st.sets(st.integers(1, MOST), min_size=1).map(sorted)


def mean_s(batches: Sequence[int], seconds: Callable[[int], float]) -> float:
    ends_s = accumulate(map(seconds, batches))
    return sum(size * end_s for size, end_s in zip(batches, ends_s, strict=True)) / sum(batches)


def splits(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All, one after another: brute force."""
    if not count:
        yield ()
    for size in {min(size, count) for size in sizes} if count else ():
        for rest in splits(count - size, sizes):
            yield (size, *rest)


def followed(count: int, seconds: Callable[[int], float], sizes: Sequence[int]) -> list[int]:
    batches = []
    while count:
        batches.append(best_batch(count, seconds, sizes))
        count -= batches[-1]
    return batches


def equal_split(count: int, batches: int) -> list[int]:
    """As equal as whole requests allow, the larger batches first: the other way round is never faster for them."""
    size, larger = divmod(count, batches)
    return [size + 1] * larger + [size] * (batches - larger)


@given(st.integers(1, MOST), TIMES, SIZES)
@example(MOST, PowerLaw(2.0, 0.59), list(range(1, MOST + 1)))
@example(5, PowerLaw(1.0, 1.2), [1, 2, 4, 8])
def test_no_split_is_faster(count: int, seconds: Callable[[int], float], sizes: list[int]) -> None:
    best_s = min(mean_s(split, seconds) for split in splits(count, sizes))
    assert mean_s(followed(count, seconds, sizes), seconds) == pytest.approx(best_s)


def test_all_or_half_by_equation_8s_threshold() -> None:
    for waiting in (2, 32):
        for off, expected in ((-1e-6, waiting), (1e-6, waiting // 2)):
            law = PowerLaw(3.0, math.log2(3 / 2) + off)
            assert best_batch(waiting, law, [waiting // 2, waiting]) == expected


def test_unequal_batches_save_a_twentieth_near_the_threshold() -> None:
    law = PowerLaw(1.0, 0.59)
    equal_s = min(mean_s(equal_split(12, batches), law) for batches in range(1, 13))
    assert equal_s / mean_s(followed(12, law, range(1, 13)), law) == pytest.approx(1.049, abs=5e-4)


def test_batches_grow_with_the_backlog_where_time_is_mostly_fixed() -> None:
    """A step streams all weights, whatever its size."""
    chosen = [best_batch(waiting, lambda size: 10 + 0.5 * size, [8, 16, 32, 64]) for waiting in (4, 8, 16, 32, 64, 500)]
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (4, 64)


class TestExpectedArrivals:
    def test_make_larger_batches_worth_their_wait(self) -> None:
        """Alone, two requests are served one by one; many that come later would wait for the second."""
        law = PowerLaw(1.0, 0.9)
        assert best_batch(2, law, [1, 2, 4]) == 1
        assert best_batch(2, law, [1, 2, 4], arrivals_s=[0.1] * 20) == 2

    @given(st.integers(1, MOST), LAWS, SIZES, st.lists(st.floats(0, 10), max_size=4))
    def test_that_come_when_all_is_served_change_nothing(
        self, count: int, law: PowerLaw, sizes: list[int], later: list[float]
    ) -> None:
        served_s = count * law(MOST)
        first = best_batch(count, law, sizes, [served_s + at_s for at_s in later])
        batches = [first, *followed(count - first, law, sizes)]
        assert mean_s(batches, law) == pytest.approx(mean_s(followed(count, law, sizes), law))

    @given(st.integers(1, 6), LAWS, SIZES, st.lists(st.floats(0, 20), max_size=3))
    def test_never_raise_the_cost(self, count: int, law: PowerLaw, sizes: list[int], arrivals: list[float]) -> None:
        with_them = best_batch(count, law, sizes, arrivals)
        without = best_batch(count, law, sizes)
        costs = [served_s(count, first, law, sizes, sorted(arrivals)) for first in (with_them, without)]
        assert costs[0] <= costs[1] * (1 + 1e-9)


def served_s(count: int, first: int, law: PowerLaw, sizes: Sequence[int], arrivals: Sequence[float]) -> float:
    """Time at which each is answered, added up: the given batch first, then the best for what waits."""
    now_s, total_s, due, size = 0.0, 0.0, [0.0] * count + [*arrivals], first
    while due:
        now_s = max(now_s, due[0])
        here = sum(at_s <= now_s for at_s in due)
        size = size or best_batch(here, law, sizes)
        now_s += law(size)
        total_s += size * now_s
        due, size = due[size:], 0
    return total_s


@pytest.mark.parametrize(
    ("waiting", "seconds", "sizes", "arrivals", "says"),
    [
        (0, 1.0, [1], [], "waiting is 0: a batch needs at least one"),
        (1, 1.0, [], [], "one size or more"),
        (1, 1.0, [4, 0], [], "each at least 1"),
        (1, 0.0, [1], [], "seconds must be positive and finite"),
        (1, math.nan, [1], [], "seconds must be positive and finite"),
        (1, 1.0, [1], [-1.0], "seconds from now"),
        (1, 1.0, [1], [math.inf], "seconds from now"),
    ],
)
def test_bad_input_is_refused(waiting: int, seconds: float, sizes: list[int], arrivals: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        best_batch(waiting, lambda _: seconds, sizes, arrivals)


BATCHES = (1, 4, 16, 64)


@given(st.floats(1e-4, 1e3), st.floats(0, 2), st.sets(st.integers(1, 512), min_size=2))
@example(2.0, 0.5, {511, 512})
def test_a_law_is_found_again_from_its_times(a: float, c: float, sizes: set[int]) -> None:
    law = PowerLaw(a, c)
    fitted = PowerLaw.fit([(size, law(size)) for size in sizes])
    assert fitted.c == pytest.approx(c, abs=1e-6)
    assert fitted.a == pytest.approx(a, rel=1e-5)


def test_errors_weigh_by_their_ratio() -> None:
    """Twice too long and half as long as it should be make up for each other."""
    samples = [(size, 3 * math.sqrt(size) * factor) for size in BATCHES for factor in (0.5, 2.0)]
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
    law = PowerLaw.fit([(size, 2 * size**0.4) for size in BATCHES])
    for _ in range(1000):
        size = rng.choice(BATCHES)
        law.learn(size, 6 * size**0.8 * rng.uniform(0.9, 1.1))
    assert law.c == pytest.approx(0.8, abs=0.02)
    assert law.a == pytest.approx(6, rel=0.05)


def test_an_interrupted_batch_counts_four_times_at_most() -> None:
    laws = [PowerLaw.fit([(size, 2 * size**0.5) for size in BATCHES * 8]) for _ in range(2)]
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
        for size in BATCHES:
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
def test_bad_parameters_of_a_law_are_refused(a: float, c: float) -> None:
    with pytest.raises(ValueError, match="a > 0 and c >= 0"):
        PowerLaw(a, c)
