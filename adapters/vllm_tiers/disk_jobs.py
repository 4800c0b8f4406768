"""Threads for jobs of many small steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable


class ChunkJob:
    """Calls of `step` with 0 to `steps` - 1, concurrent if `urgent`. Without an `id` their end is not told."""

    __slots__ = ("begun", "id", "running", "seconds", "step", "urgent", "worked")

    def __init__(self, id: int | None, steps: int, step: Callable[[int], bool], *, urgent: bool = False) -> None:
        self.id = id
        self.step = step
        self.urgent = urgent
        self.worked = [False] * steps
        self.seconds = 0.0
        self.begun = 0
        self.running = 0

    @property
    def ended(self) -> bool:
        return self.begun == len(self.worked) and not self.running


class JobThreads:
    """Runs urgent jobs first, even between steps of others. A step that raises has failed. Thread-safe."""

    def __init__(self, threads: int, name: str, logger: logging.Logger) -> None:
        self._logger = logger
        self._urgent: deque[ChunkJob] = deque()
        self._others: deque[ChunkJob] = deque()
        self._ended: deque[tuple[int, ChunkJob]] = deque()
        self._unended = 0
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        return bool(self._unended or self._ended)

    def add(self, job: ChunkJob) -> None:
        """While closing, jobs end at once as failed."""
        with self._changed:
            self._unended += 1
            if self._closing or not job.worked:
                job.begun = len(job.worked)
                self._end(job)
                return
            (self._urgent if job.urgent else self._others).append(job)
            self._changed.notify_all()

    def take_ended(self) -> list[tuple[int, ChunkJob]]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def wait(self, seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unended, seconds)

    def close(self, patience_s: float = 0.0) -> None:
        """Drop steps that have not begun after `patience_s`."""
        self.wait(patience_s)
        with self._changed:
            self._closing = True
            for job in (*self._urgent, *self._others):
                job.begun = len(job.worked)
                if job.ended:
                    self._end(job)
            self._urgent.clear()
            self._others.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._urgent or self._others)
                if not self._urgent and not self._others:
                    return
                job = (self._urgent or self._others).popleft()
                step = job.begun
                job.begun += 1
                job.running += 1
                if job.urgent and job.begun < len(job.worked):
                    self._urgent.appendleft(job)
            started = time.perf_counter()
            try:
                worked = job.step(step)
            except Exception:
                self._logger.exception("a step of the disk tier failed")
                worked = False
            seconds = time.perf_counter() - started
            with self._changed:
                job.worked[step] = worked
                job.seconds += seconds
                job.running -= 1
                if self._closing:
                    job.begun = len(job.worked)
                if job.ended:
                    self._end(job)
                elif not job.urgent:
                    self._others.appendleft(job)
                    self._changed.notify()

    def _end(self, job: ChunkJob) -> None:
        if job.id is not None:
            self._ended.append((job.id, job))
        self._unended -= 1
        self._changed.notify_all()
