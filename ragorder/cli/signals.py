"""Signals that end a process."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

__all__ = ["end_on_signals"]


def end_on_signals() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that contexts close and child processes end, and the SIGHUP of a
    closed terminal do what SIGTERM does.

    Without effect outside the main thread, or on a signal that has a handler already or is ignored (nohup).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Windows has none.
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGTERM)
