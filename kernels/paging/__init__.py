"""Paged KV: a pool of counted blocks, and copies between pools."""

from ragorder.kernels.paging.base import Transfer, Transfers
from ragorder.kernels.paging.make import make_transfers
from ragorder.kernels.paging.pool import BlockPool, OutOfBlocksError
from ragorder.kernels.paging.shape import KVShape
from ragorder.kernels.paging.stream import StreamTransfers
from ragorder.kernels.paging.thread import ThreadTransfers

__all__ = [
    "BlockPool",
    "KVShape",
    "OutOfBlocksError",
    "StreamTransfers",
    "ThreadTransfers",
    "Transfer",
    "Transfers",
    "make_transfers",
]
