"""Arrival times of requests: Poisson, or recorded in a trace of a real service."""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

__all__ = ["Arrival", "Arrivals", "ArrivalsError", "load_arrivals", "poisson_arrivals", "replicate"]

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_POISSON = "poisson:"


class ArrivalsError(ValueError):
    """Arrival times cannot be had as asked. The message says what to change, for a line of a file also where."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request arrives `at_s` seconds after the first one. `output_tokens` is the length of its answer, if known."""

    at_s: float
    output_tokens: int | None = None


@dataclass(frozen=True)
class Arrivals:
    """Where arrival times come from: `rate` requests a second at random (Poisson), or a `trace`.

    A trace is played `time_scale` times as fast, and each of its arrivals stands for `replicas` requests.
    """

    name: str
    rate: float = 0.0
    trace: Sequence[Arrival] = ()
    time_scale: float = 1.0
    replicas: int = 1

    @classmethod
    def parse(cls, text: str, *, time_scale: float = 1.0, replicas: int = 1) -> Arrivals:
        """From "poisson:2.5" or the path of a trace (see `load_arrivals`). Raises ArrivalsError."""
        if not (math.isfinite(time_scale) and time_scale > 0 and replicas > 0):
            raise ArrivalsError("--time-scale and --replicas must be positive")
        if not text.startswith(_POISSON):
            path = Path(text)
            return cls(path.name, trace=load_arrivals(path), time_scale=time_scale, replicas=replicas)
        if (time_scale, replicas) != (1, 1):
            raise ArrivalsError("--time-scale and --replicas play a trace: with poisson choose another rate")
        try:
            rate = float(text.removeprefix(_POISSON))
        except ValueError:
            rate = 0.0
        if not (math.isfinite(rate) and rate > 0):
            raise ArrivalsError(f"{text!r} names no rate: give requests per second, such as poisson:2.5")
        return cls(text, rate=rate)

    @property
    def count(self) -> int | None:
        """How many requests arrive; None: as many as one asks for."""
        return len(self.trace) * self.replicas or None

    @property
    def output_tokens_mean(self) -> int | None:
        """The mean length of an answer, if the trace knows it."""
        known = [arrival.output_tokens for arrival in self.trace if arrival.output_tokens is not None]
        return round(sum(known) / len(known)) if known else None

    def draw(self, count: int, seed: int) -> list[Arrival]:
        """The first `count` arrivals in order of time. Raises ArrivalsError if the trace has fewer."""
        if not self.trace:
            return poisson_arrivals(self.rate, count, seed)
        if count > len(self.trace) * self.replicas:
            raise ArrivalsError(f"{self.name} has {self.count:,} arrivals: lower --limit ({count:,})")
        # The arrivals of one gap lie before all of the next: no other can be among the first.
        needed = self.trace[: -(-count // self.replicas) + 1]
        arrivals = replicate(needed, self.replicas, seed) if self.replicas > 1 else needed
        return [replace(each, at_s=each.at_s / self.time_scale) for each in arrivals[:count]]


def poisson_arrivals(rate: float, count: int, seed: int) -> list[Arrival]:
    """So many arrivals of a Poisson process of `rate` requests a second, the first at 0."""
    rng = random.Random(f"poisson {seed}")
    at_s = 0.0
    arrivals = []
    for _ in range(count):
        arrivals.append(Arrival(at_s))
        at_s += rng.expovariate(rate)
    return arrivals


def replicate(arrivals: Sequence[Arrival], replicas: int, seed: int) -> list[Arrival]:
    """Each arrival at its time and `replicas` - 1 times more, at random before the next one; sorted.

    The gap behind the last arrival is as long as the mean one.
    """
    rng = random.Random(f"replicas {seed}")
    gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    gaps.append(sum(gaps) / len(gaps) if gaps else 0.0)
    spread = []
    for arrival, gap in zip(arrivals, gaps, strict=True):
        spread.append(arrival)
        spread += [replace(arrival, at_s=arrival.at_s + gap * rng.random()) for _ in range(replicas - 1)]
    return sorted(spread, key=lambda each: each.at_s)


def load_arrivals(path: Path) -> list[Arrival]:
    """The arrivals of a trace file, plain or gzipped, sorted, the first at 0.

    CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure's LLM inference traces), or JSON lines with
    `timestamp` in milliseconds and, if known, `output_length` (Mooncake's). Raises ArrivalsError naming file and line.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ArrivalsError(f"{path}: cannot be read ({error})") from None
    parse = _parse_json if lines and lines[0][1].lstrip().startswith("{") else _parse_csv
    times: list[tuple[float, int | None]] = list(parse(lines, path))
    if not times:
        raise ArrivalsError(f"{path}: no arrivals in it")
    times.sort(key=lambda each: each[0])
    first = times[0][0]
    return [Arrival(at_s - first, output_tokens) for at_s, output_tokens in times]


_Lines = Iterable[tuple[int, str]]


def _parse_csv(lines: _Lines, path: Path) -> Iterator[tuple[float, int | None]]:
    rows = ((number, line.strip().split(",")) for number, line in lines)
    number, header = next(rows, (1, [""]))
    if tuple(header) != _AZURE_COLUMNS:
        raise ArrivalsError(f"{path}:{number}: expected the columns {','.join(_AZURE_COLUMNS)}, or JSON lines")
    start: datetime | None = None
    for number, row in rows:
        try:
            timestamp, _, output_tokens = row
            time = datetime.fromisoformat(timestamp)
            start = start or time
            yield (time - start).total_seconds(), _length(int(output_tokens))
        except (ValueError, TypeError):
            raise ArrivalsError(f"{path}:{number}: expected a line such as 2023-11-16 18:15:46.68,374,44") from None


def _parse_json(lines: _Lines, path: Path) -> Iterator[tuple[float, int | None]]:
    for number, line in lines:
        try:
            fields = json.loads(line)
            output_tokens = fields.get("output_length")
            at_s = float(fields["timestamp"]) / 1e3
            if not math.isfinite(at_s):
                raise ValueError("no time")
            yield at_s, None if output_tokens is None else _length(int(output_tokens))
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            example = '{"timestamp": 27, "output_length": 500}'
            raise ArrivalsError(f"{path}:{number}: expected a line such as {example}") from None


def _length(tokens: int) -> int:
    if tokens < 0:
        raise ValueError("no length")
    return tokens
