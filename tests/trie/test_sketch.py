"""Decayed counts: never too small, halved after the half-life, in a bounded number of cells."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder.topic import DIGEST_BYTES, DecayedSketch

FOREVER = 1 << 60


def digest(name: object) -> bytes:
    return blake2b(str(name).encode(), digest_size=DIGEST_BYTES).digest()


class TestCounts:
    def test_each_occurrence(self) -> None:
        counts = DecayedSketch(half_life=FOREVER)
        assert [round(counts.add(digest(name)), 6) for name in "abaacb"] == [1, 1, 2, 3, 1, 2]

    @given(st.lists(st.integers(0, 200), max_size=400))
    def test_are_never_too_small(self, names: list[int]) -> None:
        """Even where sixteen cells hold two hundred digests."""
        counts, true = DecayedSketch(half_life=FOREVER, width=4), Counter[int]()
        for name in names:
            true[name] += 1
            assert counts.add(digest(name)) >= true[name] - 1e-9

    def test_of_frequent_digests_are_right_among_many_rare_ones(self) -> None:
        counts, rng = DecayedSketch(half_life=FOREVER), random.Random(0)
        for number in range(20_000):
            counts.add(digest(f"rare {rng.randrange(50_000)}"))
            if number % 20 == 0:
                last = counts.add(digest("frequent"))
        assert 1000 <= round(last, 3) <= 1002

    def test_halve_after_the_half_life(self) -> None:
        counts = DecayedSketch(half_life=100)
        for _ in range(8):
            counts.add(digest("a"))
        for _ in range(100):
            counts.step()
        assert counts.add(digest("a")) == pytest.approx(8 / 2 + 1)

    @pytest.mark.parametrize(("half_life", "steps", "expected"), [(1, 3000, 2.0), (50, 200, None)])
    def test_and_steps_decay_alike_through_any_number_of_steps(
        self, half_life: int, steps: int, expected: float | None
    ) -> None:
        """The growing weight is scaled back before it overflows."""
        counts = DecayedSketch(half_life=half_life)
        for _ in range(steps):
            counts.step()
            found = counts.add(digest("in every step"))
        assert found == pytest.approx(counts.steps)
        assert expected is None or found == pytest.approx(expected)

    def test_of_threads_that_scale_back_at_once_are_not_mixed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts, names, interrupts = DecayedSketch(half_life=1, width=4), range(16), [1]
        # With the next step the weight is scaled back.
        for _ in range(664):
            counts.step()
        for name in names:
            counts.add(digest(name))

        def interrupted(kind: str, cells: Iterable[float]) -> array[float]:
            values = []
            for cell in cells:
                values.append(cell)
                if interrupts:
                    interrupts.pop()
                    # Of another thread.
                    counts.step()
            return array(kind, values)

        monkeypatch.setattr("ragorder.topic.array", interrupted)
        counts.step()
        assert not interrupts
        assert max(counts.add(digest(name)) for name in names) <= 2 * len(names)


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two, got 12"):
        DecayedSketch(width=12)
