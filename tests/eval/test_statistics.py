"""Statistics of the evaluation: summaries, and paired differences that say when there is none."""

from __future__ import annotations

import math

import pytest
from support.rings import examples

np = pytest.importorskip("numpy")
pytest.importorskip("scipy")

from hypothesis import given, settings
from hypothesis import strategies as st

from ragorder.eval.report.statistics import StatisticsError, compare, summary

FEW = 300

times = st.lists(st.floats(1, 1e4), min_size=20, max_size=60)


def bursts(rng, requests, shared):
    """Figures, where those of ten requests in a row have a part in common."""
    return shared * rng.normal(size=requests // 10 + 1).repeat(10)[:requests] + rng.normal(size=requests)


def coverage(requests, shared, *, statistic="mean", runs=250):
    """In how many of so many simulated measurements the interval holds the true difference, which is 1."""
    rng, held = np.random.default_rng(7), 0
    for seed in range(runs):
        plain = [50 + 3 * rng.normal(size=requests) for _ in range(3)]
        ours = [values + 1 + bursts(rng, requests, shared) for values in plain]
        found = compare(plain, ours, statistic=statistic, resamples=FEW, seed=seed)
        held += found.low <= 1 <= found.high
    return held / runs


class TestSummary:
    def test_has_mean_and_percentiles(self):
        found = summary(list(range(101)))
        assert (found.count, found.mean, found.p50, found.p95, found.p99) == (101, 50, 50, 95, 99)

    def test_leaves_out_what_is_no_number(self):
        assert summary([1.0, math.nan, 3.0]).mean == 2
        assert summary([math.nan]) is None
        assert summary([]) is None


class TestTheInterval:
    @pytest.mark.parametrize(
        ("requests", "shared", "options", "least", "most"),
        [
            (195, 0, {}, 0.91, 0.985),
            # Resampled one by one, requests that are alike would count as more than they tell.
            (195, 1, {}, 0.90, 1),
            (55, 1, {}, 0.86, 1),
            (95, 0, {"statistic": "p50", "runs": 150}, 0.90, 1),
        ],
        ids=["alone", "in bursts", "a short run", "the median"],
    )
    def test_holds_the_truth_about_as_often_as_it_claims(self, requests, shared, options, least, most):
        assert least <= coverage(requests, shared, **options) <= most

    def test_is_wider_where_requests_are_alike(self):
        rng = np.random.default_rng(0)
        plain = [rng.normal(size=200) for _ in range(3)]
        together = rng.normal(size=(3, 20)).repeat(10, axis=1)
        apart = [rng.permutation(values) for values in together]
        widths = []
        for added in (together, apart):
            found = compare(plain, [a + b for a, b in zip(plain, added, strict=True)])
            widths.append(found.high - found.low)
        assert widths[0] > 1.5 * widths[1]

    def test_is_paired(self):
        """What makes requests differ is on both sides, and in no interval."""
        rng = np.random.default_rng(0)
        plain = [1000 * rng.random(200) for _ in range(3)]
        found = compare(plain, [values + 1 for values in plain])
        assert (found.low, found.high, found.verdict) == (pytest.approx(1), pytest.approx(1), "better")

    @settings(max_examples=examples(30), deadline=None)
    @given(times, st.floats(0.5, 2), st.sampled_from(["mean", "p50", "p95"]), st.booleans())
    def test_is_mirrored_when_the_two_are_exchanged(self, plain, factor, statistic, relative):
        rng = np.random.default_rng(len(plain))
        ours = [[value * factor + rng.random() for value in plain]]
        there = compare([plain], ours, statistic=statistic, relative=relative, resamples=FEW)
        back = compare(ours, [plain], statistic=statistic, relative=relative, resamples=FEW)

        def mirrored(value):
            return 1 / (1 + value) - 1 if relative else -value

        assert back.low == pytest.approx(mirrored(there.high), rel=1e-6, abs=1e-6)
        assert back.high == pytest.approx(mirrored(there.low), rel=1e-6, abs=1e-6)

    @settings(max_examples=examples(30), deadline=None)
    @given(times, times)
    def test_holds_the_difference_that_was_measured(self, plain, ours):
        length = min(len(plain), len(ours))
        found = compare([plain[:length]], [ours[:length]], resamples=FEW)
        slack = 1e-6 + abs(found.difference) * 0.5 + (found.high - found.low)
        assert found.low - slack <= found.difference <= found.high + slack
        assert found.difference == pytest.approx(np.mean(ours[:length]) - np.mean(plain[:length]), abs=1e-6)


class TestTheVerdict:
    plain = 100 + np.random.default_rng(3).normal(size=(3, 200))

    def test_is_no_difference_where_the_interval_covers_zero(self):
        noise = np.random.default_rng(4)
        found = compare(self.plain, [values + noise.normal(size=200) for values in self.plain])
        assert found.low < 0 < found.high
        assert found.verdict == "no difference"

    def test_of_the_same_figures_is_no_difference(self):
        found = compare(self.plain, self.plain)
        assert (found.difference, found.low, found.high, found.verdict) == (0, 0, 0, "no difference")

    @pytest.mark.parametrize(("better", "verdict"), [("higher", "better"), ("lower", "worse")])
    def test_knows_which_way_is_better(self, better, verdict):
        assert compare(self.plain, [values + 5 for values in self.plain], better=better).verdict == verdict

    def test_finds_nothing_where_there_is_nothing_about_as_often_as_it_claims(self):
        rng, found = np.random.default_rng(5), 0
        for seed in range(250):
            plain = rng.normal(size=(3, 100))
            found += compare(plain, rng.normal(size=(3, 100)), resamples=FEW, seed=seed).verdict != "no difference"
        assert found / 250 <= 0.09


class TestSeeds:
    def test_count_as_much_as_they_have_requests_and_are_shown_one_by_one(self):
        found = compare([[1.0] * 30, [1.0] * 90], [[2.0] * 30, [4.0] * 90])
        assert found.difference == pytest.approx((30 * 1 + 90 * 3) / 120)
        assert found.by_seed == pytest.approx((1, 3))
        assert found.requests == 120

    def test_that_differ_by_as_much_as_they_like_do_not_widen_the_interval(self):
        """They are strata: what differs between seeds is not resampled."""
        found = compare([[1.0] * 100, [1000.0] * 100], [[2.0] * 100, [1001.0] * 100])
        assert (found.low, found.high) == pytest.approx((1, 1))

    def test_of_one_block_give_no_interval(self):
        found = compare([[1.0]], [[2.0]])
        assert not found.known
        assert found.verdict == "no difference"


class TestShares:
    def test_are_of_sums_and_not_means_of_shares(self):
        cached, prompts = [[10.0, 90.0] * 50], [[100.0, 900.0] * 50]
        found = compare([[0.0, 0.0] * 50], cached, of=(prompts, prompts))
        assert found.value == pytest.approx(0.1)
        assert found.low == pytest.approx(0.1)


class TestWhatCannotBeCompared:
    def test_a_request_that_failed_on_one_side_counts_on_neither(self):
        plain = [[1.0, 100.0] * 40]
        ours = [[2.0, math.nan] * 40]
        found = compare(plain, ours)
        assert (found.baseline, found.value, found.requests) == (1, 2, 40)

    @pytest.mark.parametrize(
        ("plain", "ours", "options", "said"),
        [
            ([[1.0, 2.0]], [[1.0]], {}, "same requests"),
            ([[1.0]], [[1.0], [2.0]], {}, "same seeds"),
            ([[math.nan]], [[1.0]], {}, "in common"),
            ([[0.0] * 20], [[1.0] * 20], {"relative": True}, "above zero"),
            ([[1.0]], [[1.0]], {"of": ([[1.0]], [[1.0]]), "statistic": "p50"}, "mean"),
        ],
    )
    def test_is_refused_with_the_reason(self, plain, ours, options, said):
        with pytest.raises(StatisticsError, match=said):
            compare(plain, ours, **options)
