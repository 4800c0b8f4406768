"""Calls given to a pool of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")


def submit_all(
    pool: ProcessPoolExecutor, function: Callable[..., T], calls: Iterable[tuple[Any, ...]]
) -> list[Future[T]]:
    """Submit a call with each tuple of arguments. Raises BrokenProcessPool, also if a process ends meanwhile."""
    try:
        return [pool.submit(function, *arguments) for arguments in calls]
    except (OSError, ValueError) as error:
        # The pool starts processes one by one. One that ended has closed the pool's pipes: they are lacking, or others
        # have their numbers.
        raise BrokenProcessPool from error
