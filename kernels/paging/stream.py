"""Copies between a GPU and the host: streams of their own make them, beside the one that computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragorder.kernels.paging.base import Transfer, runs
from ragorder.kernels.paging.pool import BlockPool
from ragorder.kernels.paging.thread import ThreadTransfers

__all__ = ["StreamTransfers"]


class StreamTransfers:
    """One stream into the GPU and one out of it, as the bus carries both ways at once. What is within host memory is
    left to a thread.

    A copy waits, on the GPU, for all that the caller's current stream was given before: whoever wrote the source, and
    whoever still reads what the target held. Copies of the two directions do not wait for one another: do not start one
    from where another one still writes.

    The host's pool must be pinned; from other memory the driver copies piece by piece, and the caller waits for it.
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
            # Blocking: whoever waits sleeps.
            ended = torch.cuda.Event(blocking=True)
            ended.record(stream)
        return _StreamTransfer(ended, self._device, source, target)

    def close(self) -> None:
        self._into.synchronize()
        self._out_of.synchronize()
        self._within_host.close()


class _StreamTransfer:
    # A copy that fails on a GPU is an error of the whole context: whatever asks for it next raises it.
    failed = False

    def __init__(self, ended: torch.cuda.Event, device: torch.device, *pools: BlockPool) -> None:
        self._ended = ended
        self._device = device
        # A staging pool must not go while it is read.
        self._pools = pools

    @property
    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
