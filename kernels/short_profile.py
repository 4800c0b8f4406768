"""Prefill and load times, measured within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ragorder.trie.profile import PrefillProfile

LONGEST_TOKENS = 8_192
"""Longest measured prompt; longer ones are extrapolated linearly."""

PrefillTimes = Callable[[int, int], float]
"""Seconds of one prefill of (cached tokens, new tokens)."""

LoadTimes = Mapping[str, Callable[[], float]]
"""By tier, seconds of one load of a fixed number of tokens."""

_FIRST_NEW = 16
_FACTOR = 4
_ROUNDS = 5
# Cost of a row after cached tokens, with the prefix, relative to the row without: mostly attention.
_ROW = 4
# A longer prefill may take one of these parts of the time left, because it recurs in every row and round.
_PARTS = 8


def measure_short_profile(
    prefill_s: PrefillTimes,
    *,
    longest_tokens: int,
    block_size: int = 1,
    budget_s: float = 10.0,
    facts: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PrefillProfile:
    """Measure T(cached, new) as medians of up to five rounds; cached tokens are whole blocks. Leave out long prompts,
    cached prefixes and rounds that would exceed `budget_s`."""
    start = clock()

    def left_s() -> float:
        return budget_s - (clock() - start)

    room = max(1, min(longest_tokens, LONGEST_TOKENS))
    first: dict[tuple[int, int], float] = {}

    def spent_s(cached: int, new: int) -> float:
        before = clock()
        first[cached, new] = prefill_s(cached, new)
        return clock() - before

    # The very first prefill includes one-time set-up.
    new_tokens = [min(_FIRST_NEW, room)]
    spent_s(0, new_tokens[0])
    row_s = last_s = spent_s(0, new_tokens[0])
    growth = float(_FACTOR)
    for new in _series(_FIRST_NEW * _FACTOR, max(1, room // 2)):
        if growth * last_s * _PARTS > left_s():
            break
        before_s, last_s = last_s, spent_s(0, new)
        growth = min(max(2 * last_s / before_s, _FACTOR), _FACTOR**2) if before_s > 0 else _FACTOR
        row_s += last_s
        new_tokens.append(new)
    cached_tokens = [0]
    for cached in _prefixes(min(room - new_tokens[-1], new_tokens[-1]), block_size):
        if _ROW * row_s > left_s():
            break
        for new in new_tokens:
            spent_s(cached, new)
        cached_tokens.append(cached)
    times: dict[tuple[int, int], list[float]] = {cell: [] for cell in first}
    round_s = clock() - start
    for _ in range(_ROUNDS):
        if round_s > left_s():
            break
        before = clock()
        for cell, measured in times.items():
            measured.append(prefill_s(*cell))
        round_s = max(round_s, clock() - before)
    repeats = {cell: measured or [first[cell]] for cell, measured in times.items()}
    return _profile(
        cached_tokens, new_tokens, repeats, {"budget_s": budget_s, "took_s": clock() - start, **(facts or {})}
    )


def measure_short_loads(
    profile: PrefillProfile,
    load_s: LoadTimes,
    tokens: int,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> PrefillProfile:
    """Add each tier's load times, medians of up to five after a warm-up. Leave out a tier that raises OSError, or whose
    second load would exceed `budget_s`."""
    samples: dict[str, list[float]] = {}
    end_s = clock() + budget_s
    for tier, load in load_s.items():
        try:
            before_s = clock()
            load()
            took_s = clock() - before_s
            times: list[float] = []
            while len(times) < _ROUNDS and clock() + took_s <= end_s:
                times.append(load())
        except OSError:
            continue
        if times:
            samples[tier] = [seconds / tokens for seconds in times]
    facts = {"load_samples_s_per_token": samples, "load_tokens": tokens}
    loads = {tier: median(times) for tier, times in samples.items()}
    return replace(profile, loads=loads, facts={**profile.facts, **facts})


def _profile(
    cached_tokens: Sequence[int],
    new_tokens: Sequence[int],
    repeats: Mapping[tuple[int, int], Sequence[float]],
    facts: Mapping[str, Any],
) -> PrefillProfile:
    medians = [[median(repeats[cached, new]) for new in new_tokens] for cached in cached_tokens]
    spreads = [(max(each) - min(each)) / (median(each) or 1.0) for each in repeats.values()]
    measured = {
        "repeats": min(map(len, repeats.values())),
        "medians_s": medians,
        "spread_share": {"median": median(spreads), "largest": max(spreads)},
    }
    return PrefillProfile.measured(cached_tokens, new_tokens, medians, {**facts, **measured})


def _series(first: int, last: int) -> list[int]:
    series = []
    while first <= last:
        series.append(first)
        first *= _FACTOR
    # Two close lengths would only measure noise.
    return [*series, last] if series and last >= 2 * series[-1] else series


def _prefixes(last: int, block_size: int) -> list[int]:
    whole = [tokens // block_size * block_size for tokens in (last // _FACTOR, last)]
    return sorted({tokens for tokens in whole if tokens > 0})
