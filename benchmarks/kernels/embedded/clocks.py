"""Wall time and CPU time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["threads", "timed"]

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float, float]:
    """A call's result, wall time and CPU time of this process in ms."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    given = call()
    return given, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Threads of torch. With more than one, CPU time is no measure: waiting threads count as busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
