"""What must not be done while the garbage collector runs, and is done after it.

The collector runs wherever memory is asked for, and with it finalisers and the `finally` of dropped generators: in a
thread that may hold any lock, of this package or of another (a Prometheus counter's, a connection pool's). What takes
such a lock waits until the next call of this package.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

__all__ = ["catch_up", "is_collecting", "waiting", "when_collected", "when_next"]

_logger = logging.getLogger("ragorder")


waiting: deque[Callable[[], object]] = deque()


# The phase that came last stands last. The callback is C from end to end: an interrupt that comes while the collector
# runs (Ctrl-C) would be raised in the first line of one in Python, and the collector would swallow it.
_phases: Any = OrderedDict.fromkeys(("start", "stop"))
gc.callbacks.append(_phases.move_to_end)
if hasattr(os, "register_at_fork"):
    # What the parent has put off is the parent's: a connection that the child closed would be broken there.
    os.register_at_fork(after_in_child=waiting.clear)


def is_collecting() -> bool:
    """Whether the garbage collector is running, in this thread or, which is rare, in another."""
    phase: str = next(reversed(_phases))
    return phase == "start"


def when_collected(work: Callable[[], object]) -> None:
    """Do the work now; while the collector runs, put it off to the next call of `catch_up`."""
    if is_collecting():
        waiting.append(work)
    else:
        work()


def when_next(work: Callable[[], object]) -> None:
    """Put the work off to the next call of `catch_up`."""
    waiting.append(work)


def catch_up() -> None:
    """Do what was put off. Raises nothing: it is not the caller's work."""
    while waiting and not is_collecting():
        try:
            work = waiting.popleft()
        except IndexError:
            return
        try:
            work()
        except Exception as error:
            _logger.warning("what a dropped request had left to do failed with %s", type(error).__name__)
