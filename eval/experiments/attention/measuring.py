"""One problem, all contenders: each result is held against the reference before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ragorder.eval.experiments.attention.contenders import Contender, MissingError
from ragorder.eval.experiments.attention.shapes import Problem, Shape, make_problem
from ragorder.kernels.attention.table import architecture, choose_splits, choose_tile

__all__ = ["TOLERANCE", "Row", "measure", "reference", "splits_of"]

TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.6e-2}
"""How far a number may be from the reference, above 1 relative to it."""

_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one contender. `missing` says why it was not there, `error` how far off it was at most; `ms` are
    all its times, none where it is missing or wrong, or there is no GPU."""

    shape: Shape
    contender: str
    missing: str | None = None
    error: float | None = None
    ms: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing speaks against it."""
        return self.error is None or self.error <= TOLERANCE[self.shape.dtype]

    @property
    def median_ms(self) -> float | None:
        """Of its times."""
        return median(self.ms) if self.ms else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of what the mask leaves."""
        return None if self.median_ms is None else self.shape.flops / self.median_ms / 1e9

    @property
    def gbytes(self) -> float | None:
        """GB/s, if each byte is moved once."""
        return None if self.median_ms is None else self.shape.bytes / self.median_ms / 1e6

    def as_json(self) -> dict[str, Any]:
        """Everything, with the medians."""
        return {
            **{name: getattr(self.shape, name) for name in self.shape.__dataclass_fields__},
            "contender": self.contender,
            "missing": self.missing,
            "error": self.error,
            "right": self.right,
            "median_ms": self.median_ms,
            "tflops": self.tflops,
            "gbytes": self.gbytes,
            "ms": self.ms,
        }


def measure(
    shape: Shape, contenders: Sequence[Contender], *, device: torch.device, repeats: int, seed: int
) -> Iterator[Row]:
    """A row for each contender, in their order. On a CPU nothing is timed."""
    problem = make_problem(shape, device, seed)
    wanted = reference(problem)
    for contender in contenders:
        try:
            run = contender.prepare(problem)
            found = run()
        except (MissingError, RuntimeError, NotImplementedError) as error:
            yield Row(shape, contender.name, missing=_first_line(error))
            continue
        row = Row(shape, contender.name, error=_error(found, wanted))
        if row.right and device.type == "cuda":
            row.ms.extend(_time(run, device, repeats))
        yield row


def splits_of(shape: Shape, device: torch.device) -> int:
    """How the table splits it there; 1 without a GPU."""
    if device.type != "cuda":
        return 1
    family = architecture(torch.cuda.get_device_capability(device))
    group = shape.heads // shape.kv_heads
    itemsize = 4 if shape.dtype == "fp32" else 2
    tile = choose_tile(family, shape.head_dim, itemsize, shape.query * group)
    programs = (shape.batch * shape.query * group // tile.rows + shape.batch) * shape.kv_heads
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return choose_splits(programs, shape.context + shape.query, multiprocessors)


def reference(problem: Problem) -> Tensor:
    """softmax(q k / sqrt(d)) v in double precision, (tokens, query heads, D): nothing of ours is in it."""
    shape = problem.shape
    q = problem.queries().unflatten(1, (shape.kv_heads, -1))
    k, v = problem.gather()
    hidden = torch.ones(shape.query, k.shape[2], dtype=torch.bool, device=q.device).triu(shape.context + 1)
    found = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for row, head in product(range(shape.batch), range(shape.kv_heads)):
        scores = q[row, head].double() @ k[row, head].double().T / math.sqrt(shape.head_dim)
        found[row, head] = scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v[row, head].double()
    return found.flatten(1, 2).transpose(1, 2).reshape(problem.q.shape)


def _error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.reshape(wanted.shape).double() - wanted).abs() / wanted.abs().clamp(min=1)
    return float(torch.nan_to_num(difference, nan=math.inf).max())


def _time(run: Callable[[], Tensor], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds on the device, each from a cold L2."""
    flush = _flush(device)
    for _ in range(_WARM_UP):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in events]


@lru_cache
def _flush(device: torch.device) -> Tensor:
    """Four times the L2 is surely more than it holds."""
    size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 28)
    return torch.empty(size, dtype=torch.int8, device=device)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines and not isinstance(error, MissingError) else str(error)
