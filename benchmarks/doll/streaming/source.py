"""Source of weights at a chosen speed, by a token bucket."""

from __future__ import annotations

import threading
import time
from random import Random

from ragorder.kernels.offload.checkpoint import Checkpoint, TensorEntry

__all__ = ["ThrottledSource", "TokenBucket"]


class TokenBucket:
    """Bytes pass at `bytes_s`, one reader's after another's. A reader that asks late, by at most `burst_s`, loses
    nothing: a device goes on while threads wait for a processor. Any thread may call."""

    def __init__(self, bytes_s: float, burst_s: float = 0.0) -> None:
        self.bytes_s = bytes_s
        self.burst_s = burst_s
        self.free_s = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: float) -> float:
        """When so many bytes will have passed, by `time.perf_counter`."""
        with self._lock:
            self.free_s = max(time.perf_counter() - self.burst_s, self.free_s) + nbytes / self.bytes_s
            return self.free_s


class ThrottledSource:
    """A checkpoint read through a token bucket, at `bytes_s`. With `jitter` each pass over a layer takes up to that
    share more or less, by a number that depends on the pass alone: all policies see the same. `cold`: the system's copy
    of what was read is dropped at once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        bytes_s: float,
        jitter: float,
        seed: int,
        *,
        cold: bool = True,
        burst_s: float = 0.0,
    ) -> None:
        self._checkpoint = checkpoint
        self._bucket = TokenBucket(bytes_s, burst_s)
        self._jitter = jitter
        self._seed = seed
        self._cold = cold
        self._reads: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The same numbers again."""
        with self._lock:
            self._reads.clear()

    def read(self, entry: TensorEntry, start: int, into: memoryview) -> None:
        layer = ".".join(entry.name.split(".")[:3])
        with self._lock:
            key = (entry.name, start)
            count = self._reads[key] = self._reads.get(key, 0) + 1
            share = 1 + self._jitter * Random(f"{self._seed} {layer} {count}").uniform(-1, 1)
            until_s = self._bucket.take(share * len(into))
        self._checkpoint.read(entry, start, into)
        if self._cold:
            self._checkpoint.forget_pages(entry, start, len(into))
        time.sleep(max(0.0, until_s - time.perf_counter()))
