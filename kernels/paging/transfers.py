"""Copies of KV blocks between pools, concurrent with computation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

import torch

from ragorder.kernels.paging.pool import BlockPool, runs

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""The same bytes in two pools."""


class Transfer(Protocol):
    """A running copy. Do not write to its source, and reuse neither side."""

    @property
    def done(self) -> bool: ...

    @property
    def failed(self) -> bool:
        """Ended in an error: the target may hold anything."""

    def wait(self) -> None:
        """Block until it has ended. Any thread may call this."""

    def fence(self) -> None:
        """Order later computations after the copy. Blocks only on a CPU."""


class Transfers(Protocol):
    """Copies in order of their starts, each after all computations queued before."""

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> Transfer:
        """Copy blocks pairwise between pools of one shape."""

    def close(self) -> None:
        """Wait for running copies, and stop."""


_logger = logging.getLogger("ragorder.kernels")


def _pairs(source: BlockPool, target: BlockPool) -> tuple[_Pairs, _Pairs]:
    if source.shape.block_bytes != target.shape.block_bytes:
        raise ValueError(f"blocks of {source.shape.block_bytes} bytes are no blocks of {target.shape.block_bytes}")
    in_host: _Pairs = []
    across: _Pairs = []
    for one, first, here in source.parts:
        for other, into, there in target.parts:
            begin, end = max(first, into), min(first + one.shape[1], into + other.shape[1])
            if begin < end:
                pairs = in_host if here.type == there.type == "cpu" else across
                pairs.append((one[:, begin - first : end - first], other[:, begin - into : end - into]))
    return in_host, across


class ThreadTransfers:
    def __init__(self) -> None:
        # NumPy releases Python's lock on this one thread. PyTorch would start threads that compete with the
        # computation.
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
            self._source.settle()
            for one, other in _pairs(self._source, self._target)[0]:
                source, target = one.numpy(), other.numpy()
                for first, into, count in self._pieces:
                    target[into : into + count] = source[first : first + count]
        except Exception:
            self.failed = True
            _logger.exception("copying %d pieces of KV failed", len(self._pieces))
        finally:
            self._ended.set()


class StreamTransfers:
    """One stream per direction; a thread copies within the host, whose pool must be pinned. A copy waits for the
    caller's stream, not for the other direction: do not copy blocks still being written."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._into = torch.cuda.Stream(self._device)
        self._out_of = torch.cuda.Stream(self._device)
        self._within_host = ThreadTransfers()

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> Transfer:
        if source.device.type == target.device.type == "cpu":
            return self._within_host.start(source, source_blocks, target, target_blocks)
        stream = self._out_of if target.device.type == "cpu" else self._into
        stream.wait_stream(torch.cuda.current_stream(self._device))
        in_host, across = _pairs(source, target)
        with torch.cuda.stream(stream):
            for one, other in across:
                for first, into, count in runs(source_blocks, target_blocks):
                    _copy(one[first : first + count], other[into : into + count])
            # Blocking, so that a waiting thread sleeps.
            ended = torch.cuda.Event(blocking=True)
            ended.record(stream)
        host = self._within_host.start(source, source_blocks, target, target_blocks) if in_host else None
        return _StreamTransfer(ended, self._device, host, source, target)

    def close(self) -> None:
        self._into.synchronize()
        self._out_of.synchronize()
        self._within_host.close()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_contiguous() and target.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    # Rows of pinned memory that are apart would be gathered in other memory first.
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)


class _StreamTransfer:
    def __init__(
        self, ended: torch.cuda.Event, device: torch.device, host: _ThreadTransfer | None, *pools: BlockPool
    ) -> None:
        self._ended = ended
        self._device = device
        self._host = host
        # Keeps a staging pool alive while it is read.
        self._pools = pools

    @property
    def failed(self) -> bool:
        # A failed copy on a GPU is an error of the whole context, which the next call raises.
        return self._host is not None and self._host.failed

    @property
    def done(self) -> bool:
        return bool(self._ended.query()) and (self._host is None or self._host.done)

    def wait(self) -> None:
        self._ended.synchronize()
        if self._host is not None:
            self._host.wait()

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        if self._host is not None:
            self._host.wait()


def make_transfers(device: torch.device | str) -> Transfers:
    kind = torch.device(device).type
    if kind == "cuda":
        return StreamTransfers(device)
    if kind == "cpu":
        return ThreadTransfers()
    raise ValueError(f"KV cannot be copied to or from {kind!r}: choose cuda or cpu")
