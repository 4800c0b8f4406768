"""Equal servers with one queue."""

from __future__ import annotations

import asyncio

__all__ = ["Servers"]


class Servers:
    """`count` servers; jobs are served in the order of their arrival. `busy_s`: of all servers together. Raises
    ValueError for less than one server."""

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        self.busy_s = 0.0
        self.served = 0
        self._free = asyncio.Semaphore(count)

    async def serve(self, seconds: float) -> None:
        """Wait for a server, and occupy it. A job that is cancelled leaves at once."""
        async with self._free:
            now = asyncio.get_running_loop().time
            started_s = now()
            try:
                await asyncio.sleep(seconds)
                self.served += 1
            finally:
                self.busy_s += now() - started_s
