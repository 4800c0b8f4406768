"""Copies between a GPU and the host on streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragorder.kernels.paging.base import Transfer, runs
from ragorder.kernels.paging.pool import BlockPool
from ragorder.kernels.paging.thread import ThreadTransfers

__all__ = ["StreamTransfers"]


class StreamTransfers:
    """A stream for each direction; copies within the host use a thread.

    A copy waits for the caller's stream, not for the other direction: do not start from blocks still being written. The
    host's pool must be pinned.
    """

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
        with torch.cuda.stream(stream):
            for first, into, count in runs(source_blocks, target_blocks):
                target.kv[into : into + count].copy_(source.kv[first : first + count], non_blocking=True)
            # Blocking: a waiting thread sleeps.
            ended = torch.cuda.Event(blocking=True)
            ended.record(stream)
        return _StreamTransfer(ended, self._device, source, target)

    def close(self) -> None:
        self._into.synchronize()
        self._out_of.synchronize()
        self._within_host.close()


class _StreamTransfer:
    # A copy that fails on a GPU is an error of the whole context, which the next call raises.
    failed = False

    def __init__(self, ended: torch.cuda.Event, device: torch.device, *pools: BlockPool) -> None:
        self._ended = ended
        self._device = device
        # Keeps a staging pool alive while it is read.
        self._pools = pools

    @property
    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
