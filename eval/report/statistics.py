"""Statistics: summaries, and paired differences with bootstrap confidence intervals.

Requests are resampled with the figures of both policies on them. Blocks of up to `BLOCK` consecutive requests are
drawn, since neighbours are alike, within each seed: three seeds are too few to be resampled, so an interval speaks of
traces like these, and `PairedDifference.by_seed` stands beside it.

Few blocks in a seed make a stratified bootstrap too narrow, by sqrt(1 - 1/blocks): the interval is widened by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from ragorder.common.extras import needs
from ragorder.errors import RagorderError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

BLOCK = 10
"""Consecutive requests that are resampled together; fewer in a short run, which has at least five blocks."""

Verdict = Literal["better", "worse", "no difference"]
Statistic = Literal["mean", "p50", "p95", "p99"]

_BATCH = 250
_CONFIDENCE = 0.95


class StatisticsError(RagorderError, ValueError):
    """Figures cannot be compared. The message says why."""


@dataclass(frozen=True, slots=True)
class Summary:
    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """`value` less `baseline`, in their unit or, if `relative`, as a share of the baseline (-0.2: a fifth less), with
    its interval (-inf to inf: too few requests) and by seed."""

    baseline: float
    value: float
    difference: float
    low: float
    high: float
    verdict: Verdict
    relative: bool
    requests: int
    by_seed: tuple[float, ...]

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def need_scipy() -> Any:
    """scipy.stats. Raises ImportError naming the extra."""
    with needs("eval", "a confidence interval"):
        from scipy import stats  # type: ignore[import-untyped]
    return stats


def summary(values: Sequence[float] | Floats) -> Summary | None:
    """Of the finite values; None without any."""
    import numpy as np

    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if not known.size:
        return None
    p50, p95, p99 = np.quantile(known, (0.5, 0.95, 0.99))
    return Summary(int(known.size), float(known.mean()), float(p50), float(p95), float(p99))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count`."""
    z2 = 1.959964**2 / count
    middle, reach = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - reach) / (1 + z2)), min(1.0, (middle + reach) / (1 + z2))


def known_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def compare(
    baseline: Sequence[Sequence[float] | Floats],
    ours: Sequence[Sequence[float] | Floats],
    *,
    of: tuple[Sequence[Sequence[float] | Floats], Sequence[Sequence[float] | Floats]] | None = None,
    statistic: Statistic = "mean",
    relative: bool = False,
    better: Literal["higher", "lower"] = "higher",
    resamples: int = 2_000,
    seed: int = 0,
) -> PairedDifference:
    """A statistic of `ours` compared with that of `baseline`. Each is one sequence a seed, request by request, without
    the warm-up; a request with NaN on either side is left out. `of` makes the mean a share: sum of the figures by sum
    of these, for the baseline and for ours. Raises StatisticsError for other seeds or requests, ImportError naming the
    extra."""
    import numpy as np

    if of is not None and statistic != "mean":
        raise StatisticsError(f"a share has no {statistic}: use statistic='mean'")
    strata = _strata(baseline, ours, of)
    blocks_of_seeds = [stratum.shape[1] for stratum in strata]
    requests = sum(int(np.isfinite(stratum[0]).sum()) for stratum in strata)
    measure: Callable[[list[Any]], tuple[Any, Any]] = partial(_quantiles, statistic=statistic)
    if statistic == "mean":
        strata, measure = [np.nansum(stratum, axis=-1, keepdims=True) for stratum in strata], _means

    def difference(*blocks: Any, axis: int = -1) -> Any:
        return _difference(*measure([stratum[..., index, :] for stratum, index in zip(strata, blocks, strict=True)]))

    def _difference(plain: Any, changed: Any) -> Any:
        if not relative:
            return changed - plain
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(changed / plain)

    plain, changed = (float(value) for value in measure(strata))
    if relative and min(plain, changed) <= 0:
        raise StatisticsError("a relative difference needs figures above zero")
    by_seed = tuple(float(_difference(*measure([stratum]))) for stratum in strata)
    middle = float(_difference(plain, changed))
    low, high = _interval(difference, blocks_of_seeds, middle, resamples, seed)
    verdict = _verdict(middle, low, high, better)
    if relative:
        middle, low, high, *by = (math.expm1(value) for value in (middle, low, high, *by_seed))
        by_seed = tuple(by)
    return PairedDifference(plain, changed, middle, low, high, verdict, relative, requests, by_seed)


def bootstrap(
    values: Sequence[float],
    statistic: Callable[..., Any],
    *,
    resamples: int,
    confidence: float = _CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float, float]:
    """A statistic of the values, such as `numpy.median`, and its percentile bootstrap interval."""
    import numpy as np

    stats = need_scipy()
    middle = float(statistic(values))
    if min(values) == max(values):
        # Every resample is the same, for which scipy has no interval.
        return middle, middle, middle
    low, high = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        statistic,
        n_resamples=resamples,
        batch=max(1, 2_000_000 // len(values)),
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return middle, float(low), float(high)


def compare_seeds(
    baseline: Sequence[float],
    ours: Sequence[float],
    *,
    relative: bool = False,
    better: Literal["higher", "lower"] = "higher",
) -> PairedDifference:
    """The mean difference of one figure a seed, with Student's interval. Raises as `compare`."""
    import numpy as np

    stats = need_scipy()
    if not baseline or len(baseline) != len(ours):
        raise StatisticsError("the two have not been measured with the same seeds")
    plain, changed = np.asarray(baseline, dtype=float), np.asarray(ours, dtype=float)
    if relative and min(plain.min(), changed.min()) <= 0:
        raise StatisticsError("a relative difference needs figures above zero")
    by_seed = np.log(changed / plain) if relative else changed - plain
    middle, low, high = float(by_seed.mean()), -math.inf, math.inf
    if len(by_seed) > 1:
        reach = stats.t.ppf((1 + _CONFIDENCE) / 2, len(by_seed) - 1) * by_seed.std(ddof=1) / math.sqrt(len(by_seed))
        low, high = middle - float(reach), middle + float(reach)
    verdict = _verdict(middle, low, high, better)
    by = tuple(map(float, by_seed))
    if relative:
        middle, low, high = (math.expm1(each) if math.isfinite(each) else each for each in (middle, low, high))
        by = tuple(map(math.expm1, by))
    return PairedDifference(
        float(plain.mean()), float(changed.mean()), middle, low, high, verdict, relative, len(plain), by
    )


def _verdict(middle: float, low: float, high: float, better: Literal["higher", "lower"]) -> Verdict:
    if low <= 0 <= high:
        return "no difference"
    return "better" if (middle > 0) == (better == "higher") else "worse"


def _interval(
    difference: Callable[..., Any], blocks: Sequence[int], middle: float, resamples: int, seed: int
) -> tuple[float, float]:
    import numpy as np

    stats = need_scipy()
    if min(blocks) < 2:
        return -math.inf, math.inf
    found = stats.bootstrap(
        tuple(np.arange(count) for count in blocks),
        difference,
        n_resamples=resamples,
        batch=_BATCH,
        vectorized=True,
        # Each sample numbers the blocks of one seed; the policies are paired in what the numbers stand for.
        paired=False,
        confidence_level=_CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    wider = math.sqrt(1 / (1 - len(blocks) / sum(blocks)))
    low, high = (middle + wider * (float(end) - middle) for end in found)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (-math.inf, math.inf)


def _strata(baseline: Any, ours: Any, of: Any) -> list[Any]:
    """For each seed an array (baseline, ours, of baseline, of ours) x block x request, filled up with NaN."""
    import numpy as np

    columns = [baseline, ours, *(of or ())]
    if len({len(column) for column in columns}) != 1:
        raise StatisticsError("the two have not been measured with the same seeds")
    strata = []
    for of_seed in zip(*columns, strict=True):
        rows = [np.asarray(values, dtype=float) for values in of_seed]
        if len({len(row) for row in rows}) != 1:
            raise StatisticsError("the two have not been measured on the same requests")
        if of is None:
            rows += [np.ones_like(rows[0])] * 2
        table = np.stack(rows)
        table[:, ~np.isfinite(table).all(axis=0)] = np.nan
        if np.isfinite(table[0]).any():
            strata.append(_blocks(table))
    if not strata:
        raise StatisticsError("the two have no request in common")
    return strata


def _blocks(table: Any) -> Any:
    import numpy as np

    requests = table.shape[1]
    length = min(BLOCK, max(1, requests // 5))
    blocks = max(1, round(requests / length))
    pieces = np.array_split(table, blocks, axis=1)
    pieces = [piece for piece in pieces if np.isfinite(piece[0]).any()]
    filled = np.full((len(table), len(pieces), max(piece.shape[1] for piece in pieces)), np.nan)
    for place, piece in enumerate(pieces):
        filled[:, place, : piece.shape[1]] = piece
    return filled


def _means(strata: list[Any]) -> tuple[Any, Any]:
    import numpy as np

    sums = np.sum([stratum.sum(axis=(-2, -1)) for stratum in strata], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[0] / sums[2], sums[1] / sums[3]


def _quantiles(strata: list[Any], statistic: Statistic) -> tuple[Any, Any]:
    share = float(statistic.removeprefix("p")) / 100
    return _quantile(strata, 0, share), _quantile(strata, 1, share)


def _quantile(strata: list[Any], side: int, share: float) -> Any:
    import numpy as np

    flat = np.concatenate([stratum[side].reshape(*stratum[side].shape[:-2], -1) for stratum in strata], axis=-1)
    flat = np.sort(flat, axis=-1)  # NaN comes last
    place = (np.isfinite(flat).sum(axis=-1) - 1) * share
    below = np.floor(place).astype(int)
    above = np.ceil(place).astype(int)
    lower = np.take_along_axis(flat, below[..., None], -1)[..., 0]
    upper = np.take_along_axis(flat, above[..., None], -1)[..., 0]
    return lower + (upper - lower) * (place - below)
