"""Conditions that come true in another task, thread or process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually", "turns", "until"]


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
