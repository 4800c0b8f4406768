"""Errors and times of attention. Results are held against the reference before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from ragorder.benchmarks.kernels.attention.cells import TOLERANCE
from ragorder.benchmarks.kernels.attention.contenders import (
    CONTENDERS,
    AttentionProblem,
    AttentionShape,
    Compute,
    MissingError,
    make_problem,
)
from ragorder.kernels.attention.table import SCATTERED_ROWS, architecture, choose_splits, choose_tile, count_programs

_WARM_UP = 5


def measure(
    shape: AttentionShape, names: Sequence[str], *, device: torch.device, repeats: int, seed: int
) -> Iterator[tuple[str, tuple[float, list[float]] | MissingError]]:
    """Each contender's greatest error and times in ms, none on a CPU or for a wrong result; or why it is missing."""
    problem = make_problem(shape, device, seed)
    wanted = reference(problem)
    for name in names:
        try:
            compute = CONTENDERS[name](problem)
            error = _error(compute(), wanted)
        except MissingError as missing:
            yield name, missing
        except (RuntimeError, NotImplementedError) as raised:
            line = next(iter(str(raised).strip().splitlines()), "")
            yield name, MissingError(f"{type(raised).__name__}: {line}")
        else:
            timed = repeats and error <= TOLERANCE[shape.dtype] and device.type == "cuda"
            yield name, (error, _time(compute, device, repeats) if timed else [])


def splits_of(shape: AttentionShape, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    family = architecture(torch.cuda.get_device_capability(device))
    group = shape.heads // shape.kv_heads
    itemsize = 4 if shape.dtype == "fp32" else 2
    rows = shape.query * group
    tile = choose_tile(family, shape.head_dim, itemsize, min(rows, SCATTERED_ROWS) if shape.scattered else rows)
    programs = count_programs(tile, shape.batch * shape.query, shape.batch, group, shape.kv_heads)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return choose_splits(tile, programs, shape.total, multiprocessors)


def reference(problem: AttentionProblem) -> Tensor:
    """softmax(q k / sqrt(d)) v in double precision, (tokens, query heads, D)."""
    shape = problem.shape
    q = problem.queries().unflatten(1, (shape.kv_heads, -1))
    k, v = problem.gather()
    hidden = ~problem.seen()
    found = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for row, head in product(range(shape.batch), range(shape.kv_heads)):
        scores = q[row, head].double() @ k[row, head].double().T / math.sqrt(shape.head_dim)
        found[row, head] = scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v[row, head].double()
    return found.flatten(1, 2).transpose(1, 2).reshape(problem.q.shape)


def _error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.reshape(wanted.shape).double() - wanted).abs() / wanted.abs().clamp(min=1)
    return float(torch.nan_to_num(difference, nan=math.inf).max())


def _time(compute: Compute, device: torch.device, repeats: int) -> list[float]:
    # Each from a cold L2.
    flush = _flush(device)
    for _ in range(_WARM_UP):
        compute()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        compute()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in events]


@lru_cache
def _flush(device: torch.device) -> Tensor:
    # Four times the L2 is surely more than it holds.
    size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 28)
    return torch.empty(size, dtype=torch.int8, device=device)
