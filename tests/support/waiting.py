"""Time in tests: conditions that come true elsewhere, and a clock that no other process disturbs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """Count the lines of Python that run, also those of loops inside comprehensions."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def eventually(condition: Callable[[], Any], seconds: float = 60) -> bool:
    """Whether it comes true in this time; the clock decides nothing else."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def until(condition: Callable[[], Any], pause_s: float = 0.0) -> None:
    """Let other tasks run until it is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(pause_s)


async def turns(count: int) -> None:
    """Let the event loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)
