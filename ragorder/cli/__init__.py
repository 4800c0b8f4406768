"""The command line `ragorder`."""

from __future__ import annotations

import sys

try:
    from ragorder.cli.main import main
except KeyboardInterrupt:
    # click, which would say so, is not there yet.
    sys.exit("Aborted!")

__all__ = ["main"]
