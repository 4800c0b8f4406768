"""Prefill times T(cached, new), measured on a grid and interpolated (RAGCache 5.1)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

from ragorder.common.jsonl import decode

__all__ = ["LINEAR", "PrefillProfile"]

_FORMAT = "ragorder-prefill-profile"
_VERSION = 1
# The largest count that a float represents exactly.
_MOST_TOKENS = 1 << 53
_LONGEST_S = 1e6
_TIERS = ("host", "disk")
_MEASURE = "measure one with `ragorder profile`"


@dataclass(frozen=True)
class PrefillProfile:
    """Seconds to prefill `new_tokens` after `cached_tokens`, on an ascending grid, a row per `cached_tokens`.

        profile = PrefillProfile.from_file("profile.json")
        profile(cached_tokens=2048, new_tokens=512)  # seconds

    Bilinear inside the grid, linear outside, never falling or negative. `loads`: seconds to load a cached token to the
    device from "host" (default 0) and "disk" (default: as the host). Raises ValueError for an invalid grid, falling
    times, or invalid loads.
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    loads: Mapping[str, float] = field(default_factory=dict, hash=False)
    _beyond_new: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _below_new: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _beyond_cached: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_grid(self.cached_tokens, self.new_tokens, self.seconds)
        _check_loads(self.loads)
        columns = list(zip(*self.seconds, strict=True))
        for before, after in (pair for times in [*self.seconds, *columns] for pair in pairwise(times)):
            if after < before:
                raise ValueError(
                    f"the seconds fall from {before:g} to {after:g} though tokens are added: measure again with more "
                    "--repeats, or make the profile with PrefillProfile.measured, which smooths noise"
                )
        # Slopes from the origin to the first time, then between times.
        rows = [_slopes((0, *self.new_tokens), (0.0, *row)) for row in self.seconds]
        along = [_slopes(self.cached_tokens, column) for column in columns]
        # Without the running maximum and minimum, lines would cross outside the grid.
        self._set("_beyond_new", accumulate((slopes[-1] for slopes in rows), max))
        self._set("_below_new", accumulate((min(slopes[:2]) for slopes in rows), min))
        self._set("_beyond_cached", accumulate((slopes[-1] if slopes else 0.0 for slopes in along), max))

    def _set(self, name: str, slopes: Iterable[float]) -> None:
        object.__setattr__(self, name, tuple(slopes))

    def __call__(self, cached_tokens: int, new_tokens: float) -> float:
        cached = min(max(cached_tokens, 0), _MOST_TOKENS)
        new = min(max(new_tokens, 0), _MOST_TOKENS)
        row, down = _place(self.cached_tokens, cached)
        column, right = _place(self.new_tokens, new)
        seconds = _at(self.seconds[row], column, right)
        if down:
            seconds += down * (_at(self.seconds[row + 1], column, right) - seconds)
        if new > self.new_tokens[-1]:
            seconds += (new - self.new_tokens[-1]) * _at(self._beyond_new, row, down)
        elif new < self.new_tokens[0]:
            seconds -= (self.new_tokens[0] - new) * _at(self._below_new, row, down)
        if cached > self.cached_tokens[-1]:
            seconds += (cached - self.cached_tokens[-1]) * _at(self._beyond_cached, column, right)
        return max(0.0, seconds)

    def with_loads(self, cached_tokens: int, new_tokens: float, host_tokens: int, disk_tokens: int) -> float:
        host_s = self.loads.get("host", 0.0)
        return self(cached_tokens, new_tokens) + host_tokens * host_s + disk_tokens * self.loads.get("disk", host_s)

    def cost(self, cached_tokens: int, new_tokens: int) -> float:
        new = min(max(new_tokens, 1), _MOST_TOKENS)
        return self(cached_tokens, new) / new

    @classmethod
    def measured(
        cls,
        cached_tokens: Sequence[int],
        new_tokens: Sequence[int],
        seconds: Sequence[Sequence[float]],
        facts: Mapping[str, Any] | None = None,
        loads: Mapping[str, float] | None = None,
    ) -> Self:
        """Make a profile of times, pooled where noise makes them fall (isotonic, rows then columns)."""
        _check_grid(cached_tokens, new_tokens, seconds)
        columns = [_pool(column) for column in zip(*map(_pool, seconds), strict=True)]
        # The running maximum removes rounding errors of equal means.
        pooled: list[tuple[float, ...]] = []
        least: Sequence[float] = [0.0] * len(new_tokens)
        for row in zip(*columns, strict=True):
            least = tuple(accumulate(map(max, least, row), max))
            pooled.append(least)
        pairs = [pair for rows in zip(seconds, pooled, strict=True) for pair in zip(*rows, strict=True)]
        changes = [(abs(after - before), before) for before, after in pairs if after != before]
        size = {
            "cells": len(changes),
            "largest_s": max((change for change, _ in changes), default=0.0),
            "largest_share": max((change / before for change, before in changes if before), default=0.0),
        }
        return cls(
            tuple(cached_tokens), tuple(new_tokens), tuple(pooled), {**(facts or {}), "pooled": size}, loads or {}
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "cached_tokens": list(self.cached_tokens),
            "new_tokens": list(self.new_tokens),
            "seconds": [list(row) for row in self.seconds],
            **({"load_s_per_token": dict(self.loads)} if self.loads else {}),
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(f"this is not a prefill profile ({_FORMAT}): {_MEASURE}")
        if value.get("version") != _VERSION:
            raise ValueError(
                f"the profile has version {value.get('version')!r}, but this ragorder reads {_VERSION}: {_MEASURE}"
            )
        cached, new, seconds = (value.get(name) for name in ("cached_tokens", "new_tokens", "seconds"))
        rows = seconds if isinstance(seconds, list) else [seconds]
        if not all(isinstance(each, list) for each in [cached, new, *rows]):
            raise ValueError(
                "cached_tokens and new_tokens must be lists of token counts, and seconds a list of rows, one for each "
                f"of cached_tokens: {_MEASURE}"
            )
        facts = value.get("facts", {})
        if not isinstance(facts, dict):
            raise ValueError("facts must be an object with facts about the measurement: leave it out if there are none")
        loads = value.get("load_s_per_token", {})
        if not isinstance(loads, dict):
            raise ValueError("load_s_per_token must be an object with seconds by tier: leave it out if there are none")
        return cls(tuple(cached or ()), tuple(new or ()), tuple(map(tuple, rows)), facts, loads)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a profile; ValueErrors name the file."""
        try:
            value = decode(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}: give a readable profile, or {_MEASURE}") from None
        except ValueError:
            raise ValueError(f"{path}: this is not JSON: {_MEASURE}") from None
        try:
            return cls.from_json(value)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_file(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", "utf-8")


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    index = bisect_right(axis, value) - 1
    if index < 0:
        return 0, 0.0
    if index == len(axis) - 1:
        return index, 0.0
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def _at(values: Sequence[float], index: int, share: float) -> float:
    value = values[index]
    return value + share * (values[index + 1] - value) if share else value


def _slopes(axis: Sequence[int], values: Sequence[float]) -> list[float]:
    points = zip(axis, values, strict=True)
    return [(after - before) / (end - start) for (start, before), (end, after) in pairwise(points)]


def _pool(values: Sequence[float]) -> list[float]:
    # The nearest ascending values, by least squares.
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (size * before + count * mean) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _check_grid(cached_tokens: Sequence[int], new_tokens: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
    for name, axis, least in (("cached_tokens", cached_tokens, 0), ("new_tokens", new_tokens, 1)):
        counts = axis and all(type(count) is int and least <= count <= _MOST_TOKENS for count in axis)
        if not counts or any(after <= before for before, after in pairwise(axis)):
            raise ValueError(f"{name} must be one or more ascending whole numbers of tokens, {least} or more")
    if len(seconds) != len(cached_tokens) or any(len(row) != len(new_tokens) for row in seconds):
        raise ValueError(
            f"seconds must have a row for each of the {len(cached_tokens)} cached_tokens, with a time for each of the "
            f"{len(new_tokens)} new_tokens"
        )
    if not all(type(time) in (int, float) and 0 <= time <= _LONGEST_S for row in seconds for time in row):
        raise ValueError(f"seconds must be numbers from 0 to {_LONGEST_S:,.0f}")


def _check_loads(loads: Mapping[str, float]) -> None:
    if unknown := [tier for tier in loads if tier not in _TIERS]:
        raise ValueError(f"load_s_per_token names {unknown[0]!r}: the tiers are {' and '.join(_TIERS)}")
    if not all(type(time) in (int, float) and 0 <= time <= _LONGEST_S for time in loads.values()):
        raise ValueError(f"load_s_per_token must be numbers of seconds from 0 to {_LONGEST_S:,.0f}")


LINEAR = PrefillProfile((0,), (1,), ((50e-6,),), {"engine": "assumed, not measured"})
"""Default without a profile; with it PGDSF equals GDSF up to rounding."""
