"""Choice of transfers by device."""

from __future__ import annotations

import torch

from ragorder.kernels.paging.base import Transfers
from ragorder.kernels.paging.stream import StreamTransfers
from ragorder.kernels.paging.thread import ThreadTransfers

__all__ = ["make_transfers"]


def make_transfers(device: torch.device | str) -> Transfers:
    """Raises ValueError for devices other than CUDA and CPU."""
    kind = torch.device(device).type
    if kind == "cuda":
        return StreamTransfers(device)
    if kind == "cpu":
        return ThreadTransfers()
    raise ValueError(f"KV cannot be moved to and from {kind!r}: take cuda or cpu")
