"""Copies within host memory on a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from ragorder.kernels.paging.base import runs
from ragorder.kernels.paging.pool import BlockPool

__all__ = ["ThreadTransfers"]

_logger = logging.getLogger("ragorder.kernels")


class ThreadTransfers:
    def __init__(self) -> None:
        # NumPy copies on this thread alone and without Python's lock; PyTorch would start a second set of threads,
        # which would compete with those that compute.
        self._waiting: SimpleQueue[_ThreadTransfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ragorder-kv-copies", daemon=True)
        self._thread.start()

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> _ThreadTransfer:
        transfer = _ThreadTransfer(source, target, list(runs(source_blocks, target_blocks)))
        self._waiting.put(transfer)
        return transfer

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (transfer := self._waiting.get()) is not None:
            transfer.copy()


class _ThreadTransfer:
    def __init__(self, source: BlockPool, target: BlockPool, pieces: list[tuple[int, int, int]]) -> None:
        self.failed = False
        self._source = source
        self._target = target
        self._pieces = pieces
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def fence(self) -> None:
        self._ended.wait()

    def copy(self) -> None:
        try:
            source, target = self._source.rows(), self._target.rows()
            for first, into, count in self._pieces:
                target[into : into + count] = source[first : first + count]
        except Exception:
            self.failed = True
            _logger.exception("copying %d pieces of KV failed", len(self._pieces))
        finally:
            self._ended.set()
