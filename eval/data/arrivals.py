"""Arrival times of requests: Poisson, at rates that change in steps, or a trace of a real service."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ragorder.common.jsonl import JSONLines
from ragorder.errors import RagorderError

_AZURE_COLUMNS = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_MOONCAKE_EXAMPLE = '{"timestamp": 27, "output_length": 500}'
_POISSON = "poisson:"
_STEPS = "steps:"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class ArrivalsError(RagorderError, ValueError):
    """Arrival times are not available. The message says where and what to change."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A time, from the first request or step, and the length of the answer, if known."""

    at_s: float
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ArrivalStep:
    """`requests` at random times within `seconds`."""

    requests: int
    seconds: float


@dataclass(frozen=True)
class Arrivals:
    """A Poisson process of `rate` requests a second, or `steps` or a `trace`, played `time_scale` times as fast. Each
    arrival of a trace stands for `replicas` requests."""

    name: str
    rate: float = 0.0
    trace: Sequence[Arrival] = ()
    time_scale: float = 1.0
    replicas: int = 1
    steps: Sequence[ArrivalStep] = ()

    @classmethod
    def parse(cls, text: str, *, time_scale: float = 1.0, replicas: int = 1) -> Arrivals:
        """From "poisson:2.5", requests a second, "steps:4@20m,8@20m", requests a minute and for how long, or the path
        of a trace. Raises ArrivalsError."""
        if not (math.isfinite(time_scale) and time_scale > 0 and replicas > 0):
            raise ArrivalsError("--time-scale and --replicas must be positive")
        if text.startswith(_STEPS):
            if replicas != 1:
                raise ArrivalsError("--replicas play a trace: with steps choose other rates")
            return cls(text, steps=_read_steps(text), time_scale=time_scale)
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
        """None: unbounded."""
        return len(self.trace) * self.replicas + sum(step.requests for step in self.steps) or None

    @property
    def output_tokens_mean(self) -> int | None:
        known = [arrival.output_tokens for arrival in self.trace if arrival.output_tokens is not None]
        return round(sum(known) / len(known)) if known else None

    def draw(self, count: int, seed: int) -> list[Arrival]:
        """Raises ArrivalsError if trace or steps have fewer."""
        if self.count is None:
            return poisson_arrivals(self.rate, count, seed)
        if count > self.count:
            raise ArrivalsError(f"{self.name} has {self.count:,} arrivals: lower --limit ({count:,})")
        arrivals = step_arrivals(self.steps, seed) if self.steps else self._of_trace(count, seed)
        return [replace(each, at_s=each.at_s / self.time_scale) for each in arrivals[:count]]

    def _of_trace(self, count: int, seed: int) -> Sequence[Arrival]:
        # The arrivals of one gap lie before all of the next: no other can be among the first.
        needed = self.trace[: -(-count // self.replicas) + 1]
        return replicate(needed, self.replicas, seed) if self.replicas > 1 else needed


def poisson_arrivals(rate: float, count: int, seed: int) -> list[Arrival]:
    """The first at 0."""
    rng = random.Random(f"poisson {seed}")
    at_s = 0.0
    arrivals = []
    for _ in range(count):
        arrivals.append(Arrival(at_s))
        at_s += rng.expovariate(rate)
    return arrivals


def step_arrivals(steps: Sequence[ArrivalStep], seed: int) -> list[Arrival]:
    """All of them, sorted: in each step a Poisson process whose number of requests is given."""
    rng = random.Random(f"steps {seed}")
    times: list[float] = []
    start_s = 0.0
    for step in steps:
        times += sorted(start_s + step.seconds * rng.random() for _ in range(step.requests))
        start_s += step.seconds
    return [Arrival(at_s) for at_s in times]


def replicate(arrivals: Sequence[Arrival], replicas: int, seed: int) -> list[Arrival]:
    """Each arrival, and `replicas` - 1 more at random times before the next, sorted. The last gap is the mean one."""
    rng = random.Random(f"replicas {seed}")
    gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    gaps.append(sum(gaps) / len(gaps) if gaps else 0.0)
    spread = []
    for arrival, gap in zip(arrivals, gaps, strict=True):
        spread.append(arrival)
        spread += [replace(arrival, at_s=arrival.at_s + gap * rng.random()) for _ in range(replicas - 1)]
    return sorted(spread, key=lambda each: each.at_s)


def _read_steps(text: str) -> list[ArrivalStep]:
    steps = []
    for part in text.removeprefix(_STEPS).split(","):
        rate_text, _, time_text = part.strip().partition("@")
        try:
            rate, seconds = float(rate_text), float(time_text[:-1]) * _SECONDS[time_text[-1:]]
        except (ValueError, KeyError):
            rate = seconds = 0.0
        if not (0 <= rate < math.inf and 0 < seconds < math.inf):
            raise ArrivalsError(
                f"{part!r} is no step: give requests a minute and a time in s, m or h, such as steps:4@20m,8@20m"
            )
        steps.append(ArrivalStep(round(rate * seconds / 60), seconds))
    if not any(step.requests for step in steps):
        raise ArrivalsError(f"{text!r} has no requests: raise its rates, or make its steps longer")
    return steps


class MooncakeLine(BaseModel):
    """A request of Mooncake's traces: milliseconds, and the length of its answer."""

    model_config = ConfigDict(strict=True)

    timestamp: float
    output_length: int | None = Field(None, ge=0)


def load_arrivals(path: Path) -> list[Arrival]:
    """The arrivals of a file, sorted, the first at 0: CSV of Azure's LLM inference traces, or JSON lines of Mooncake's.
    Raises ArrivalsError naming file and line."""
    lines = JSONLines(path, error=ArrivalsError, example=_MOONCAKE_EXAMPLE)
    first = next((line for _, line in lines), b"")
    times = list((_read_mooncake if first.lstrip().startswith(b"{") else _read_azure)(lines))
    if not times:
        raise ArrivalsError(f"{path}: no arrivals in it")
    times.sort(key=lambda each: each[0])
    start = times[0][0]
    return [Arrival(at_s - start, output_tokens) for at_s, output_tokens in times]


def _read_azure(lines: JSONLines) -> Iterator[tuple[float, int | None]]:
    rows = iter(lines)
    number, header = next(rows, (1, b""))
    if header.strip() != _AZURE_COLUMNS:
        raise lines.error(number, f"expected the columns {_AZURE_COLUMNS.decode()}, or JSON lines")
    start: datetime | None = None
    for number, row in rows:
        try:
            timestamp, _, output_tokens = row.decode("utf-8").strip().split(",")
            time = datetime.fromisoformat(timestamp)
            start = start or time
            yield (time - start).total_seconds(), _length(int(output_tokens))
        except (ValueError, TypeError):
            raise lines.error(number, "expected a line such as 2023-11-16 18:15:46.68,374,44") from None


def _read_mooncake(lines: JSONLines) -> Iterator[tuple[float, int | None]]:
    for _, line in lines.read(MooncakeLine):
        yield line.timestamp / 1e3, line.output_length


def _length(tokens: int) -> int:
    if tokens < 0:
        raise ValueError("no length")
    return tokens
