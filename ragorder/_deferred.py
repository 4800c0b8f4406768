"""Work that must not run inside the garbage collector.

The collector runs at any allocation, and with it finalisers and the `finally` of dropped generators: in a thread that
may hold any lock, of this package or of another (a Prometheus counter's, a connection pool's). Work that takes such a
lock is deferred to the next call of this package.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

__all__ = ["defer", "deferred", "is_collecting", "run_deferred", "run_or_defer"]

_logger = logging.getLogger("ragorder")


deferred: deque[Callable[[], object]] = deque()


# The last phase stands last. The callback is C throughout: an interrupt (Ctrl-C) during a collection would be raised in
# the first line of a Python callback, and the collector would swallow it.
_phases: Any = OrderedDict.fromkeys(("start", "stop"))
gc.callbacks.append(_phases.move_to_end)
if hasattr(os, "register_at_fork"):
    # The parent's deferred work stays the parent's: a connection that the child closed would be broken there.
    os.register_at_fork(after_in_child=deferred.clear)


def is_collecting() -> bool:
    """Whether the garbage collector is running, in this thread or, which is rare, in another."""
    phase: str = next(reversed(_phases))
    return phase == "start"


def run_or_defer(work: Callable[[], object]) -> None:
    """Run the work now, or, while the collector runs, defer it."""
    if is_collecting():
        deferred.append(work)
    else:
        work()


def defer(work: Callable[[], object]) -> None:
    deferred.append(work)


def run_deferred() -> None:
    """Run the deferred work. Errors are logged: it is not the caller's work."""
    while deferred and not is_collecting():
        try:
            work = deferred.popleft()
        except IndexError:
            return
        try:
            work()
        except Exception as error:
            _logger.warning("deferred work of a dropped request failed with %s", type(error).__name__)
