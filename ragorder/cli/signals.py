"""Signals that end a process."""

from __future__ import annotations

import signal
import sys
import threading

__all__ = ["end_on_sigterm"]


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that contexts close and child processes end.

    Without effect outside the main thread, or where SIGTERM has a handler already.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
