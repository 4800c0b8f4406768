"""Recovery from failed steps (RAGCache section 6)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ragorder.kernels.engine.request import DeviceLostError, Fault, describe, fault_of
from ragorder.kernels.engine.runner import ModelRunner
from ragorder.kernels.engine.scheduler import Scheduler
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine.stats import EngineCounters

__all__ = ["Ended", "FailedSteps"]

_logger = logging.getLogger("ragorder.kernels.engine")

Ended = list[tuple[Sequence, str, Fault]]
"""Requests removed from the scheduler, with reason and fault."""


class FailedSteps:
    """Handles failed steps. `lost` is why the device cannot be used any more, or None."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        counters: EngineCounters,
        max_retries: int,
        forget_device: Callable[[], None],
    ) -> None:
        self.lost: str | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._counters = counters
        self._max_retries = max_retries
        self._forget_device = forget_device

    def check_device(self) -> None:
        if self.lost is not None:
            raise DeviceLostError(self.lost)

    def recover(
        self, sequences: list[Sequence], error: Exception, what: str, shrink: Callable[[], bool] = lambda: False
    ) -> Ended:
        """Requeue failed work, after a memory shortage in smaller steps if it can `shrink`. Return the requests without
        retries left. Raises DeviceLostError."""
        fault, why = fault_of(error), describe(error, what)
        if fault == "other":
            return self.fail(sequences, error, what)
        self._count(len(sequences), why)
        try:
            if fault == "memory" and shrink():
                sequences = []
            elif fault == "disk":
                # KV of earlier steps is intact.
                self._scheduler.requeue()
            else:
                self._forget_device()
            self._runner.recover()
        except Exception as failure:
            self.lost = f"{why}, and the device cannot be used again ({type(failure).__name__}): start another process"
            _logger.error("the device is lost: %s", self.lost)
            raise DeviceLostError(self.lost) from error
        return [(each, ended, fault) for each in sequences if (ended := self._retry(each, why)) is not None]

    def fail(self, sequences: list[Sequence], error: BaseException, what: str) -> Ended:
        why = describe(error, what)
        self._count(len(sequences), why)
        self._scheduler.fail(sequences)
        return [(sequence, why, "other") for sequence in sequences]

    def _retry(self, sequence: Sequence, why: str) -> str | None:
        sequence.failures += 1
        if sequence.failures <= self._max_retries:
            sequence.suspect = sequence.failures > 1
            self._counters.retries += 1
            return None
        self._scheduler.finish(sequence)
        retries = f", and so did its retries ({self._max_retries} of them: max_retries)"
        return why + retries * (self._max_retries > 0)

    def _count(self, requests: int, why: str) -> None:
        _logger.error("a step of %d requests failed: %s", requests, why)
        self._counters.failed_steps += 1
