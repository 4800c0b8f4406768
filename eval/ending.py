"""Being told to end."""

from __future__ import annotations

import signal
import sys
import threading

__all__ = ["end_on_sigterm"]


def end_on_sigterm() -> None:
    """A process that is told to end ends what it has started, as after Ctrl-C: the stack unwinds, contexts close.

    Left alone where somebody else listens for it already, or outside the main thread, where nobody can.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
