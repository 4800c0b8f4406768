"""Paged KV: pools of reference-counted blocks, and copies between them."""

from ragorder.kernels.paging.layered import LayeredPool
from ragorder.kernels.paging.places import Gathered, Places
from ragorder.kernels.paging.pool import BlockPool, KVShape, OutOfBlocksError, StepBlocks
from ragorder.kernels.paging.transfers import StreamTransfers, ThreadTransfers, Transfer, Transfers, make_transfers

__all__ = [
    "BlockPool",
    "Gathered",
    "KVShape",
    "LayeredPool",
    "OutOfBlocksError",
    "Places",
    "StepBlocks",
    "StreamTransfers",
    "ThreadTransfers",
    "Transfer",
    "Transfers",
    "make_transfers",
]
