"""Conditions that come true in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually"]


def eventually(condition: Callable[[], Any], seconds: float = 60) -> bool:
    """Whether it comes true in this time; the clock decides nothing else."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
