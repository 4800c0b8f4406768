"""Two clocks: what a caller waits, and what the processor did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["threads", "timed"]

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float, float]:
    """What a call gives, the wall time that it took and the CPU time of all threads of this process, in ms. On a busy
    machine the CPU time is the better one of the two; on a GPU it says nothing."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    given = call()
    return given, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads compute while the block lasts. With more than one CPU time is no measure of time, as threads that
    wait for others count as busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
